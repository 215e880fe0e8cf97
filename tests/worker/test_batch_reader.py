"""A batch's file line by line: what is a row, what refuses the file, and at which line."""

import gzip
import io
import json
import tracemalloc
from dataclasses import replace

import pytest

from jobs.batch_record import BatchRecord, BatchState
from jobs.lines import Line, read_lines
from jobs.settings import ModelEntry, Settings
from tests.bulk.test_inputs import zstd
from worker.batch_plan import Plan
from worker.batch_reader import Reading, row_of

SETTINGS = Settings(
    models=(ModelEntry(name="tiny", path="x"), ModelEntry(name="other", path="x")),
    max_job_bytes=2048,
    max_batch_rows=1000,
)
BATCH = BatchRecord(
    id="batch_1", tenant_id="acme", endpoint="/v1/completions", input_file_id="file-1",
    metadata=None, priority=-5, output_ttl_s=None, state=BatchState.VALIDATING, model="tiny",
    created_at=0.0, expires_at=9.0,
)  # fmt: skip


def row(custom_id="1", *, body=None, **fields) -> bytes:
    body = {"model": "tiny", "prompt": "hi"} | (body or {})
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line | fields, ensure_ascii=False).encode()


def reading(data: bytes, settings=SETTINGS, step=7) -> Reading:
    found = Reading(io.BytesIO(data), BATCH, settings, Plan())
    while found.step(step):
        pass
    return found


def errors(data: bytes, **values) -> list[tuple]:
    return [(each["code"], each["line"]) for each in reading(data, **values).errors]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_end_with_a_newline_and_nothing_else(end):
    odd = row("2", body={"prompt": "a\u2028b\u2029c\u0085d\x0be"})
    data = b"\xef\xbb\xbf" + row("1") + end + end + b"  " + end + odd + end + row("3")
    lines = list(read_lines(io.BytesIO(data), 2048))
    assert [each.number for each in lines] == [1, 4, 5]
    assert [json.loads(each.data)["custom_id"] for each in lines] == ["1", "2", "3"]
    assert lines[-1].end == len(data)
    found = reading(data)
    assert (found.errors, found.num_rows, found.model) == ([], 3, "tiny")
    # from the middle on, as after a restart
    again = list(read_lines(io.BytesIO(data), 2048, offset=lines[1].end))
    assert [each.data for each in again] == [lines[2].data]


def test_a_line_of_any_length_is_read_in_constant_memory():
    class Endless(io.RawIOBase):
        """A line of 50 MB that nobody has."""

        left = 50 << 20

        def readable(self):
            return True

        seekable = readable

        def seek(self, offset, whence=0):
            return offset

        def readinto(self, buffer):
            if self.left <= 0:
                return 0
            size = min(len(buffer), self.left)
            buffer[:size] = b"x" * size
            self.left -= size
            return size

    tracemalloc.start()
    [line] = list(read_lines(io.BufferedReader(Endless()), 2048))
    assert line == Line(1, 0, 50 << 20, None)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_a_line_of_exactly_the_limit_is_a_row_and_one_more_byte_is_none():
    fits = row("1", body={"prompt": "x"})
    fits = row("1", body={"prompt": "x" * (1 + 2048 - len(fits))})
    assert len(fits) == 2048
    for end in (b"", b"\n", b"\r\n"):
        assert errors(fits + end + row("2")) == [] if end else errors(fits) == []
    more = fits.replace(b"xx", b"xxx", 1)
    assert errors(row("2") + b"\n" + more + b"\n" + row("3")) == [("line_too_long", 2)]


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'{"custom_id": "1"} {}', "invalid_json_line", None),
        (row("x").replace(b'"x"', b"1"), "invalid_custom_id", "custom_id"),
        (row("").replace(b'""', b'""'), "invalid_custom_id", "custom_id"),
        (row("x" * 257), "invalid_custom_id", "custom_id"),
        (row("é" * 129), "invalid_custom_id", "custom_id"),
        (row("a\\u0000b").replace(b"\\\\u", b"\\u"), "invalid_custom_id", "custom_id"),
        (b'{"url": "/v1/completions"}', "invalid_custom_id", "custom_id"),
        (row(method="GET"), "invalid_method", "method"),
        (row(url="/v1/chat/completions"), "invalid_url", "url"),
        (b'{"custom_id": "1", "body": {"model": "tiny"}}', "invalid_url", "url"),
        (row().replace(b'"body": {', b'"body": [{').replace(b"}}", b"}]}"), "invalid_body", "body"),
        (b'{"custom_id": "1", "url": "/v1/completions"}', "invalid_body", "body"),
        (row(body={"model": 7}), "invalid_body", "body.model"),
        (row(body={"model": "none"}), "model_not_found", "body.model"),
        (row(body={"model": "other"}), "mismatched_model", "body.model"),
        (row(colour="red"), "unknown_field", "colour"),
        (b"\xff\xfe" + row(), "invalid_json_line", None),
        (b"[" * 2000, "invalid_json_line", None),
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_refuses_the_file_with_its_number(line, code, param):
    found = reading(b"\n".join([row("a"), row("b"), line, row("c")]))
    [error] = found.errors
    assert (error["code"], error["line"], error["param"]) == (code, 3, param)
    assert error["message"]


def test_a_duplicate_names_both_lines():
    data = b"\n".join([row("a"), row("b"), row("a"), b"", row("c"), row("b"), row("a")])
    found = reading(data)
    assert [(each["code"], each["line"]) for each in found.errors] == [
        ("duplicate_custom_id", 3), ("duplicate_custom_id", 6), ("duplicate_custom_id", 7),
    ]  # fmt: skip
    assert "line 1 " in found.errors[0]["message"]
    assert "line 2 " in found.errors[1]["message"]


def test_no_rows_and_one_too_many():
    assert errors(b"") == errors(b"\n\r\n \n") == [("empty_file", None)]
    rows = [row(str(i)) for i in range(1001)]
    assert errors(b"\n".join(rows[:1000])) == []
    assert errors(b"\n".join(rows)) == [("too_many_rows", 1001)]
    assert errors(rows[0]) == []


def test_the_first_thousand_errors_are_kept():
    lines = b"\n".join(b"{" for _ in range(1500))
    settings = Settings(models=SETTINGS.models, max_batch_rows=10_000)
    found = errors(lines, settings=settings)
    assert found == [("invalid_json_line", i) for i in range(1, 1001)]


def made(line: bytes, endpoint="/v1/completions"):
    return row_of(endpoint, Line(1, 0, 0, line), 4)


def test_a_row_is_the_body_as_the_line_has_it():
    made_row = made(row("x", body={"max_tokens": 9, "temperature": 0.5}))
    assert (made_row.row_number, made_row.custom_id, made_row.error) == (4, "x", None)
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 9, "temperature": 0.5}
    assert json.loads(made_row.body) == body
    assert made_row.max_tokens == 9


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"stream": True}, "stream"),
        ({"colour": 1}, "colour"),
        ({"prompt": []}, "prompt"),
    ],
)
def test_a_body_that_its_endpoint_refuses_is_a_failed_row(body, param):
    record = made(
        json.dumps(json.loads(row()) | {"body": {"model": "tiny", "prompt": "x"} | body}).encode()
    )
    assert record.error["type"] == "invalid_request_error"
    assert record.error["param"] == param


def test_a_body_that_two_readers_could_read_differently_is_a_failed_row():
    record = made(row().replace(b'"hi"', b'"hi", "prompt": "ho"'))
    assert "prompt" in record.error["message"]


@pytest.mark.parametrize("name", ["previous_response_id", "background"])
def test_what_a_response_cannot_have_in_a_batch_is_refused(name):
    body = {"model": "tiny", "input": "hi", name: "resp_1" if name.startswith("p") else True}
    line = json.dumps({"custom_id": "1", "url": "/v1/responses", "body": body}).encode()
    assert made(line, "/v1/responses").error["param"] == name


@pytest.mark.long
def test_a_line_of_a_gigabyte_is_an_error_in_little_memory(tmp_path):
    path = tmp_path / "rows"
    with path.open("wb") as file:
        file.write(row("1") + b"\n")
        for _ in range(1024):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + row("2") + b"\n")
    tracemalloc.start()
    with path.open("rb") as file:
        found = Reading(file, BATCH, SETTINGS, Plan())
        while found.step(1000):
            pass
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert [(each["code"], each["line"]) for each in found.errors] == [("line_too_long", 2)]


class Lines(io.RawIOBase):
    """A file of so many lines that nobody has."""

    def __init__(self, line, num):
        self.line, self.num, self.left = line, num, num

    def readable(self):
        return True

    seekable = readable

    def seek(self, offset, whence=0):
        assert offset == 0
        self.left = self.num
        return offset

    def readinto(self, buffer):
        size = min(len(buffer) // len(self.line), self.left)
        buffer[: size * len(self.line)] = self.line * size
        self.left -= size
        return size * len(self.line)


@pytest.mark.parametrize(
    "num",
    [pytest.param(10_000, id="short"), pytest.param(10**7, id="whole", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("line", [b"\r\n", b"{}\n"], ids=["blank", "bad"])
def test_any_number_of_tiny_lines_is_read_in_little_memory_and_turn_by_turn(num, line):
    """A turn has its bound in lines, blank ones too: who reads says that it lives after each."""
    settings = replace(SETTINGS, max_batch_rows=10**7)
    tracemalloc.start()
    try:
        file = io.BufferedReader(Lines(line, num))
        found, turns = Reading(file, BATCH, settings, Plan()), 1
        while found.step(1000):
            turns += 1
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert turns >= num // 1000
    faults = [(each["code"], each["line"]) for each in found.errors]
    if line == b"{}\n":
        assert faults == [("invalid_custom_id", i) for i in range(1, 1001)]
    else:
        assert faults == [("empty_file", None)]


def test_no_more_lines_are_read_than_a_batch_may_have_rows():
    file = io.BufferedReader(Lines(b"{}\n", 10**6))
    found = Reading(file, BATCH, SETTINGS, Plan())
    while found.step(1000):
        pass
    assert found.num_rows == 1001
    assert file.raw.left > 900_000


def test_duplicates_are_looked_for_turn_by_turn():
    data = b"\n".join([*(row(str(i)) for i in range(99)), row("7")])
    found = Reading(io.BytesIO(data), BATCH, SETTINGS, Plan())
    turns = 1
    while found.step(10):
        turns += 1
    assert turns > 20
    assert [(each["code"], each["line"]) for each in found.errors] == [("duplicate_custom_id", 100)]


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_a_packed_file_is_said_to_be_one(pack):
    data = pack(b"\n".join(row(str(i)) for i in range(200)))
    assert errors(data) == [("packed_file", None)]


BROKEN = {
    "cut": (row("x")[:-9], "invalid_json_line"),
    "no object": (b"17", "invalid_json_line"),
    "not UTF-8": (b"\xff" + row("x"), "invalid_json_line"),
    "no custom_id": (b'{"url": "/v1/completions", "body": {}}', "invalid_custom_id"),
    "twice": (row("17"), "duplicate_custom_id"),
    "another endpoint": (row("x", url="/v1/embeddings"), "invalid_url"),
    "another model": (row("x", body={"model": "other"}), "mismatched_model"),
    "too long": (row("x", body={"prompt": "x" * 3000}), "line_too_long"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_line_5000_of_10000_is_told_and_no_other(fault):
    line, code = BROKEN[fault]
    lines = [row(str(i)) for i in range(1, 10_001)]
    lines[4999] = line
    settings = replace(SETTINGS, max_batch_rows=10_000)
    assert errors(b"\n".join(lines), settings=settings, step=2000) == [(code, 5000)]
