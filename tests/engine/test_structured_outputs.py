"""The door check of a form: what can be judged without compiling it."""

import json

import pytest

from engine import structured_outputs as limits
from engine.sampling_params import ParameterError, SamplingParams, params_of
from engine.structured_outputs import StructuredOutputs

PARAM = "structured_outputs.regex"


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return json.dumps(schema)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("xml", "a", "one of json, regex"),
        ("json", "[1]", "must be an object"),
        ("json", "{", "not JSON"),
        ("json", '{"a":' + "1" * 70_000 + "}", "at most 65536 bytes, got 7"),
        ("json", nested(limits.MAX_DEPTH + 1), "at most 64 levels deep"),
        ("json", '{"a":' * 20_000 + "1" + "}" * 20_000, "at most 65536 bytes"),
        ("regex", "", "must not be empty"),
        ("regex", "a\0", "null character"),
        ("regex", "a" * 8193, "at most 8192 bytes, got 8193"),
        ("regex", "(" * 65 + ")" * 65, "at most 64 deep, got 65"),
        ("regex", "\ud800", "not valid Unicode"),
        ("grammar", "", "must not be empty"),
        ("grammar", "é" * 32_769, "at most 65536 bytes, got 65538"),
        ("choice", "[]", "1 to 1000 entries, got 0"),
        ("choice", json.dumps(["a"] * 1001), "got 1001"),
        ("choice", '["a",""]', "empty string"),
        ("choice", '["a",1]', "list of strings"),
        ("choice", '"a"', "list of strings"),
        ("choice", json.dumps(["a" * 70_000]), "at most 65536 bytes"),
    ],
)
def test_a_form_out_of_bounds_is_refused_by_the_field_it_came_in(kind, text, message):
    with pytest.raises(ParameterError, match=message) as caught:
        StructuredOutputs(kind=kind, text=text, param=PARAM)
    assert caught.value.param == PARAM
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", nested(limits.MAX_DEPTH)),
        ("regex", "(" * 64 + "a" + ")" * 64),
        ("regex", "a" * 8192),
        ("choice", json.dumps(["a"] * 1000)),
    ],
)
def test_a_form_at_its_bound_is_taken(kind, text):
    assert StructuredOutputs(kind=kind, text=text).text == text


def test_white_space_has_a_bound_of_its_own():
    with pytest.raises(ParameterError, match="at most 256 bytes") as caught:
        StructuredOutputs(kind="json", text="{}", whitespace=" " * 257)
    assert caught.value.param == "structured_outputs.whitespace_pattern"


def test_a_form_comes_out_of_plain_values():
    form = {"kind": "regex", "text": "a+", "param": PARAM}
    params = params_of({"structured_outputs": form}, max_tokens=3)
    expected = StructuredOutputs(kind="regex", text="a+", param=PARAM)
    assert params == SamplingParams(max_tokens=3, structured_outputs=expected)
