"""JSON that two readers could read differently is refused, with the path to it."""

import contextlib
import json
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.strict_json import JSONError, loads

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64) + 1, 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda children: st.lists(children) | st.dictionaries(TEXT, children),
    max_leaves=20,
)


@given(VALUES)
def test_ordinary_json_comes_through_unchanged(value):
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only)
        assert loads(text.encode(), max_depth=64) == value


@given(st.binary(max_size=60) | st.text().map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_anything_else_is_a_json_error_or_fit_to_pass_on(data):
    with contextlib.suppress(JSONError):
        json.dumps(loads(data), allow_nan=False).encode()


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ('{"a": [1, {"b": NaN}]}', "a[1].b", "NaN is not a JSON number"),
        ('{"a": -Infinity}', "a", "-Infinity is not"),
        ("[1e999]", "[0]", "too large for a double"),
        ('{"a": -1e999}', "a", "too large for a double"),
        ("[" + "9" * 5000 + "]", "[0]", "an integer of 5000 digits is too large"),
        ("18446744073709551616", "", "too large"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "a.b", "given twice"),
        ('{"": 1, "": 2}', '[""]', "given twice"),
        ('{"x y": "\\ud83d"}', '["x y"]', "half of a surrogate pair"),
        ('{"a": "\\udc00\\ud800"}', "a", "half of a surrogate pair"),
        ('{"m": [{"content": "a\\u0000b"}]}', "m[0].content", "U+0000"),
        ('{"a\\u0000": 1}', "", "a key holds the character U+0000"),
        ('{"a": {"\\ud800": 1}}', "a", "a key holds half of a surrogate pair"),
        ("[" * 33 + "]" * 33, "[0]" * 32, "nested more than 32 deep"),
        ("[" * 20_000, "", "nested more than 32 deep"),
        ('{"a":' * 20_000 + "1" + "}" * 20_000, "", "nested more than 32 deep"),
        ("", "", "not JSON"),
        ('{"a": 1} x', "", "not JSON: Extra data at line 1 column 10"),
        ("{'a': 1}", "", "not JSON"),
        ("\ufeff{}", "", "not JSON"),
        ('"a\tb"', "", "not JSON"),
    ],
)
def test_the_refusal_names_the_place_and_the_fault(text, path, words):
    with pytest.raises(JSONError) as caught:
        loads(text.encode())
    assert (caught.value.path, words in caught.value.message) == (path, True)


def test_only_utf8_is_text():
    for data in (
        b'"\xff"',
        '"é"'.encode("latin-1"),
        '{"a": 1}'.encode("utf-16"),
        b'"\xed\xa0\x80"',
    ):
        with pytest.raises(JSONError):
            loads(data)


def test_what_is_allowed_at_the_edges():
    assert loads(b"[" * 32 + b"]" * 32)
    assert loads(b"18446744073709551615") == 2**64 - 1
    assert loads(b'"\\ud83d\\ude00"') == "😀"
    assert math.copysign(1, loads(b"-0.0")) == -1
    assert type(loads(b"1.0")) is float
    assert loads(b"true") is True


def test_a_long_key_is_cut_in_the_message():
    key = "k " * 500
    with pytest.raises(JSONError) as caught:
        loads(json.dumps({key: {"a": "\0"}}).encode())
    assert len(str(caught.value)) < 200


def test_memory_is_bound_by_the_text_whatever_the_keys_are_like():
    num_values = 50_000
    long_key = b"A" * 100_000
    data = b'{"' + long_key + b'": [' + b",".join([b"0"] * num_values) + b"]}"
    tracemalloc.start()
    try:
        loads(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(data)


def test_a_fault_behind_a_long_key_is_shown_with_the_key_cut():
    with pytest.raises(JSONError) as caught:
        loads(b'{"' + b"A" * 5000 + b'": [0, {"b": [1, NaN]}]}')
    assert caught.value.path == f"[{json.dumps('A' * 64 + '…')}][1].b[1]"
