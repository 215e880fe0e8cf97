"""Responses over HTTP: what a client hears again, later, and from behind any event."""

import contextlib
import json
from collections.abc import Iterator

import httpx
import pytest
import redis

from engine.sampling_params import SamplingParams
from jobs import claims, sweep
from jobs.claims import Held
from jobs.database import Database
from jobs.lifecycle import ErrorCode, JobState, error_object
from jobs.streams import Run, StreamWriter, to_lines
from tests.api.conftest import MODEL, completion, error_of, serving
from tests.api.test_completions import FAILED, newest
from worker.generation import outcome_of
from worker.messages import Ended, Sample
from worker.prompt import Prompt

URL = "/v1/responses"
DAY_S = 86_400.0
PIECES = ["Once", "", " upon", " a", " ti", "me"]


@pytest.fixture
def writer(sqlite_settings):
    writer = StreamWriter(sqlite_settings)
    writer.start()
    yield writer
    writer.close(5)


def body(**values) -> dict:
    return {"model": MODEL, "input": "hello", "background": True, "stream": True} | values


def output(record, text: str) -> dict:
    """As a worker makes it."""
    sample = Sample(0, text, "stop", None)
    ended = Ended("k", [sample], 3, 0, len(PIECES), None)
    made = outcome_of(
        ended, Prompt(token_ids=[1], params=SamplingParams(max_tokens=8)), None,
        job_id=record.id, url=URL, model=MODEL, created=record.created_at, body=record.body,
    )  # fmt: skip
    return made.output


@contextlib.contextmanager
def hearing(client: httpx.Client, response_id=None, after=None, **values) -> Iterator[Iterator]:
    """Events of a new response, or of one that is there."""
    if response_id is None:
        call = client.stream("POST", URL, json=body(**values))
    else:
        query = {"stream": "true"} | ({} if after is None else {"starting_after": after})
        call = client.stream("GET", f"{URL}/{response_id}", params=query)
    with call as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        yield (json.loads(line[6:]) for line in lines if line.startswith("data: {"))


def hear(client, response_id, after=None) -> list[dict]:
    with hearing(client, response_id, after) as events:
        return list(events)


def resp(job) -> str:
    return job.id.replace("job_", "resp_")


def told(client, hands, writer) -> list[dict]:
    """A response from its first event to its last, heard as it came."""
    with hearing(client) as events:
        claimed = hands.claim(newest(hands).id)
        writer.send([Run(claimed.id, 0, 0, PIECES[:3])])
        writer.send([Run(claimed.id, 0, 3, PIECES[3:])])
        heard = [next(events)]
        while sum(e["type"].endswith("text.delta") for e in heard) < 5:
            heard.append(next(events))
        finish(hands, claimed)
        return heard + list(events)


def finish(hands, claimed, text="Once upon a time.") -> None:
    lines = to_lines([Run(claimed.id, 0, 0, PIECES)])
    hands.finish(
        claimed, output=output(claimed, text), finish_reason="stop",
        completion_tokens=len(PIECES), pieces=lines,
    )  # fmt: skip


def test_the_same_events_are_heard_a_day_later_from_behind_each(
    sqlite_client, sqlite_settings, hands, writer, monkeypatch
):
    heard = told(sqlite_client, hands, writer)
    assert [event["sequence_number"] for event in heard] == list(range(len(heard)))
    assert heard[-1]["type"] == "response.completed"
    job = newest(hands)
    clock = Database.clock
    monkeypatch.setattr(Database, "clock", lambda self, c: clock(self, c) + DAY_S)
    hands.call(sweep.purge, idempotency_ttl_s=sqlite_settings.idempotency_ttl_s)
    with redis.Redis.from_url(sqlite_settings.redis_url) as client:
        client.flushall()
    with serving(sqlite_settings) as later:
        for after in range(len(heard)):
            assert hear(later, resp(job), after) == heard[after + 1 :]
        assert [event["type"] for event in hear(later, resp(job))] == [e["type"] for e in heard]


def test_who_comes_late_hears_it_all_though_redis_has_lost_some(
    sqlite_client, sqlite_settings, hands, writer
):
    with hearing(sqlite_client) as events:
        next(events)
        claimed = hands.claim(newest(hands).id)
    held = Held(claimed.id, claimed.fence)
    lines = to_lines([Run(claimed.id, 0, 0, PIECES[:2])])
    beat = {"lease_s": 30.0, "stats": {}, "held": [held]}
    hands.call(claims.beat, "w1", checkpoints={held: [[1, 2]]}, pieces={held: lines}, **beat)
    writer.send([Run(claimed.id, 0, 4, PIECES[4:5])])  # what came between is lost
    with hearing(sqlite_client, resp(claimed)) as events:
        heard = [next(events) for _ in range(6)]
        assert heard[-1]["delta"] == "Once"
        writer.send([Run(claimed.id, 0, 1, PIECES[1:5])])  # told again by a later attempt
        writer.send([Run(claimed.id, 0, 5, PIECES[5:])])
        heard += [next(events) for _ in range(4)]
        finish(hands, claimed)
        heard += list(events)
    assert [event["sequence_number"] for event in heard] == list(range(len(heard)))
    deltas = [e["delta"] for e in heard if e["type"].endswith("text.delta")]
    assert deltas == ["Once", " upon", " a", " ti", "me", "."]


ENDINGS = ["cancel", "fail", "delete"]


@pytest.mark.parametrize("how", ENDINGS)
def test_whatever_ends_it_the_stream_has_one_end_whenever_it_is_heard(
    sqlite_client, hands, writer, how
):
    with hearing(sqlite_client) as events:
        claimed = hands.claim(newest(hands).id)
        writer.send([Run(claimed.id, 0, 0, PIECES[:3])])
        heard = [next(events) for _ in range(7)]
        assert heard[-1]["delta"] == " upon"
        if how == "cancel":
            sqlite_client.post(f"{URL}/{resp(claimed)}/cancel")
        elif how == "delete":
            sqlite_client.delete(f"{URL}/{resp(claimed)}")
        else:
            error = error_object(ErrorCode.ENGINE_ERROR, "no")
            hands.finish(claimed, error=error, **FAILED)
        heard += list(events)
    assert [event["sequence_number"] for event in heard] == list(range(len(heard)))
    if how == "delete":
        assert heard[-1]["type"] == "response.failed"
        assert heard[-1]["response"]["status"] == "cancelled"
        assert heard[-1]["response"]["error"]["message"] == "the response was deleted"
        assert error_of(sqlite_client.get(f"{URL}/{resp(claimed)}"))["code"] == "response_not_found"
        return
    assert heard[-1]["type"] == "response.failed"
    state = "cancelled" if how == "cancel" else "failed"
    assert heard[-1]["response"]["status"] == state
    # the row never got the tokens that were heard: whoever goes on from them gets the end alone
    again = hear(sqlite_client, resp(claimed), after=len(heard) - 2)
    assert [(e["sequence_number"], e["type"]) for e in again] == [
        (heard[-1]["sequence_number"], "response.failed")
    ]


def test_who_leaves_ends_only_what_is_not_stored(sqlite_client, hands):
    kept = body(background=False)
    for values, ends in ((kept, False), (kept | {"store": False}, True)):
        with contextlib.suppress(httpx.ReadTimeout):
            sqlite_client.post(URL, json=values | {"stream": False}, timeout=0.5)
        job = newest(hands)
        if ends:
            assert newest(hands, JobState.CANCELLED).id == job.id
        else:
            finish(hands, hands.claim(job.id))


def test_another_tenant_finds_nothing_and_a_job_of_another_endpoint_is_no_response(
    sqlite_settings, sqlite_client, hands
):
    job = sqlite_client.post("/v1/jobs", json=completion()).json()
    for method, path in (
        ("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"),
        ("GET", "?stream=true"),
    ):  # fmt: skip
        path = f"{URL}/{job['id'].replace('job_', 'resp_')}{path}"
        assert sqlite_client.request(method, path).status_code == 404


def test_a_job_may_be_a_response_but_not_go_on_from_one(sqlite_client, hands):
    job = {"url": URL, "body": {"model": MODEL, "input": "hello"}}
    accepted = sqlite_client.post("/v1/jobs", json=job).json()
    claimed = hands.claim(accepted["id"])
    finish(hands, claimed, "hi")
    body_ = sqlite_client.get(f"/v1/jobs/{accepted['id']}").json()["response"]["body"]
    assert (body_["object"], body_["status"]) == ("response", "completed")
    job["body"]["previous_response_id"] = "resp_1"
    error = error_of(sqlite_client.post("/v1/jobs", json=job))
    assert error["param"] == "body.previous_response_id"


def test_until_its_end_a_response_says_where_it_stands(client, hands):
    made = [client.post(URL, json=body(stream=False)).json() for _ in range(2)]
    assert [each["tokenmill"]["queue_position"] for each in made] == [1, 2]
    found = client.get(f"{URL}/{made[1]['id']}").json()["tokenmill"]
    job = client.get(f"/v1/jobs/{found['job_id']}").json()
    assert set(found) == {"job_id", "queue_position", "start_s", "eta_s"}
    assert (found["queue_position"], job["queue_position"]) == (2, 2)
    claimed = hands.claim(found["job_id"])
    running = client.get(f"{URL}/{made[1]['id']}").json()
    assert (running["status"], running["tokenmill"]["queue_position"]) == ("in_progress", None)
    hands.finish(claimed, output=made[1] | {"status": "completed"})
    assert client.post(f"{URL}/{made[0]['id']}/cancel").json().get("tokenmill") is None
