"""The fields of a body that ask for an output of a certain form, read into one plain value.

OpenAI's `response_format`, and vLLM's `structured_outputs` for what OpenAI lacks. There is one way
to say each thing: vLLM's older `guided_*` fields are not read. What a schema or a grammar may be is
the engine's to say.
"""

import json
from collections.abc import Mapping
from typing import Any

from jobs import openai_fields as fields
from jobs.openai_fields import BodyError, UnknownField

NAMES = frozenset({"response_format", "structured_outputs"})
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
ANY_OBJECT = '{"type":"object"}'


def read(given: Mapping[str, Any]) -> dict[str, str] | None:
    """What is asked for, under the names of the engine's StructuredOutputs; None: nothing is.

    Raises BodyError.
    """
    form = _response_format(given["response_format"]) if "response_format" in given else {}
    if "structured_outputs" in given:
        asked = _structured_outputs(given["structured_outputs"])
        if "kind" in form and "kind" in asked:
            raise BodyError(
                "structured_outputs",
                f"{asked['param']} and response_format both ask for a form; give one",
            )
        form |= asked
        if "kind" not in form:
            raise BodyError(
                "structured_outputs", f"structured_outputs must have one of {', '.join(_KINDS)}"
            )
    return form or None


def _response_format(value: object) -> dict[str, str]:
    at = "response_format"
    given = _object(at, value)
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise BodyError(
            f"{at}.type",
            f"{at}.type must be text, json_object or json_schema, got {fields.shown(kind)}",
        )
    _refuse_others(at, given, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"kind": "json", "text": ANY_OBJECT, "param": at}
    at = f"{at}.json_schema"
    schema = _object(at, given.get("json_schema"))
    _refuse_others(at, schema, ("name", "description", "schema", "strict"))
    for name in ("name", "description"):
        if name in schema:
            fields.text(f"{at}.{name}", schema[name])
    if "strict" in schema:  # either way the output has the schema's form
        fields.boolean(f"{at}.strict", schema["strict"])
    text = _json(_object(f"{at}.schema", schema.get("schema")))
    return {"kind": "json", "text": text, "param": "response_format"}


def _structured_outputs(value: object) -> dict[str, str]:
    at = "structured_outputs"
    given = _object(at, value)
    _refuse_others(at, given, _KINDS + _OPTIONS)
    asked = [name for name in _KINDS if name in given]
    if len(asked) > 1:
        raise BodyError(at, f"{at} must have one of {', '.join(_KINDS)}, got {', '.join(asked)}")
    form = _form(f"{at}.{asked[0]}", asked[0], given[asked[0]]) if asked else {}
    if "whitespace_pattern" in given:
        form["whitespace"] = fields.text(f"{at}.whitespace_pattern", given["whitespace_pattern"])
        if not form["whitespace"]:
            raise BodyError(
                f"{at}.whitespace_pattern",
                f"{at}.whitespace_pattern must not be empty; disable_any_whitespace allows none",
            )
    if fields.boolean(f"{at}.disable_any_whitespace", given.get("disable_any_whitespace", False)):
        if "whitespace" in form:
            raise BodyError(at, f"{at}: disable_any_whitespace and whitespace_pattern contradict")
        form["whitespace"] = ""
    return form


def _form(at: str, name: str, value: object) -> dict[str, str]:
    if name == "json_object":
        if fields.boolean(at, value) is False:
            raise BodyError(at, f"{at} must be true where it is given")
        return {"kind": "json", "text": ANY_OBJECT, "param": at}
    if name == "json" and isinstance(value, dict):
        return {"kind": "json", "text": _json(value), "param": at}
    if name == "choice":
        return {"kind": "choice", "text": _json(fields.list_of_texts(at, value)), "param": at}
    return {"kind": name, "text": fields.text(at, value), "param": at}


def _object(at: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BodyError(at, f"{at} must be an object, got {fields.kind(value)}")
    if at.endswith(".schema"):
        return value  # null means null in there
    return {name: each for name, each in value.items() if each is not None}


def _refuse_others(at: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise UnknownField(f"{at}.{name}", f"{at}.{name} is not a field of {at}")


def _json(value: object) -> str:
    """The order of a schema's properties is that of the output's."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
