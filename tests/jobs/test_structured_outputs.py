"""The fields that ask for a form, as they come in a body."""

import json

import pytest

from jobs.openai import CHAT, COMPLETIONS, parse
from jobs.openai_fields import BodyError

SCHEMA = {"type": "object", "properties": {"z": {"type": "null"}, "é": {"const": None}}}


def form(url=CHAT, **fields):
    source = {"messages": [{"role": "user", "content": "Hi"}]} if url == CHAT else {"prompt": "a"}
    return parse(url, {"model": "tiny", **source, **fields}).options.get("structured_outputs")


def json_schema(**fields):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA} | fields}


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_openai_s_response_format(url):
    assert form(url, response_format={"type": "text"}) is None
    any_object = form(url, response_format={"type": "json_object"})
    assert any_object == {"kind": "json", "text": '{"type":"object"}', "param": "response_format"}
    for strict in (True, False, None):
        read = form(url, response_format=json_schema(strict=strict))
        assert read["kind"] == "json"
        assert read["param"] == "response_format"
        assert list(json.loads(read["text"])["properties"]) == ["z", "é"]
        assert json.loads(read["text"]) == SCHEMA


@pytest.mark.parametrize(
    ("name", "value", "kind", "text"),
    [
        ("json", {"type": "null"}, "json", '{"type":"null"}'),
        ("json", '{"type": "null"}', "json", '{"type": "null"}'),
        ("json_object", True, "json", '{"type":"object"}'),
        ("regex", "a+", "regex", "a+"),
        ("choice", ["a", "é"], "choice", '["a","é"]'),
        ("grammar", 'root ::= "a"', "grammar", 'root ::= "a"'),
    ],
)
def test_vllm_s_structured_outputs(name, value, kind, text):
    expected = {"kind": kind, "text": text, "param": f"structured_outputs.{name}"}
    assert form(structured_outputs={name: value}) == expected
    assert (
        form(
            COMPLETIONS,
            structured_outputs={name: value, "regex" if name == "json" else "json": None},
        )
        == expected
    )


def test_white_space_can_be_chosen_for_either():
    compact = {"disable_any_whitespace": True}
    assert form(response_format=json_schema(), structured_outputs=compact)["whitespace"] == ""
    own = form(structured_outputs={"json": {}, "whitespace_pattern": " ?"})
    assert own["whitespace"] == " ?"
    assert "whitespace" not in form(
        structured_outputs={"json": {}, "disable_any_whitespace": False}
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema(schema=None)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema=True)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": json_schema(name=5)}, "response_format.json_schema.name"),
        ({"response_format": json_schema(extra=5)}, "response_format.json_schema.extra"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": "abc"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": ""}},
         "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " ",
                                 "disable_any_whitespace": True}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
         "structured_outputs"),
        ({"response_format": {"type": "text"},
          "structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
    ],
)  # fmt: skip
def test_what_is_odd_is_refused_by_its_path(fields, param):
    with pytest.raises(BodyError) as caught:
        form(**fields)
    assert caught.value.param == param
