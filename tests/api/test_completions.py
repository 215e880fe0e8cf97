"""Chat and completions over HTTP: a job that somebody waits for, whole or streamed."""

import contextlib
import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from jobs import claims, store
from jobs.lifecycle import ErrorCode, JobState, error_object
from jobs.settings import Settings
from jobs.streams import Piece, Run, StreamWriter
from tests.api.conftest import Hands, chat, completion, error_of, until

URL = "/v1/chat/completions"
FAILED = {"state": JobState.FAILED, "output": None, "finish_reason": "error"}


def newest(hands: Hands, state: JobState | None = None):
    """The job of the call that is under way."""
    found: list = []

    def seen() -> bool:
        with hands.database.read() as connection:
            found[:] = store.list_jobs(connection, tenant="default", status=state, limit=1)
        return bool(found)

    until(seen)
    return found[0]


@contextlib.contextmanager
def calling(client: httpx.Client, url: str, body: dict, **headers) -> Iterator[list]:
    """A call in a thread; the list has its reply in the end."""
    replies: list = []
    thread = threading.Thread(
        target=lambda: replies.append(client.post(url, json=body, headers=headers, timeout=60))
    )
    thread.start()
    yield replies
    thread.join(60)


def output(text="hello there", **message) -> dict:
    said = {"role": "assistant", "content": text, "refusal": None} | message
    choice = {"index": 0, "message": said, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    return {"object": "chat.completion", "choices": [choice], "usage": usage}


def test_a_call_is_a_job_and_its_reply_the_jobs_output(client, hands):
    body = chat(metadata={"k": "v"}, priority=3, tokenmill={"custom_id": "row-1"})["body"]
    with calling(client, URL, body) as replies:
        job = newest(hands)
        assert (job.priority, job.custom_id, job.metadata) == (3, "row-1", {"k": "v"})
        assert job.deadline_at == pytest.approx(job.created_at + 3600)
        hands.finish(hands.claim(job.id), output=output())
    assert replies[0].status_code == 200
    assert replies[0].json() == output()


ENDINGS = [
    (ErrorCode.INVALID_REQUEST, FAILED, 400, "false"),
    (ErrorCode.COMPILER_BUSY, FAILED, 503, None),
    (ErrorCode.POISONED, FAILED, 500, "false"),
    (ErrorCode.DEADLINE_EXCEEDED, FAILED | {"state": JobState.EXPIRED}, 504, "false"),
]


@pytest.mark.parametrize(("code", "values", "status", "retry"), ENDINGS)
def test_a_failed_job_is_an_error_of_its_kind(sqlite_client, hands, code, values, status, retry):
    with calling(sqlite_client, URL, chat()["body"]) as replies:
        claimed = hands.claim(newest(hands).id)
        hands.finish(claimed, error=error_object(code, "so it is", param="messages"), **values)
    error = error_of(replies[0])
    assert (replies[0].status_code, error["code"], error["param"]) == (status, code, "messages")
    assert replies[0].headers.get("x-should-retry") == retry
    assert (replies[0].headers.get("retry-after") is None) == (status != 503)


def test_a_cancelled_job_is_a_conflict_that_nobody_repeats(sqlite_client, hands):
    with calling(sqlite_client, URL, chat()["body"]) as replies:
        sqlite_client.post(f"/v1/jobs/{newest(hands).id}/cancel")
    assert replies[0].status_code == 409
    assert replies[0].headers["x-should-retry"] == "false"


LEAVES = [({}, {}, True), ({"store": True}, {}, False), ({}, {"idempotency-key": "k"}, False)]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("fields", "headers", "cancelled"), LEAVES)
def test_who_leaves_cancels_the_job_unless_it_is_kept(
    sqlite_client, hands, fields, headers, cancelled, streams
):
    body = chat(stream=streams, **fields)["body"]
    with contextlib.suppress(httpx.ReadTimeout):
        sqlite_client.post(URL, json=body, headers=headers, timeout=0.5)
    job = newest(hands)
    if cancelled:
        assert newest(hands, JobState.CANCELLED).id == job.id
    else:
        hands.finish(hands.claim(job.id), output=output())
        assert newest(hands, JobState.SUCCEEDED).id == job.id


def test_the_same_key_gives_the_same_job_while_it_runs_and_afterwards(sqlite_client, hands):
    body = chat()["body"]
    key = {"idempotency-key": "k"}
    with contextlib.suppress(httpx.ReadTimeout):
        sqlite_client.post(URL, json=body, headers=key, timeout=0.3)
    with calling(sqlite_client, URL, body, **key) as replies:
        hands.finish(hands.claim(newest(hands).id), output=output())
    again = sqlite_client.post(URL, json=body, headers=key)
    assert again.json() == replies[0].json() == output()
    assert again.headers["idempotent-replayed"] == "true"
    other = sqlite_client.post(URL, json=body | {"seed": 1}, headers=key)
    assert other.status_code == 409


BAD = [
    ([], None, None),
    ({"surprise": 1}, "surprise", "unknown_field"),
    ({"temperature": 3}, "temperature", None),
    ({"priority": 11}, "priority", None),
    ({"tokenmill": {"x": 1}}, "tokenmill.x", "unknown_field"),
    ({"tokenmill": 1}, "tokenmill", None),
    ({"priority": 1, "tokenmill": {"priority": 1}}, "tokenmill.priority", None),
    ({"stream": 1}, "stream", None),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_field"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", None),
    ({"store": "yes"}, "store", None),
    ({"model": "other"}, "model", "model_not_found"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD)
def test_what_is_wrong_is_refused_by_name(sqlite_client, fields, param, code):
    body = chat()["body"] | fields if isinstance(fields, dict) else fields
    error = error_of(sqlite_client.post(URL, json=body))
    assert error["param"] == param
    assert code is None or error["code"] == code


def frames(reply: httpx.Response) -> list:
    """What a stream's data lines say."""
    lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def deltas(chunks: list[dict]) -> list[dict]:
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


def test_a_stream_tells_pieces_as_they_come_and_at_the_end_the_rest(
    sqlite_client, sqlite_settings: Settings, hands
):
    writer = StreamWriter(sqlite_settings)
    writer.start()
    body = chat(stream=True, stream_options={"include_usage": True})["body"]
    with sqlite_client.stream("POST", URL, json=body) as reply:
        claimed = hands.claim(newest(hands).id)
        writer.send([Run(claimed.id, 0, 0, [Piece(reasoning="hm"), "hel", ""])])
        writer.send([Run(claimed.id, 0, 2, ["", "lo"]), Run("job_other", 0, 0, ["no"])])
        writer.send([Run(claimed.id, 0, 5, ["lost before this"])])
        call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
        done = output("hello there", reasoning_content="hm", tool_calls=[call])
        lines = reply.iter_lines()
        seen = ""
        while "lo" not in seen.replace("hello", "lo"):
            line = next(lines)
            seen += json.loads(line[6:])["choices"][0]["delta"].get("content", "") if line else ""
        hands.finish(claimed, output=done)
        rest = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
    writer.close(5)
    assert seen == "hello"
    said = deltas(rest)
    assert said[0]["content"] == " there"
    assert said[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert said[0]["tool_calls"][0]["index"] == 0
    assert rest[-2]["choices"][0]["finish_reason"] == "stop"
    assert (rest[-1]["choices"], rest[-1]["usage"]) == ([], done["usage"])


def test_a_stream_whose_job_fails_ends_with_an_error_and_not_as_if_done(sqlite_client, hands):
    body = completion(stream=True)["body"]
    with sqlite_client.stream("POST", "/v1/completions", json=body) as reply:
        error = error_object(ErrorCode.ENGINE_ERROR, "no")
        hands.finish(hands.claim(newest(hands).id), error=error, **FAILED)
        said = frames(reply)
    assert said[-1]["error"]["code"] == "engine_error"
    assert "[DONE]" not in said


def test_a_stream_of_a_job_that_was_handed_back_goes_on(sqlite_client, sqlite_settings, hands):
    writer = StreamWriter(sqlite_settings)
    writer.start()
    body = completion(stream=True)["body"]
    with sqlite_client.stream("POST", "/v1/completions", json=body) as reply:
        first = hands.claim(newest(hands).id)
        writer.send([Run(first.id, 0, 0, ["a", "b", "c"])])
        held = claims.Held(first.id, first.fence)
        hands.call(claims.release, [held], crashed=True, max_crashes=3)
        second = hands.claim(first.id)
        writer.send([Run(first.id, 0, 1, ["b", "c", "d"])])
        writer.send([Run(first.id, 0, 4, ["e"])])
        choice = {"index": 0, "text": "abcdef", "finish_reason": "length", "logprobs": None}
        hands.finish(second, output={"choices": [choice], "usage": {}})
        said = frames(reply)
    writer.close(5)
    assert "".join(chunk["choices"][0]["text"] for chunk in said[:-1]) == "abcdef"
    assert said[-1] == "[DONE]"
