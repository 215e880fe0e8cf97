"""Several prompts in one call of the older completions: jobs that live and end together."""

import contextlib

import httpx

from jobs import store
from jobs.lifecycle import ErrorCode, JobState, error_object
from jobs.streams import Run, StreamWriter
from tests.api.conftest import completion, error_of, until
from tests.api.test_completions import FAILED, calling, frames

URL = "/v1/completions"
PROMPTS = ["the quick", "brown fox", "jumps"]


def listed(hands, num=3, state=None) -> list:
    """The call's jobs, in the order of its prompts."""
    found: list = []

    def seen() -> bool:
        with hands.database.read() as connection:
            found[:] = store.list_jobs(connection, tenant="default", status=state, limit=10)
        return len(found) == num

    until(seen)
    return found[::-1]


def said(text: str, prompt_tokens: int, n: int = 1) -> dict:
    choices = [
        {"index": i, "text": f"{text}{i}", "finish_reason": "stop", "logprobs": None}
        for i in range(n)
    ]
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 2, "total_tokens": 9,
             "prompt_tokens_details": {"cached_tokens": prompt_tokens - 1}}  # fmt: skip
    return {"id": f"cmpl-{text}", "choices": choices, "usage": usage}


def test_choices_are_in_the_order_of_the_prompts_whoever_ends_first(sqlite_client, hands):
    body = completion(prompt=PROMPTS, n=2, priority=2)["body"]
    with calling(sqlite_client, URL, body) as replies:
        jobs = listed(hands)
        assert [job.priority for job in jobs] == [2, 2, 2]
        for job, text in reversed(list(zip(jobs, "abc", strict=True))):
            hands.finish(hands.claim(job.id), output=said(text, ord(text) - 90, n=2))
    reply = replies[0].json()
    texts = [(choice["index"], choice["text"]) for choice in reply["choices"]]
    assert texts == list(enumerate(["a0", "a1", "b0", "b1", "c0", "c1"]))
    assert reply["id"] == "cmpl-a"
    assert reply["usage"] == {
        "prompt_tokens": 7 + 8 + 9, "completion_tokens": 6, "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 6 + 7 + 8},
    }  # fmt: skip


def test_one_that_fails_fails_the_call_and_ends_the_others(sqlite_client, hands):
    with calling(sqlite_client, URL, completion(prompt=PROMPTS)["body"]) as replies:
        first, second, third = listed(hands)
        hands.finish(hands.claim(first.id), output=said("a", 1))
        error = error_object(ErrorCode.ENGINE_ERROR, "no")
        hands.finish(hands.claim(second.id), error=error, **FAILED)
    assert (replies[0].status_code, error_of(replies[0])["code"]) == (500, "engine_error")
    assert [job.id for job in listed(hands, 1, JobState.CANCELLED)] == [third.id]
    assert [job.id for job in listed(hands, 1, JobState.SUCCEEDED)] == [first.id]


def test_who_leaves_ends_them_all(sqlite_client, hands):
    for streams in (False, True):
        with contextlib.suppress(httpx.ReadTimeout):
            body = completion(prompt=PROMPTS, stream=streams)["body"]
            sqlite_client.post(URL, json=body, timeout=0.5)
        listed(hands, 6 if streams else 3, JobState.CANCELLED)


def test_the_same_key_gives_the_same_jobs(sqlite_client, hands):
    body, key = completion(prompt=PROMPTS)["body"], {"idempotency-key": "k"}
    with contextlib.suppress(httpx.ReadTimeout):
        sqlite_client.post(URL, json=body, headers=key, timeout=0.3)
    with calling(sqlite_client, URL, body, **key) as replies:
        for job, text in zip(listed(hands), "abc", strict=True):
            hands.finish(hands.claim(job.id), output=said(text, 1))
    assert [choice["text"] for choice in replies[0].json()["choices"]] == ["a0", "b0", "c0"]
    assert replies[0].headers["idempotent-replayed"] == "true"
    listed(hands, 3)


def test_a_stream_tells_each_prompts_text_under_its_own_index(
    sqlite_client, sqlite_settings, hands
):
    writer = StreamWriter(sqlite_settings)
    writer.start()
    body = completion(prompt=PROMPTS[:2], n=2, stream=True)["body"]
    with sqlite_client.stream("POST", URL, json=body) as reply:
        first, second = listed(hands, 2)
        lines = reply.iter_lines()
        claimed = hands.claim(second.id)
        writer.send([Run(second.id, 1, 0, ["early "])])
        assert '"index":3,"text":"early "' in next(line for line in lines if "data" in line)
        output = said("b", 1, n=2)
        output["choices"][1]["text"] = "early bird"
        hands.finish(claimed, output=output)
        hands.finish(hands.claim(first.id), output=said("a", 1, n=2))
        rest = [line for line in lines if line.startswith("data")]
    writer.close(5)
    assert rest[-1] == "data: [DONE]"
    assert sum('"text":"bird"' in line and '"index":3' in line for line in rest) == 1
    assert sum('"finish_reason":"stop"' in line for line in rest) == 4


def test_a_stream_of_which_one_job_fails_ends_with_its_error(sqlite_client, hands):
    body = completion(prompt=PROMPTS[:2], stream=True)["body"]
    with sqlite_client.stream("POST", URL, json=body) as reply:
        first, second = listed(hands, 2)
        error = error_object(ErrorCode.ENGINE_ERROR, "no")
        hands.finish(hands.claim(second.id), error=error, **FAILED)
        told = frames(reply)
    assert told[-1]["error"]["code"] == "engine_error"
    assert [job.id for job in listed(hands, 1, JobState.CANCELLED)] == [first.id]


def test_a_job_of_its_own_has_one_prompt(sqlite_client):
    error = error_of(sqlite_client.post("/v1/jobs", json=completion(prompt=PROMPTS)))
    assert error["param"] == "body.prompt"
