"""Rows of every form an input may have, and each fault with its file and line."""

import datetime
import gzip
import json
import tracemalloc
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulk.errors import InputError, SpecError
from bulk.inputs import find_source
from bulk.spec import Input


def rows_of(folder, **options):
    return list(find_source(Input(**options), folder).rows())


def values_of(folder, **options):
    return [row.values for row in rows_of(folder, **options)]


def fault_of(folder, **options):
    with pytest.raises((InputError, SpecError)) as caught:
        rows_of(folder, **options)
    return str(caught.value)


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


LINES = b'{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize(
    "data",
    [
        LINES,
        LINES.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + LINES,
        b"\n  \n" + LINES.rstrip() + b"\n\n",
        LINES.rstrip(),
        gzip.compress(LINES, mtime=0),
        gzip.compress(LINES[:9], mtime=0) + gzip.compress(LINES[9:], mtime=0),
        zstd(LINES),
        zstd(LINES[:9]) + zstd(LINES[9:]),
    ],
)
def test_lines_are_read_however_they_end_and_are_packed(tmp_path, data):
    (tmp_path / "in.jsonl.x").write_bytes(data)
    assert values_of(tmp_path, path="in.jsonl.x", format="jsonl") == [{"a": 1}, {"a": 2}]


def test_odd_separators_are_text(tmp_path):
    odd = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg"
    (tmp_path / "in.jsonl").write_text(json.dumps({"t": odd}, ensure_ascii=False) + "\n")
    assert values_of(tmp_path, path="in.jsonl") == [{"t": odd}]
    (tmp_path / "in.csv").write_text(f't\n"{odd}"\n')
    assert values_of(tmp_path, path="in.csv") == [{"t": odd}]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"a": 1}\r\n\r\n{"a": \r\n', "line 3: not JSON"),
        (b'{"a": 1}\n[1]\n', "line 2: a row must be a JSON object"),
        (b'{"a": 1, "a": 2}\n', "line 1"),
        (b'{"a": NaN}\n', "line 1: a: NaN is not a JSON number"),
        (b'{"a": "\xff"}\n', "line 1: not UTF-8"),
        (b'{"a": 1}\n{"a": "' + b"x" * 600 + b'"}\n', "line 2: a row may have at most 512 bytes"),
        (b"", "the input has no rows"),
        (b"\xef\xbb\xbf\n\n", "the input has no rows"),
        (gzip.compress(LINES * 1000, mtime=0)[:-20], "in.jsonl cannot be read: "),
        (zstd(LINES * 1000)[:-20], "in.jsonl cannot be read: "),
        (gzip.compress(LINES, mtime=0) + b"no gzip", "in.jsonl cannot be read: "),
    ],
)
def test_a_fault_names_its_line(tmp_path, data, said):
    (tmp_path / "in.jsonl").write_bytes(data)
    message = fault_of(tmp_path, path="in.jsonl", max_row_bytes=512)
    assert "in.jsonl" in message
    assert said in message


def test_a_row_says_where_it_stands(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n" + LINES)
    (tmp_path / "b.jsonl").write_bytes(LINES)
    rows = rows_of(tmp_path, path=["a.jsonl", "b.jsonl"])
    assert [row.number for row in rows] == [0, 1, 2, 3]
    assert [row.place for row in rows][1:3] == ["a.jsonl line 3", "b.jsonl line 1"]


def test_csv_has_quotes_lines_in_fields_and_its_own_delimiter(tmp_path):
    (tmp_path / "in.csv").write_bytes(b'\xef\xbb\xbfa,b\r\n1,"x\r\ny, ""z"""\r\n\r\n2,\r\n')
    rows = rows_of(tmp_path, path="in.csv")
    assert [row.values for row in rows] == [{"a": "1", "b": 'x\r\ny, "z"'}, {"a": "2", "b": ""}]
    assert [row.place for row in rows] == ["in.csv line 2", "in.csv line 5"]
    (tmp_path / "in.tsv.gz").write_bytes(gzip.compress(b"a\tb\n1\t2,3\n", mtime=0))
    assert values_of(tmp_path, path="in.tsv.gz") == [{"a": "1", "b": "2,3"}]
    (tmp_path / "in.csv").write_bytes(b"a;b\n1;2\n")
    assert values_of(tmp_path, path="in.csv", delimiter=";") == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a,b\n1,2\n1,2,3\n", "line 3: 3 fields, where the header has 2"),
        (b"a,a\n1,2\n", "line 1: the column 'a' stands there twice"),
        (b"a,\n1,2\n", "line 1: a column has no name"),
        (b"a\nx\n\xff\n", "line 3: not UTF-8 at byte 0"),
        (b'a\nx\n"open\n', "line 3: "),
        (b'a\n"x" y\n', "line 2: "),
        (b"a\n" + b"x" * 600 + b"\n", "line 2: a row may have at most 512 bytes"),
        (b'a\n"' + b"x\n" * 400 + b'"\n', "a row may have at most 512 bytes"),
        (b"a,b\n", "the input has no rows"),
    ],
)
def test_a_fault_of_csv_names_its_line(tmp_path, data, said):
    (tmp_path / "in.csv").write_bytes(data)
    assert said in fault_of(tmp_path, path="in.csv", max_row_bytes=512)


@pytest.mark.parametrize(
    "num_bytes",
    [pytest.param(1 << 25, id="short"), pytest.param(1 << 30, id="whole", marks=pytest.mark.long)],
)
def test_an_endless_line_is_refused_in_constant_memory(tmp_path, num_bytes):
    for name in ("in.jsonl", "in.csv"):
        with (tmp_path / name).open("wb") as file:
            file.write(b'{"a": "' if name == "in.jsonl" else b'a\n"')
            file.truncate(num_bytes)  # zeros, which take no room on the disk
        tracemalloc.start()
        try:
            assert "a row may have at most 1048576 bytes" in fault_of(tmp_path, path=name)
            assert tracemalloc.get_traced_memory()[1] < 12 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "num",
    [pytest.param(5_000, id="short"), pytest.param(10**7, id="whole", marks=pytest.mark.long)],
)
@pytest.mark.parametrize(("name", "line"), [("in.jsonl", b'{"a":1}\n'), ("in.csv", b"a\n")])
def test_tiny_rows_are_read_in_constant_memory_however_many(tmp_path, num, name, line):
    with (tmp_path / name).open("wb") as file:
        file.write(b"" if name == "in.jsonl" else b"name\n")
        for _ in range(num // 1000):
            file.write(line * 1000)
    source = find_source(Input(path=name), tmp_path)
    tracemalloc.start()
    try:
        assert sum(1 for _ in source.rows()) == num
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


TABLE = pa.table(
    {
        "text": ["a", None, "c"],
        "score": [0.5, float("nan"), 2.0],
        "tags": [["x"], [], None],
        "day": [datetime.date(2026, 1, 2)] * 3,
        "price": [Decimal("1.50")] * 3,
    }
)
PLAIN = [
    {"text": "a", "score": 0.5, "tags": ["x"], "day": "2026-01-02", "price": "1.50"},
    {"text": None, "score": None, "tags": [], "day": "2026-01-02", "price": "1.50"},
    {"text": "c", "score": 2.0, "tags": None, "day": "2026-01-02", "price": "1.50"},
]


def test_parquet_is_read_by_its_columns(tmp_path):
    pq.write_table(TABLE, tmp_path / "in.parquet", row_group_size=2)
    assert values_of(tmp_path, path="in.parquet") == PLAIN
    found = values_of(tmp_path, path="in.parquet", columns=["text"])
    assert found == [{"text": "a"}, {"text": None}, {"text": "c"}]
    said = fault_of(tmp_path, path="in.parquet", columns=["txet"])
    assert "has no column 'txet'" in said


def test_nanoseconds_are_kept_and_what_python_has_no_word_for_is_named(tmp_path):
    def column(values, kind):
        pq.write_table(pa.table({"c": pa.array(values, kind)}), tmp_path / "in.parquet")
        return [values["c"] for values in values_of(tmp_path, path="in.parquet")]

    day = 1_767_312_000 * 10**9
    assert column([day, day + 1_500, None], pa.timestamp("ns")) == [
        "2026-01-02T00:00:00", "2026-01-02T00:00:00.000001500", None
    ]  # fmt: skip
    assert column([day + 1], pa.timestamp("ns", "UTC")) == ["2026-01-02T00:00:00.000000001+00:00"]
    assert column([1], pa.time64("ns")) == ["00:00:00.000000001"]
    assert column([1_500_000_001], pa.duration("ns")) == [1.500000001]
    for values, kind in (([0, 2**62], pa.timestamp("us")), ([0, 2**30], pa.date32())):
        with pytest.raises(InputError, match="row 2: the column 'c' cannot be read"):
            column(values, kind)
    buffers = [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    text = pa.Array.from_buffers(pa.string(), 1, buffers)
    pq.write_table(pa.table({"c": text}), tmp_path / "in.parquet")
    assert "row 1: the column 'c' is not UTF-8" in fault_of(tmp_path, path="in.parquet")


def test_a_column_that_is_chosen_and_not_there_is_not_taken_for_an_empty_one(tmp_path):
    (tmp_path / "in.csv").write_bytes(b"a,b\n1,2\n")
    assert values_of(tmp_path, path="in.csv", columns=["b"]) == [{"b": "2"}]
    assert "has no column 'c'" in fault_of(tmp_path, path="in.csv", columns=["b", "c"])
    (tmp_path / "in.jsonl").write_bytes(b'{"a": 1, "b": null}\n')
    found = values_of(tmp_path, path="in.jsonl", columns=["b", "c"])
    assert found == [{"b": None}]  # and a prompt that names c is a fault with its line


def test_bytes_are_refused_by_the_name_of_their_column(tmp_path):
    pq.write_table(pa.table({"id": [1], "image": [b"\x00"]}), tmp_path / "in.parquet")
    assert "row 1: the column 'image' holds bytes" in fault_of(tmp_path, path="in.parquet")
    assert values_of(tmp_path, path="in.parquet", columns=["id"]) == [{"id": 1}]


def test_what_is_no_parquet_is_said(tmp_path):
    (tmp_path / "in.parquet").write_bytes(b"PAR1 and no more")
    assert "in.parquet cannot be read" in fault_of(tmp_path, path="in.parquet")


def save_to_disk(folder, table, num_files=2):
    """As `datasets.Dataset.save_to_disk` lays a folder out."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{num_files:05}.arrow" for i in range(num_files)]
    step = -(-table.num_rows // num_files)
    for i, name in enumerate(names):
        path = str(folder / name)
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(i * step, step))
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_read(tmp_path):
    save_to_disk(tmp_path / "saved", TABLE)
    assert values_of(tmp_path, path="saved") == PLAIN
    assert [row.place for row in rows_of(tmp_path, path="saved")][-1].endswith("arrow row 1")


def test_a_saved_dataset_of_several_splits_wants_one_named(tmp_path):
    for name in ("train", "test"):
        save_to_disk(tmp_path / "saved" / name, TABLE)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert "input.split must be one of train, test" in fault_of(tmp_path, path="saved")
    assert values_of(tmp_path, path="saved", split="test") == PLAIN


def test_a_folder_as_the_hub_has_it_is_read_in_order(tmp_path):
    data = tmp_path / "repo" / "data"
    data.mkdir(parents=True)
    (tmp_path / "repo" / "README.md").write_text("x")
    pq.write_table(TABLE.slice(2), data / "train-00001-of-00002.parquet")
    pq.write_table(TABLE.slice(0, 2), data / "train-00000-of-00002.parquet")
    pq.write_table(TABLE, data / "test-00000-of-00001.parquet")
    assert values_of(tmp_path, path="repo", split="train") == PLAIN
    assert "holds no data files of the split dev" in fault_of(tmp_path, path="repo", split="dev")


def test_a_path_that_leads_out_of_a_saved_dataset_is_refused(tmp_path):
    save_to_disk(tmp_path / "saved", TABLE)
    state = {"_data_files": [{"filename": "../other.arrow"}]}
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    assert "is no file of the folder" in fault_of(tmp_path, path="saved")


def test_a_name_that_tells_no_format_needs_one(tmp_path):
    (tmp_path / "in.txt").write_bytes(LINES)
    assert "input.format is needed" in fault_of(tmp_path, path="in.txt")
    assert "no such file" in fault_of(tmp_path, path="none.jsonl")
    (tmp_path / "in.csv").write_bytes(b"a\n1\n")
    (tmp_path / "in.jsonl").write_bytes(LINES)
    assert "files of one format" in fault_of(tmp_path, path=["in.csv", "in.jsonl"])


def test_requests_are_those_of_openai_s_batches(tmp_path):
    request = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"a": 1}}
    (tmp_path / "in.jsonl").write_text(json.dumps(request) + "\n")
    assert values_of(tmp_path, path="in.jsonl", format="requests") == [request]
    for change, said in (
        ({"custom_id": 3}, "custom_id must be a string"),
        ({"body": []}, "body must be an object"),
        ({"more": 1}, "more is not a field of a request"),
        ({"method": "GET"}, "method must be POST"),
        ({"url": None}, "url must be a string"),
    ):
        (tmp_path / "in.jsonl").write_text(json.dumps(request | change) + "\n")
        assert f"line 1: {said}" in fault_of(tmp_path, path="in.jsonl", format="requests")
