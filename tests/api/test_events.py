"""The stream of a job's status: it ends with the job, and outlives what is around it."""

import json
import threading
import time

import httpx

from tests.api.conftest import error_of, submit


def events_of(client: httpx.Client, job_id: str) -> list[tuple[str, dict]]:
    """Every event until the stream ends."""
    found = []
    with client.stream("GET", f"/v1/jobs/{job_id}/events", timeout=30) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-request-id"]
        name = ""
        for line in reply.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, json.loads(line.removeprefix("data: "))))
    return found


def test_an_ended_job_is_two_events(client, hands):
    job = submit(client)
    hands.finish(hands.claim(job["id"]))
    first, last = events_of(client, job["id"])
    assert first == ("status", {"id": job["id"], "status": "succeeded", "attempt": 1})
    read = client.get(f"/v1/jobs/{job['id']}").json()
    assert len(read.pop("attempts")) == 1  # told where a job is read by its id
    assert last == ("job", read)


def test_status_changes_are_seen_until_the_end(client, hands):
    job = submit(client)
    events: list = []
    thread = threading.Thread(target=lambda: events.extend(events_of(client, job["id"])))
    thread.start()
    time.sleep(1.5)
    claimed = hands.claim(job["id"])
    time.sleep(1.5)
    hands.finish(claimed)
    thread.join(30)
    assert [name for name, _ in events] == ["status", "status", "status", "job"]
    assert [each["status"] for _, each in events] == ["queued", "running", "succeeded", "succeeded"]
    assert events[-1][1]["response"]["body"]


def test_the_stream_takes_no_parameters(sqlite_client):
    job = submit(sqlite_client)
    reply = sqlite_client.get(f"/v1/jobs/{job['id']}/events?starting_after=3")
    assert reply.status_code == 400
    assert error_of(reply)["param"] == "starting_after"


def test_a_client_that_leaves_frees_its_place(sqlite_client):
    job = submit(sqlite_client)
    with sqlite_client.stream("GET", f"/v1/jobs/{job['id']}/events") as reply:
        assert next(reply.iter_lines()) == "event: status"
    time.sleep(1)
    assert sqlite_client.get(f"/v1/jobs/{job['id']}").json()["status"] == "queued"
