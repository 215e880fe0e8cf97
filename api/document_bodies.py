"""What bodies may be, as JSON Schema, made of what reads them.

The fields of OpenAI's endpoints are those of their tables (`jobs.openai_tables`), the bounds of
options those that `SamplingParams` names when it refuses, our own objects are pydantic's. What lies
deeper (messages, tools, items) is said here once more; a fuzzer compares it with what is refused.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from api.calls import EXTENSIONS, NAMESPACE, NAMESPACED
from api.envelope import Envelope
from api.routes.admin import NewKey, NewTenant, QuotaFields
from api.routes.batches import NewBatch
from api.routes.dead import Requeue
from api.routes.files import TTL
from api.routes.stored import Labels
from api.routes.webhooks import EndpointChanges, NewEndpoint
from engine.sampling_params import MAX_BEAMS, ParameterError, params_of
from jobs import files, openai, openai_messages, openai_responses, openai_tools
from jobs import openai_fields as fields
from jobs import openai_tables as tables

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
_IDS: Schema = {"type": "array", "items": INTEGER | {"minimum": 0}}
_TEXTS: Schema = {"type": "array", "items": TEXT}

_KINDS: dict[Callable[..., Any], Schema] = {
    fields.text: TEXT,
    fields.integer: INTEGER,
    fields.number: NUMBER,
    fields.boolean: BOOLEAN,
    fields.boolean_or_text: {"enum": [True, False, "never"]},
    fields.texts: {"anyOf": [TEXT, _TEXTS]},
    fields.list_of_texts: _TEXTS,
    fields.token_ids: _IDS,
    fields.labels: {"type": "object", "additionalProperties": TEXT},
    fields.counts: {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
    fields.logit_bias: {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": NUMBER,
    },
}
_BOUNDS = re.compile(r"must be in ([\[(])(\S+), (\S+?)\]")


def nullable(schema: Schema) -> Schema:
    """In a body null means: not given."""
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object of these fields and no other."""
    optional = {name: nullable(schema) for name, schema in (optional or {}).items()}
    return {
        "type": "object",
        "properties": {**optional, **required},
        "required": list(required),
        "additionalProperties": False,
    }


def array(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    bounds = ({"minItems": low} if low else {}) | ({} if high is None else {"maxItems": high})
    return {"type": "array", "items": items} | bounds


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def bodies(models: list[str]) -> dict[str, Schema]:
    """Every body's schema by its name."""
    model = {"enum": models}
    chat = {name: _CHAT[name] for name in tables.CHAT_FIELDS - {"model", "messages"}}
    text = {name: _COMPLETION[name] for name in tables.COMPLETIONS_FIELDS - {"model", "prompt"}}
    response = {name: _RESPONSE[name] for name in openai_responses.READ_HERE - {"input"}}
    same = {
        name: _options()[name] if name in tables.OPTIONS else (_CHAT | _BOTH | _HARMLESS)[name]
        for name in openai_responses.SAME - {"model", "service_tier"}
    }
    renamed = {name: _CHAT[theirs] for name, theirs in openai_responses.RENAMED.items()}
    return {
        "ChatBody": record(
            {"model": model, "messages": _MESSAGES},
            _options() | _BOTH | _HARMLESS | chat | _neutral(tables.CHAT_NEUTRAL)
            | _refused(tables.CHAT_REFUSED) | _around(),
        ),
        "CompletionBody": record(
            {"model": model, "prompt": _PROMPTS},
            _options() | _BOTH | _HARMLESS | text | _neutral(tables.COMPLETIONS_NEUTRAL)
            | _around(),
        ),
        "ResponseBody": record(
            {"model": model, "input": _INPUT},
            same | renamed | response
            | _neutral({"service_tier": tables.CHAT_NEUTRAL["service_tier"]})
            | _neutral(openai_responses.NEUTRAL) | _refused(openai_responses.REFUSED)
            | {"reasoning": {"type": "object", "additionalProperties": {"type": "null"}}}
            | _around(),
        ),
        "NewJob": {"oneOf": [_new_job(url, name) for url, name in _BODY_OF.items()]},
        "NewJobs": {"anyOf": [ref("NewJob"), array(ref("NewJob"), 1)]},
        "Upload": {
            "type": "object",
            "properties": {
                "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                "purpose": {"const": files.BATCH},
                "expires_after[anchor]": {"const": "created_at"},
                "expires_after[seconds]": dict(TTL.schema),
            },
            "required": ["file", "purpose"],
            "dependentRequired": {
                "expires_after[anchor]": ["expires_after[seconds]"],
                "expires_after[seconds]": ["expires_after[anchor]"],
            },
            "additionalProperties": False,
        },
        **_models(),
    }  # fmt: skip


def _models() -> dict[str, Schema]:
    """Our own objects, and what stands in them."""
    found: dict[str, Schema] = {}
    for model in _MODELS:
        schema = model.model_json_schema(ref_template=ref("{model}")["$ref"])
        found |= schema.pop("$defs", {})
        found[model.__name__] = schema
    return found


_MODELS = (
    NewKey, NewTenant, QuotaFields, NewEndpoint, EndpointChanges, Labels, NewBatch, Requeue,
)  # fmt: skip
_BODY_OF = {
    openai.CHAT: "ChatBody",
    openai.COMPLETIONS: "CompletionBody",
    openai.RESPONSES: "ResponseBody",
}


def _new_job(url: str, body: str) -> Schema:
    whole = _envelope()
    not_there = dict.fromkeys(("stream", "previous_response_id", NAMESPACE, *EXTENSIONS), False)
    one = {"prompt": _PROMPT} if url == openai.COMPLETIONS else {}
    plain = {"properties": not_there | one | {"stream": {"enum": [False, None]}}}
    given = {"url": {"const": url}, "body": {"allOf": [ref(body), plain]}}
    return whole | {"title": url, "properties": whole["properties"] | given}


def _envelope() -> Schema:
    return Envelope.model_json_schema()


def _around() -> dict[str, Schema]:
    """Our fields beside OpenAI's."""
    known = _envelope()["properties"]
    inside = {name: known[name] for name in NAMESPACED}
    return {name: known[name] for name in EXTENSIONS} | {
        NAMESPACE: {"type": "object", "properties": inside, "additionalProperties": False}
    }


def _neutral(values: Mapping[str, tuple[Any, ...]]) -> dict[str, Schema]:
    return {name: {"enum": list(each)} for name, each in values.items()}


def _refused(names: frozenset[str]) -> dict[str, Schema]:
    return {name: {"enum": []} for name in names}


def _options() -> dict[str, Schema]:
    return {name: _KINDS[read] | _bounds(name) for name, read in tables.OPTIONS.items()}


def _bounds(option: str) -> Schema:
    """What the engine says when it refuses a number that is none, or far too large."""
    for wrong in (2**100, math.nan):
        try:
            params_of({"num_beams": MAX_BEAMS, option: wrong}, max_tokens=2**31 - 1)
        except ParameterError as error:
            if found := _BOUNDS.search(str(error)):
                low, high = float(found[2]), float(found[3])
                whole = tables.OPTIONS[option] is fields.integer
                bound = "minimum" if found[1] == "[" else "exclusiveMinimum"
                return {
                    bound: int(low) if whole else low,
                    "maximum": int(found[3]) if whole else high,
                }
        except (TypeError, AttributeError):
            return {}  # no number
    return {}


# -- what lies deeper

_NOTHING: Schema = {"enum": [None, []]}  # a list or null that says nothing
_PART = record({"type": {"const": "text"}, "text": TEXT})
_SAID: Schema = {"anyOf": [TEXT, array(_PART, 1)]}
_NAME: Schema = {"type": "string", "pattern": r"^[^\s<|\\/>]{1,64}$"}
_FUNCTION_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_CALL_ID: Schema = {"type": "string", "minLength": 1, "maxLength": openai_messages.MAX_CALL_ID}
_CALL = record({
    "id": _CALL_ID,
    "type": {"const": "function"},
    "function": record({"name": _FUNCTION_NAME, "arguments": TEXT}),
})  # fmt: skip
_NO_CALLS = dict.fromkeys(("tool_calls", "tool_call_id", "reasoning_content"), _NOTHING)
_NOT_READ = dict.fromkeys(openai_messages.REFUSED, _NOTHING)


def _message(
    role: Schema, required: Mapping[str, Schema], optional: Mapping[str, Schema]
) -> Schema:
    whole = record({"role": role, **required}, {"name": _NAME, **optional})
    others = {n: s for n, s in (_NO_CALLS | _NOT_READ).items() if n not in whole["properties"]}
    return whole | {"properties": whole["properties"] | others}


_MESSAGES = array(
    {
        "anyOf": [
            _message({"enum": ["system", "developer", "user"]}, {"content": _SAID}, {}),
            _message({"const": "tool"}, {"content": _SAID, "tool_call_id": _CALL_ID}, {}),
            _message(
                {"const": "assistant"},
                {},
                {
                    "content": _SAID,
                    "reasoning_content": TEXT,
                    "tool_calls": array(_CALL, 0, openai_messages.MAX_CALLS),
                },
            )
            | {
                "anyOf": [
                    {"required": [name], "properties": {name: {"not": _NOTHING}}}
                    for name in ("content", "reasoning_content", "tool_calls")
                ]
            },
        ]
    },
    1,
    openai_messages.MAX_MESSAGES,
)
_ONE_PROMPT: list[Schema] = [{"type": "string", "minLength": 1}, _IDS | {"minItems": 1}]
_PROMPT: Schema = {"anyOf": [*_ONE_PROMPT, array({"anyOf": _ONE_PROMPT}, 1, 1)]}  # a job's
_PROMPTS: Schema = {"anyOf": [*_ONE_PROMPT, array({"anyOf": _ONE_PROMPT}, 1)]}
_PARAMETERS: Schema = {"type": "object", "properties": {"type": {"const": "object"}}}
_DESCRIPTION: Schema = {"type": "string", "maxLength": openai_tools.MAX_DESCRIPTION}
_FUNCTION = record(
    {"name": _FUNCTION_NAME},
    {"description": _DESCRIPTION, "parameters": _PARAMETERS, "strict": BOOLEAN},
)
_WORD: Schema = {"enum": ["none", "auto", "required"]}
_OF_FUNCTION = {"type": {"const": "function"}}
_FORM = record(
    {"name": TEXT, "schema": {"type": "object"}}, {"description": TEXT, "strict": BOOLEAN}
)
_FORM["required"] = ["schema"]
_ANY_FORM = [record({"type": {"enum": ["text", "json_object"]}})]
_LIMIT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TOP: Schema = {"type": "integer", "minimum": 0, "maximum": openai.MAX_TOP_LOGPROBS}
_THINKING = record({}, {"enable_thinking": BOOLEAN})

_CHAT: dict[str, Schema] = {
    "max_tokens": _LIMIT,
    "max_completion_tokens": _LIMIT,
    "logprobs": BOOLEAN,
    "top_logprobs": _TOP,
    "tools": array(record({**_OF_FUNCTION, "function": _FUNCTION}), 0, openai_tools.MAX_TOOLS),
    "tool_choice": {
        "anyOf": [_WORD, record({**_OF_FUNCTION, "function": record({"name": _FUNCTION_NAME})})]
    },
    "parallel_tool_calls": BOOLEAN,
    "chat_template_kwargs": _THINKING,
    "store": BOOLEAN,
}
_COMPLETION: dict[str, Schema] = {"max_tokens": _LIMIT, "logprobs": _TOP, "echo": BOOLEAN}
_BOTH: dict[str, Schema] = {
    "use_beam_search": BOOLEAN,
    "stream": BOOLEAN,
    "stream_options": record(
        {}, {"include_usage": BOOLEAN, "include_obfuscation": {"const": False}}
    ),
    "response_format": {
        "anyOf": [*_ANY_FORM, record({"type": {"const": "json_schema"}, "json_schema": _FORM})]
    },
    "structured_outputs": record(
        {},
        {
            "json": {"anyOf": [TEXT, {"type": "object"}]},
            "json_object": {"const": True},
            "regex": TEXT,
            "choice": _TEXTS,
            "grammar": TEXT,
            "disable_any_whitespace": BOOLEAN,
            "whitespace_pattern": TEXT | {"minLength": 1},
        },
    ),
}
_HARMLESS: dict[str, Schema] = {
    name: _KINDS[read] for name, read in tables.HARMLESS.items() if name != "metadata"
} | {"metadata": _envelope()["properties"]["metadata"]}

_PART_REST: dict[str, Schema] = {name: {} for name in openai_responses.PART_FIELDS}
_ITEM_PART = {
    "anyOf": [
        record({"type": {"const": kind}, name: TEXT}, _PART_REST)
        for kind, name in openai_responses.PARTS.items()
    ]
}
_ITEM_SAID: Schema = {"anyOf": [TEXT, array(_ITEM_PART, 1)]}
_THOUGHTS = array(record({"text": TEXT}, {"type": {}}))
_ANYWHERE: dict[str, Schema] = {"id": {}, "status": {}}
_ROLE: Schema = {"enum": ["user", "assistant", "system", "developer"]}
_INPUT: Schema = {
    "anyOf": [
        TEXT,
        array(
            {
                "anyOf": [
                    record(
                        {"role": _ROLE, "content": _ITEM_SAID},
                        {"type": {"const": "message"}, **_ANYWHERE},
                    ),
                    record(
                        {
                            "type": {"const": "function_call"},
                            "call_id": TEXT,
                            "name": _FUNCTION_NAME,
                            "arguments": TEXT,
                        },
                        _ANYWHERE,
                    ),
                    record(
                        {
                            "type": {"const": "function_call_output"},
                            "call_id": TEXT,
                            "output": _ITEM_SAID,
                        },
                        _ANYWHERE,
                    ),
                    record(
                        {"type": {"const": "reasoning"}, "content": _THOUGHTS},
                        {"summary": _THOUGHTS, **_ANYWHERE},
                    ),
                ]
            },
            1,
            openai_responses.MAX_ITEMS,
        ),
    ]
}
_RESPONSE: dict[str, Schema] = {
    "instructions": TEXT,
    "text": record(
        {},
        {
            "verbosity": {"const": "medium"},
            "format": {
                "anyOf": [
                    *_ANY_FORM,
                    _FORM
                    | {
                        "properties": _FORM["properties"] | {"type": {"const": "json_schema"}},
                        "required": ["type", "schema"],
                    },
                ]
            },
        },
    ),
    "tools": array(
        _FUNCTION
        | {"properties": _FUNCTION["properties"] | _OF_FUNCTION, "required": ["type", "name"]},
        0,
        openai_tools.MAX_TOOLS,
    ),
    "tool_choice": {"anyOf": [_WORD, record({**_OF_FUNCTION, "name": _FUNCTION_NAME})]},
    "top_logprobs": _TOP,
    "include": array({"const": openai_responses.LOGPROBS}),
    "stream_options": record({}, {"include_obfuscation": {"const": False}}),
    "background": BOOLEAN,
    "previous_response_id": TEXT,
}
