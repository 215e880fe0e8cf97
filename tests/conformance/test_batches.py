"""Batches with the unmodified client: upload, create, poll, download, list, cancel, errors."""

import json
import time

import openai
import pytest

ENDED = ("completed", "failed", "expired", "cancelled")


def row(model, i, **values):
    body = {"model": model, "prompt": f"Row {i} says", "max_tokens": 4} | values.pop("body", {})
    line = {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/completions", "body": body}
    return line | values


@pytest.fixture
def begin(client):
    """A batch of these rows, or of a file that was uploaded."""

    def create(rows, *, endpoint="/v1/completions", **values):
        data = "\n".join(map(json.dumps, rows)).encode() if isinstance(rows, list) else rows
        file = client.files.create(file=("rows.jsonl", data), purpose="batch")
        return client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h", **values
        )

    return create


@pytest.fixture
def wait(client):
    def until_ended(batch, timeout_s=60):
        end = time.monotonic() + timeout_s
        while batch.status not in ENDED:
            assert time.monotonic() < end, batch
            time.sleep(0.1)
            batch = client.batches.retrieve(batch.id)
        return batch

    return until_ended


def lines(client, file_id):
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_from_upload_to_results(client, model, begin, wait):
    rows = [row(model, i) for i in range(20)]
    batch = begin(rows, metadata={"set": "a"})
    assert (batch.object, batch.endpoint, batch.completion_window) == (
        "batch", "/v1/completions", "24h",
    )  # fmt: skip
    assert batch.expires_at == batch.created_at + 86_400
    assert batch.metadata == {"set": "a"}
    batch = wait(batch)
    assert (batch.status, batch.errors, batch.model) == ("completed", None, model)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert not batch.error_file_id
    found = lines(client, batch.output_file_id)
    assert [each["custom_id"] for each in found] == [each["custom_id"] for each in rows]
    bodies = [each["response"]["body"] for each in found]
    assert all(each["error"] is None for each in found)
    assert {each["object"] for each in bodies} == {"text_completion"}
    assert batch.usage.output_tokens == sum(each["usage"]["completion_tokens"] for each in bodies)
    assert batch.usage.input_tokens == sum(each["usage"]["prompt_tokens"] for each in bodies)
    file = client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.bytes) == (
        "batch_output", len(client.files.content(file.id).content),
    )  # fmt: skip
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/responses"])
def test_every_endpoint_answers_as_over_http(client, model, begin, wait, chat, respond, endpoint):
    body = {"model": model, "temperature": 0}
    if endpoint.endswith("completions"):
        body |= {"messages": [{"role": "user", "content": "What is a queue?"}], "max_tokens": 8}
        alone = chat(temperature=0).choices[0].message.content
    else:
        body |= {"input": "What is a queue?", "max_output_tokens": 8}
        alone = respond(temperature=0).output_text
    line = {"custom_id": "1", "method": "POST", "url": endpoint, "body": body}
    batch = wait(begin([line], endpoint=endpoint))
    [found] = lines(client, batch.output_file_id)
    answer = found["response"]["body"]
    if endpoint.endswith("completions"):
        assert answer["choices"][0]["message"]["content"] == alone
    else:
        assert answer["output"][-1]["content"][0]["text"] == alone


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"url": "/v1/chat/completions"}, 3),
        ({"url": "/v1/nowhere"}, 3),
        ({"custom_id": "row-0"}, 3),
        ({"body": {"model": "no-such-model"}}, 3),
        ({"method": "GET"}, 3),
    ],
)
def test_a_line_that_is_no_row_fails_the_batch_and_is_named(model, begin, wait, change, line):
    rows = [row(model, 0), row(model, 1), row(model, 2, **change), row(model, 3)]
    batch = wait(begin(rows))
    assert batch.status == "failed"
    assert [each.line for each in batch.errors.data] == [line]
    assert batch.errors.data[0].message
    assert batch.request_counts.completed == 0
    assert not batch.output_file_id


def test_bad_json_and_an_empty_file_fail_the_batch(model, begin, wait):
    broken = b"\n".join([json.dumps(row(model, 0)).encode(), b'{"custom_id": '])
    batch = wait(begin(broken))
    assert (batch.status, batch.errors.data[0].line) == ("failed", 2)
    assert wait(begin(b"\n")).status == "failed"


def test_a_bad_row_is_an_error_line_and_its_neighbours_run(client, model, begin, wait):
    rows = [row(model, 0), row(model, 1, body={"temperature": 99}), row(model, 2)]
    batch = wait(begin(rows))
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 2, 1)
    [error] = lines(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("row-1", 400)
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert error["error"] is None


def test_a_batch_whose_rows_all_fail_is_completed(model, begin, wait):
    batch = wait(begin([row(model, i, body={"n": 0}) for i in range(3)]))
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 3, 0, 3)
    assert not batch.output_file_id
    assert batch.error_file_id


def test_a_cancelled_batch_keeps_what_is_done(client, model, begin, wait):
    rows = [row(model, i, body={"max_tokens": 200, "ignore_eos": True}) for i in range(150)]
    batch = begin(rows)
    while not client.batches.retrieve(batch.id).request_counts.completed:
        time.sleep(0.05)
    first = client.batches.cancel(batch.id)
    assert first.status in ("cancelling", "cancelled")
    client.batches.cancel(batch.id)
    batch = wait(batch)
    assert (batch.status, batch.cancelled_at >= batch.cancelling_at) == ("cancelled", True)
    done, errors = (lines(client, each) for each in (batch.output_file_id, batch.error_file_id))
    assert (len(done), len(errors)) == (
        batch.request_counts.completed, batch.request_counts.failed,
    )  # fmt: skip
    ids = sorted((each["custom_id"] for each in done + errors), key=lambda each: int(each[4:]))
    assert ids == [each["custom_id"] for each in rows]
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_lists_are_paged_and_newest_first(client, model, begin, wait):
    made = [wait(begin([row(model, i)])).id for i in range(3)]
    listed = [each.id for each in client.batches.list(limit=2)]
    assert [each for each in listed if each in made] == made[::-1]
    assert len(set(listed)) == len(listed)


def test_a_key_used_again_finds_the_same_batch(client, model, wait):
    data = json.dumps(row(model, 0)).encode()
    file = client.files.create(file=("a", data), purpose="batch")
    headers = {"Idempotency-Key": f"batch-{file.id}"}
    make = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    first = client.batches.create(**make, extra_headers=headers)
    assert client.batches.create(**make, extra_headers=headers).id == first.id
    with pytest.raises(openai.ConflictError):
        client.batches.create(**make, metadata={"x": "y"}, extra_headers=headers)
    wait(first)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}},
         "output_expires_after.seconds"),
    ],
)  # fmt: skip
def test_a_call_that_is_wrong_names_its_field(client, model, change, param):
    file = client.files.create(file=("a", json.dumps(row(model, 0)).encode()), purpose="batch")
    make = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(**make | change)
    assert caught.value.param == param
    client.files.delete(file.id)


def test_an_unknown_batch_is_not_found(client):
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call("batch_none")
