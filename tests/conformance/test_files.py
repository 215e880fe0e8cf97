"""Files with the unmodified client: upload, list, retrieve, content, delete, and its errors."""

import io

import openai
import pytest

ROW = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}\n'


@pytest.fixture
def kept(client):
    made = client.files.create(file=("rows.jsonl", ROW), purpose="batch")
    yield made
    client.files.delete(made.id)


def test_an_upload_says_what_was_kept(kept):
    assert kept.id.startswith("file-")
    assert (kept.object, kept.filename, kept.purpose) == ("file", "rows.jsonl", "batch")
    assert (kept.bytes, kept.status) == (len(ROW), "processed")


def test_the_content_comes_back_as_it_was(client, kept):
    assert client.files.content(kept.id).read() == ROW


def test_a_large_file_comes_back_as_it_was(client):
    content = ROW * 50_000
    made = client.files.create(file=io.BytesIO(content), purpose="batch")
    assert client.files.content(made.id).read() == content
    client.files.delete(made.id)


def test_it_is_retrieved_and_waited_for(client, kept):
    assert client.files.retrieve(kept.id) == kept
    assert client.files.wait_for_processing(kept.id).id == kept.id


def test_it_expires_when_asked_to(client):
    after = {"anchor": "created_at", "seconds": 7200}
    made = client.files.create(file=("a", ROW), purpose="batch", expires_after=after)
    assert made.expires_at == made.created_at + 7200
    client.files.delete(made.id)


def test_every_page_is_listed_once(client):
    ids = [client.files.create(file=("a", ROW), purpose="batch").id for _ in range(3)]
    listed = [each.id for each in client.files.list(limit=2, order="asc", purpose="batch")]
    assert [each for each in listed if each in ids] == ids
    assert len(set(listed)) == len(listed)
    for each in ids:
        assert client.files.delete(each).deleted


def test_a_deleted_file_is_not_found(client):
    made = client.files.create(file=("a", ROW), purpose="batch")
    client.files.delete(made.id)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert caught.value.type == "invalid_request_error"


def test_a_purpose_nobody_reads_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("a", ROW), purpose="fine-tune")
    assert caught.value.param == "purpose"


def test_a_key_that_would_not_be_kept_to_is_refused(client):
    headers = {"Idempotency-Key": "conformance-file"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("a.jsonl", b"{}"), purpose="batch", extra_headers=headers)
    assert (refused.value.param, refused.value.code) == ("idempotency-key", "unsupported_parameter")
