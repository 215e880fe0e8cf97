"""Reading, listing and cancelling jobs."""

import pytest

from jobs import claims
from jobs.events import Channel
from jobs.lifecycle import ErrorCode, JobState, error_object
from tests.api.conftest import MODEL, chat, completion, error_of, submit, until


def test_an_ended_job_carries_the_endpoints_response(client, hands):
    job = submit(client)
    claimed = hands.claim(job["id"])
    running = client.get(f"/v1/jobs/{job['id']}").json()
    assert (running["status"], running["attempt"]) == ("running", 1)
    assert running["started_at"] >= running["created_at"]
    assert running["queue_position"] is None
    assert running["response"] is None
    body = {"object": "text_completion", "choices": []}
    hands.finish(claimed, output=body, prompt_tokens=3, cached_tokens=1, completion_tokens=4)
    ended = client.get(f"/v1/jobs/{job['id']}").json()
    assert ended["status"] == "succeeded"
    assert ended["response"]["status_code"] == 200
    assert ended["response"]["body"] == body
    assert ended["response"]["request_id"]
    assert ended["error"] is None
    assert ended["usage"] == {
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "completion_tokens": 4,
        "wasted_tokens": 0,
        "total_tokens": 7,
    }
    assert set(ended["timings"]) == {"queue_s", "ttft_s", "tpot_s", "total_s"}
    assert ended["timings"]["total_s"] >= ended["timings"]["queue_s"] >= 0


def test_a_failed_job_says_why(client, hands):
    job = submit(client)
    error = error_object(ErrorCode.EXCEEDS_CAPACITY, "1,000 tokens never fit into 512")
    hands.finish(hands.claim(job["id"]), state=JobState.FAILED, error=error, output=None)
    failed = client.get(f"/v1/jobs/{job['id']}").json()
    assert failed["status"] == "failed"
    assert failed["error"] == error
    assert set(failed["error"]) == {"message", "type", "param", "code"}
    assert failed["response"] is None


@pytest.mark.parametrize("job_id", ["job_nobody", "x", "job_" + "a" * 200, "job_%00", "job_é"])
def test_an_unknown_id_is_not_found(client, job_id):
    for reply in (
        client.get(f"/v1/jobs/{job_id}"),
        client.get(f"/v1/jobs/{job_id}?wait=1"),
        client.get(f"/v1/jobs/{job_id}/events"),
        client.post(f"/v1/jobs/{job_id}/cancel"),
    ):
        assert reply.status_code == 404
        assert error_of(reply)["code"] == "job_not_found"


def test_cancel_ends_a_queued_job_and_says_the_same_again(client):
    job = submit(client)
    cancelled = client.post(f"/v1/jobs/{job['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert cancelled["finished_at"] >= cancelled["created_at"]
    again = client.post(f"/v1/jobs/{job['id']}/cancel")
    assert again.status_code == 200
    assert again.json() == cancelled == client.get(f"/v1/jobs/{job['id']}").json()


def test_a_cancelled_running_job_never_shows_an_output(client, hands):
    job = submit(client)
    claimed = hands.claim(job["id"])
    assert client.post(f"/v1/jobs/{job['id']}/cancel").json()["status"] == "cancelled"
    with pytest.raises(AssertionError):
        hands.finish(claimed)  # refused: the fence has moved
    shown = client.get(f"/v1/jobs/{job['id']}").json()
    assert (shown["status"], shown["response"]) == ("cancelled", None)


def test_cancel_leaves_an_ended_job_as_it_is(client, hands):
    job = submit(client)
    hands.finish(hands.claim(job["id"]))
    before = client.get(f"/v1/jobs/{job['id']}").json()
    assert client.post(f"/v1/jobs/{job['id']}/cancel").json() == before


def test_the_list_is_newest_first_and_pages_by_the_last_id(client):
    ids = [submit(client, custom_id=f"row-{i}")["id"] for i in range(7)]
    seen, after, pages = [], None, 0
    while True:
        query = {"limit": 3} | ({"after": after} if after else {})
        page = client.get("/v1/jobs", params=query).json()
        assert page["object"] == "list"
        assert page["first_id"] == page["data"][0]["id"]
        assert page["last_id"] == page["data"][-1]["id"]
        seen += [job["id"] for job in page["data"]]
        pages += 1
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert seen == ids[::-1]
    assert pages == 3


def test_an_empty_list_has_no_first_and_last(sqlite_client):
    listed = sqlite_client.get("/v1/jobs").json()
    expected = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert listed == expected


def test_the_list_filters_by_status_model_and_custom_id(client, hands):
    first = submit(client, custom_id="a")
    second = submit(client, chat(), custom_id="b")
    hands.finish(hands.claim(second["id"]))

    def ids(**query):
        return [job["id"] for job in client.get("/v1/jobs", params=query).json()["data"]]

    assert ids(status="queued") == [first["id"]]
    assert ids(status="succeeded") == [second["id"]]
    assert ids(status="failed") == []
    assert ids(custom_id="a") == [first["id"]]
    assert ids(custom_id="c") == []
    assert ids(model=MODEL) == [second["id"], first["id"]]
    assert ids(model="other") == []
    assert ids(batch_id="batch_x") == []
    assert ids(status="queued", custom_id="b") == []


def test_a_queued_job_says_how_many_are_before_it(client):
    # together: one that came later could find the other on its way already
    both = [completion(), completion() | {"priority": 5}]
    last, first = client.post("/v1/jobs", json=both).json()["data"]
    positions = {job["id"]: job["queue_position"] for job in client.get("/v1/jobs").json()["data"]}
    assert positions == {first["id"]: 1, last["id"]: 2}


def test_a_forecast_appears_once_jobs_have_ended(client, hands):
    for _ in range(6):
        hands.finish(hands.claim(submit(client)["id"]))
    url = f"/v1/jobs/{submit(client)['id']}"
    until(lambda: client.get(url).json()["eta_s"] is not None)  # a forecast is kept for a second
    eta_s = client.get(url).json()["eta_s"]
    assert set(eta_s) == {"low", "high"}
    start_s = client.get(url).json()["start_s"]
    assert 0 <= start_s["low"] <= start_s["high"] < 60
    assert 0 <= eta_s["low"] <= eta_s["high"] < 60


def test_a_job_asked_for_by_its_id_tells_its_attempts(client, hands):
    url = f"/v1/jobs/{submit(client)['id']}"
    assert client.get(url).json()["attempts"] == []
    claimed = hands.claim(url.rpartition("/")[2])
    [going_on] = client.get(url).json()["attempts"]
    assert (going_on["outcome"], going_on["ended_at"]) == (None, None)
    held = claims.Held(claimed.id, claimed.fence)
    checkpoint = {held: [[1, 2, 3]]}
    hands.call(claims.release, [held], crashed=False, max_crashes=3, checkpoints=checkpoint)
    hands.finish(hands.claim(claimed.id), wasted_tokens=2)
    hands.publisher.publish(Channel.ENDED, [claimed.id])
    for query in ("", "?wait=5"):
        first, second = client.get(url + query).json()["attempts"]
        assert (first["outcome"], first["kept_tokens"]) == ("handed_back", 3)
        assert (second["fence"], second["worker"], second["outcome"], second["error"]) == (
            3, hands.worker_id, "succeeded", None,
        )  # fmt: skip
        assert (second["kept_tokens"], second["wasted_tokens"]) == (1, 2)
        assert first["started_at"] <= first["ended_at"] <= second["started_at"]


def test_a_cancel_answers_with_the_attempt_it_ended(client, hands):
    claimed = hands.claim(submit(client)["id"])
    [attempt] = client.post(f"/v1/jobs/{claimed.id}/cancel").json()["attempts"]
    assert attempt["outcome"] == "cancelled"


def test_models_are_listed_in_openais_form(sqlite_client):
    listed = sqlite_client.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == (MODEL, "model", "tokenmill")
    assert model["created"] > 1_600_000_000
    assert model["max_model_len"] == 512
