"""Records of any kinds of values go into a Parquet file, and come back."""

import json

import pyarrow.parquet as pq
import pytest

from bulk.parquet import schema_of, write_parquet
from bulk.requests import text_of


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ([1, 2], [1, 2]),
        ([1, 2.5, None], [1.0, 2.5, None]),
        ([2**60 + 1, 0.5], [str(2**60 + 1), "0.5"]),
        ([2**63, 1], [str(2**63), "1"]),
        (["a", None], ["a", None]),
        ([None, None], [None, None]),
        ([True, False], [True, False]),
        ([1, "a"], ["1", '"a"']),
        ([["a"], []], [["a"], []]),
        ([{"x": 1}, {"y": "z"}], [{"x": 1, "y": None}, {"x": None, "y": "z"}]),
        ([{}, {}], ["{}", "{}"]),
        ([[{}], [{}]], ["[{}]", "[{}]"]),
        (["\u2028\x00", "\U0001f600"], ["\u2028\x00", "\U0001f600"]),
    ],
)
def test_values_come_back_or_are_json(tmp_path, values, read):
    records = [{"v": value} for value in values]
    schema = schema_of(records)
    assert write_parquet(tmp_path / "x.parquet", records, schema) == len(values)
    assert pq.read_table(tmp_path / "x.parquet")["v"].to_pylist() == read


def test_kinds_may_show_late_and_columns_too(tmp_path):
    records = [{"v": i} for i in range(2500)] + [{"v": "text", "late": 1}]
    schema = schema_of(records)
    write_parquet(tmp_path / "x.parquet", records, schema)
    found = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert (found[0]["v"], found[-1]["v"]) == ("0", '"text"')
    assert (found[0]["late"], found[-1]["late"]) == (None, 1)
    assert json.loads(found[2499]["v"]) == 2499


def test_an_integer_that_no_float_is_goes_into_a_column_of_floats(tmp_path):
    records = [{"v": 2**60 + 1}] * 1000 + [{"v": 0.5}]
    write_parquet(tmp_path / "x.parquet", records, schema_of(records))
    found = pq.read_table(tmp_path / "x.parquet")["v"].to_pylist()
    assert (found[0], found[-1]) == (float(2**60), 0.5)


def test_half_a_surrogate_pair_becomes_what_a_file_can_hold():
    assert text_of({"text": "a\ud800b"}) == "a\ufffd\ufffd\ufffdb"
    assert text_of({"message": {"content": None}}) == ""
