"""One JSON object in a growing text: where it ends, and how early it is known to be none."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.json_object import MAX_DEPTH, ObjectScanner, Progress, members

SCALARS = [None, True, -1.5e-7, 0, 10**30, "", 'a"\\\n\x7fé😀', "}", "{"]
VALUES = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["", '"', "é", "ab", "}"]), inner, max_size=3)
    ),
    max_leaves=6,
)
PIECES = [*'{}[]":, \n\\a1-.e', "u00e9", "true", "null", '"a"']


def scan(pieces):
    scanner, text, at = ObjectScanner(), "", 0
    for piece in pieces:
        text += piece
        at = scanner.read(text, at)
    return scanner.progress, at


def strictly(text):
    """What Python's parser says when it is as strict as RFC 8259."""

    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["", "name", 'q"', "\\"]), VALUES, max_size=3),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_an_object_is_complete_at_its_last_character_and_no_earlier(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert scan([text + " }{"]) == (Progress.COMPLETE, len(text))
    assert scan(text) == (Progress.COMPLETE, len(text))
    assert scan(text[:-1])[0] is Progress.OPEN  # and so at every character before
    read = members(text)
    assert {key: strictly(part) for key, part in read.items()} == value


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_it_is_as_strict_as_a_parser_and_the_same_for_every_cut(rest):
    text = "{" + rest
    progress, at = scan([text])
    assert scan(text) == (progress, at)
    completions = []
    for end in range(1, len(text) + 1):
        try:
            strictly(text[:end])
            completions.append(end)
        except ValueError:
            pass
    if completions:
        assert (progress, at) == (Progress.COMPLETE, completions[0])
    else:
        assert progress is not Progress.COMPLETE


@pytest.mark.parametrize(
    "text",
    [
        "[", "x", '"a"', "{]", "{,", "{1", "{a", '{"a" 1', '{"a":,', '{"a":1 2', '{"a":01,',
        '{"a":+1,', '{"a":1.}', '{"a":NaN}', '{"a":truE}', '{"a":[1,]', '{"a":1,}', '{"a":"\n',
        '{"a":"\\x', '{"a":"\\u12g', '{"a":\\', '{"a":{]', '{"a":"\x00', '{"a": <', "{'a'",
        '{"a":' + "1" * 2000,
    ],
)  # fmt: skip
def test_a_fault_is_seen_where_it_stands(text):
    assert scan([text])[0] is Progress.BROKEN
    assert scan(text)[0] is Progress.BROKEN


def test_depth_is_bounded():
    deep = '{"a":' * (MAX_DEPTH - 1) + "[]" + "}" * (MAX_DEPTH - 1)
    assert scan([deep]) == (Progress.COMPLETE, len(deep))
    assert scan(['{"a":' * MAX_DEPTH + "["])[0] is Progress.BROKEN


def test_members_are_the_texts_themselves():
    text = '{ "a" : 1e400 ,"b":[ 1,2 ], "\\u0063": {"x": "}"}, "n": ' + "9" * 5000 + "}"
    assert members(text) == {"a": "1e400", "b": "[ 1,2 ]", "c": '{"x": "}"}', "n": "9" * 5000}
    assert members("{ }") == {}
    assert members('{"a": 1, "b": 2, "\\u0061": 3}') is None
