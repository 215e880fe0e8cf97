"""OpenAI's responses in terms of its chats: the body of one as the body of the other.

Nothing of a generation is read here that `jobs.openai` reads: fields get the names they have there,
items become messages, and errors get their names back. Every field of the endpoint is in a table:
it works, it is harmless, it is accepted at the one value that asks for nothing, or it is refused.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jobs import openai_fields as fields
from jobs.openai_fields import BodyError, UnknownField, UnsupportedField, UnsupportedValue

MAX_ITEMS = 4096
LOGPROBS = "message.output_text.logprobs"

# the same field under another name in a chat
RENAMED = {"max_output_tokens": "max_completion_tokens"}
SAME = frozenset({
    "model", "temperature", "top_p", "parallel_tool_calls", "chat_template_kwargs", "user",
    "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "stream", "store",
    # what OpenAI lacks, under vLLM's names
    "seed", "stop", "top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids",
    "presence_penalty", "frequency_penalty", "logit_bias", "repetition_penalty",
    "allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens",
    "repetition_detection", "thinking_token_budget", "timeout_s", "structured_outputs",
})  # fmt: skip
READ_HERE = frozenset({
    "input", "instructions", "text", "tools", "tool_choice", "top_logprobs", "include",
    "stream_options", "background", "previous_response_id",
})  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
    "reasoning": ({},),
    "conversation": (),
}
REFUSED = frozenset({
    "background_options", "context_management", "max_tool_calls", "moderation", "prompt",
    "prompt_cache_options", "prompt_cache_retention",
})  # fmt: skip
# a chat's name of a place : ours
_NAMES = (
    (re.compile(r"^max_(?:completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^(?:messages|prompt)\b.*"), "input"),
    (re.compile(r"^logprobs\b"), "top_logprobs"),
)
PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
PART_FIELDS = ("type", "text", "refusal", "annotations", "logprobs")


def field_of(param: str) -> str:
    """The name in a response's body of a chat's field."""
    for pattern, name in _NAMES:
        param = pattern.sub(name, param)
    return param


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat that a response is. Raises BodyError."""
    _refuse_unknown(body)
    given = {name: value for name, value in body.items() if value is not None}
    chat = {RENAMED.get(n, n): v for n, v in given.items() if n in SAME or n in RENAMED}
    background = fields.boolean("background", given.get("background", False))
    if background and given.get("store") is False:
        raise BodyError("background", "background needs store: its result is fetched later")
    if "previous_response_id" in given:  # its items stand in front of the input by now
        fields.text("previous_response_id", given["previous_response_id"])
    chat["messages"] = _messages(given.get("instructions"), items_of(given.get("input")))
    chat |= _text(given.get("text", {}))
    chat |= _tools(given)
    chat |= _logprobs(given)
    if "stream_options" in given:
        chat["stream_options"] = fields.record(
            "stream_options", given["stream_options"], ("include_obfuscation",)
        )
    return chat


def items_of(value: object) -> list[dict[str, Any]]:
    """The input as a list of items, whose types and fields are checked. Raises BodyError."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        kind = fields.kind(value)
        raise BodyError("input", f"input must be a string or a list of items, got {kind}")
    if not 1 <= len(value) <= MAX_ITEMS:
        raise BodyError("input", f"input must have 1 to {MAX_ITEMS} items, got {len(value)}")
    return [_item(f"input[{i}]", item) for i, item in enumerate(value)]


def _refuse_unknown(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in SAME or name in RENAMED or name in READ_HERE:
            continue
        if name in NEUTRAL:
            empty = isinstance(value, dict) and not any(x is not None for x in value.values())
            if value is None or value in NEUTRAL[name] or (name == "reasoning" and empty):
                continue
            raise fields.unsupported(name, value, NEUTRAL[name])
        if name in REFUSED:
            if value is not None:
                raise UnsupportedField(name, f"{name} is not supported yet")
            continue
        name = name[: fields.MAX_SHOWN]
        raise UnknownField(name, f"{name} is not a field of /v1/responses")


def _text(value: object) -> dict[str, Any]:
    text = fields.record("text", value, ("format", "verbosity"))
    if text.get("verbosity", "medium") != "medium":
        raise fields.unsupported("text.verbosity", text["verbosity"], ("medium",))
    form = text.get("format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return {} if form is None else {"response_format": form}
    inner = {name: each for name, each in form.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """Functions stand one level deeper in a chat."""
    chat: dict[str, Any] = {}
    if "tools" in given:
        tools = given["tools"]
        if not isinstance(tools, list):
            raise BodyError("tools", f"tools must be a list, got {fields.kind(tools)}")
        chat["tools"] = [_deeper(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    if "tool_choice" in given:
        choice = given["tool_choice"]
        is_object = isinstance(choice, dict)
        chat["tool_choice"] = _deeper("tool_choice", choice) if is_object else choice
    return chat


def _deeper(path: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BodyError(path, f"{path} must be an object, got {fields.kind(value)}")
    fields.kind_of(f"{path}.type", value.get("type"), ("function",))
    return {"type": "function", "function": {n: v for n, v in value.items() if n != "type"}}


def _logprobs(given: Mapping[str, Any]) -> dict[str, Any]:
    include = fields.list_of_texts("include", given.get("include", []))
    for i, each in enumerate(include):
        fields.kind_of(f"include[{i}]", each, (LOGPROBS,))
    chat: dict[str, Any] = {}
    if include:
        chat["logprobs"] = True
    if "top_logprobs" in given:
        chat |= {"logprobs": True, "top_logprobs": given["top_logprobs"]}
    return chat


def _messages(instructions: object, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        said = fields.text("instructions", instructions)
        messages.append({"role": "system", "content": said})
    for item in items:
        message = _message(item)
        before = messages[-1] if messages else {}
        # a thought, a text and calls of one turn are items, and one message
        if message["role"] == before.get("role") == "assistant" and not before.get("tool_calls"):
            if "content" in message and "content" in before:
                messages.append(message)
            else:
                before.update(message)
        elif "tool_calls" in message and before.get("tool_calls"):
            before["tool_calls"] += message["tool_calls"]
        else:
            messages.append(message)
    return messages


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    match item["type"]:
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            said = _said(item["output"])
            return {"role": "tool", "tool_call_id": item["call_id"], "content": said}
        case "reasoning":
            said = "".join(part["text"] for part in item.get("content") or ())
            return {"role": "assistant", "reasoning_content": said}
        case _:
            return {"role": item["role"], "content": _said(item["content"])}


def _said(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part[PARTS[part["type"]]] for part in content)


def _item(path: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BodyError(path, f"{path} must be an object, got {fields.kind(value)}")
    kind = value.get("type", "message" if "role" in value else None)
    if not isinstance(kind, str) or kind not in _ITEM_FIELDS:
        shown, known = fields.shown(kind), ", ".join(_ITEM_FIELDS)
        refusal = UnsupportedValue if isinstance(kind, str) else BodyError
        raise refusal(f"{path}.type", f"{path}.type must be one of {known}, got {shown}")
    item = fields.record(path, value, (*_ITEM_FIELDS[kind], "type", "id", "status"))
    for name, read in _ITEM_FIELDS[kind].items():
        if name in item:
            read(f"{path}.{name}", item[name])
        elif name not in _OPTIONAL:
            raise BodyError(f"{path}.{name}", f"{path}.{name} is required")
    return {**item, "type": kind}


def _role(path: str, value: object) -> None:
    fields.one_of(path, value, ("user", "assistant", "system", "developer"))


def _content(path: str, value: object) -> None:
    if isinstance(value, str):
        return
    if not isinstance(value, list) or not value:
        raise BodyError(path, f"{path} must be a string or a list of parts")
    for i, part in enumerate(value):
        at = f"{path}[{i}]"
        if isinstance(part, dict):  # first: a part of another type has other fields
            fields.kind_of(f"{at}.type", part.get("type"), tuple(PARTS))
        read = fields.record(at, part, PART_FIELDS)
        kind = read["type"]
        fields.text(f"{at}.{PARTS[kind]}", read.get(PARTS[kind]))


def _thoughts(path: str, value: object) -> None:
    if not isinstance(value, list):
        raise BodyError(path, f"{path} must be a list, got {fields.kind(value)}")
    for i, part in enumerate(value):
        read = fields.record(f"{path}[{i}]", part, ("type", "text"))
        fields.text(f"{path}[{i}].text", read.get("text"))


_ITEM_FIELDS: dict[str, dict[str, Any]] = {
    "message": {"role": _role, "content": _content},
    "function_call": {
        "call_id": fields.text, "name": fields.function_name, "arguments": fields.text,
    },
    "function_call_output": {"call_id": fields.text, "output": _content},
    "reasoning": {"summary": _thoughts, "content": _thoughts},
}  # fmt: skip
_OPTIONAL = ("summary",)
