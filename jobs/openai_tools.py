"""Tools of a chat body, and the calls and thoughts of its response, in OpenAI's shapes.

Owns every bound on a tool. Knows no model's format: a call comes here as a name and a JSON text.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs import openai_fields as fields
from jobs.openai_fields import BodyError, UnsupportedField

MAX_TOOLS = 128
MAX_DESCRIPTION = 8_192  # characters
MAX_SCHEMA_BYTES = 65_536  # of one function's parameters, as compact JSON
MAX_SCHEMA_DEPTH = 24  # levels of objects and lists

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a chat offers its model to call."""

    tools: tuple[
        dict[str, Any], ...
    ] = ()  # as chat templates take them; none with tool_choice none
    parallel: bool = True  # several calls in one reply
    forced: tuple[dict[str, Any], ...] = ()  # of the tools; the reply has to call one of these

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)


NO_TOOLS = ToolUse()


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON text


def tool_use(given: Mapping[str, Any]) -> ToolUse:
    """Reads tools, tool_choice and parallel_tool_calls. Raises BodyError."""
    tools = {tool["function"]["name"]: tool for tool in _tools(given.get("tools", []))}
    strict = _strict(given.get("tools", []))
    parallel = fields.boolean("parallel_tool_calls", given.get("parallel_tool_calls", True))
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict):
        forced = (_named(choice, tools),)
        return ToolUse(tools=tuple(tools.values()), parallel=False, forced=forced)
    if not isinstance(choice, str):
        kind = fields.kind(choice)
        raise BodyError("tool_choice", f"tool_choice must be a string or an object, got {kind}")
    fields.one_of("tool_choice", choice, ("none", "auto", "required"))
    if choice == "required" and not tools:
        raise BodyError("tool_choice", "tool_choice required needs tools, and there are none")
    if choice == "none" or not tools:
        return NO_TOOLS
    if choice == "auto" and strict:
        raise BodyError(
            strict[0],
            f"{strict[0]} true needs a tool_choice of required or of a function's name: a call "
            "made by choice is not held to its schema",
        )
    offered = tuple(tools.values())
    return ToolUse(tools=offered, parallel=parallel, forced=offered if choice == "required" else ())


def template_variables(value: object) -> dict[str, Any]:
    """Reads chat_template_kwargs: the few that cannot change what a chat is. Raises BodyError."""
    path = "chat_template_kwargs"
    if not isinstance(value, dict):
        raise BodyError(path, f"{path} must be an object, got {fields.kind(value)}")
    for name in value:
        if name != "enable_thinking":
            at = f"{path}.{name[: fields.MAX_SHOWN]}"
            raise UnsupportedField(at, f"{at} is not supported: only enable_thinking is")
    return {
        name: fields.boolean(f"{path}.{name}", each)
        for name, each in value.items()
        if each is not None
    }


def message(
    content: str, *, reasoning: str, calls: Sequence[ToolCall], job_id: str, sample: int
) -> dict[str, Any]:
    """The assistant's message of a choice."""
    said: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning or calls:
        said["content"] = content or None
    if reasoning:
        said["reasoning_content"] = reasoning
    if calls:
        said["tool_calls"] = [
            call_object(job_id, sample, index, call.name, call.arguments)
            for index, call in enumerate(calls)
        ]
    return said


def call_object(job_id: str, sample: int, index: int, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": call_id(job_id, sample, index),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def call_id(job_id: str, sample: int, index: int) -> str:
    """The same for every attempt at a job, so that a call can be told from another for good."""
    digest = hashlib.sha256(f"{job_id}:{sample}:{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"


def _tools(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise BodyError("tools", f"tools must be a list, got {fields.kind(value)}")
    if len(value) > MAX_TOOLS:
        raise BodyError("tools", f"tools may have at most {MAX_TOOLS} entries, got {len(value)}")
    tools = []
    names: set[str] = set()
    for i, each in enumerate(value):
        path = f"tools[{i}]"
        if isinstance(each, dict):
            fields.kind_of(f"{path}.type", each.get("type"), ("function",))
        tool = fields.record(path, each, ("type", "function"))
        function = _function(f"{path}.function", tool.get("function"))
        if function["name"] in names:
            at = f"{path}.function.name"
            raise BodyError(
                at, f"{at} {fields.shown(function['name'])} is the name of an earlier tool too"
            )
        names.add(function["name"])
        tools.append({"type": "function", "function": function})
    return tools


def _strict(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where tools that were read before ask that every call keep to its schema."""
    return [
        f"tools[{i}].function.strict"
        for i, tool in enumerate(tools)
        if tool["function"].get("strict")
    ]


def _function(path: str, value: object) -> dict[str, Any]:
    given = fields.record(path, value, ("name", "description", "parameters", "strict"))
    function = {"name": fields.function_name(f"{path}.name", given.get("name"))}
    if "description" in given:
        description = fields.text(f"{path}.description", given["description"])
        if len(description) > MAX_DESCRIPTION:
            raise BodyError(
                f"{path}.description",
                f"{path}.description may have at most {MAX_DESCRIPTION} characters, "
                f"got {len(description)}",
            )
        function["description"] = description
    fields.boolean(f"{path}.strict", given.get("strict", False))
    parameters = given.get("parameters", _NO_PARAMETERS)
    return {**function, "parameters": _schema(f"{path}.parameters", parameters)}


def _schema(path: str, schema: object) -> dict[str, Any]:
    """A JSON schema of an object. Size and outline are checked; the rest only the model reads."""
    if not isinstance(schema, dict):
        raise BodyError(path, f"{path} must be an object, got {fields.kind(schema)}")
    if (depth := fields.depth(schema)) > MAX_SCHEMA_DEPTH:
        raise BodyError(path, f"{path} may be at most {MAX_SCHEMA_DEPTH} levels deep, got {depth}")
    num_bytes = len(json.dumps(schema, separators=(",", ":")).encode())
    if num_bytes > MAX_SCHEMA_BYTES:
        raise BodyError(path, f"{path} may have at most {MAX_SCHEMA_BYTES} bytes, got {num_bytes}")
    if schema.get("type", "object") != "object":
        raise BodyError(f"{path}.type", f"{path}.type must be 'object', got {schema['type']!r:.80}")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        at = f"{path}.properties"
        raise BodyError(at, f"{at} must be an object, got {fields.kind(properties)}")
    for name, each in properties.items():
        if not isinstance(each, dict | bool):
            at = f"{path}.properties.{name[: fields.MAX_SHOWN]}"
            raise BodyError(at, f"{at} must be a schema, got {fields.kind(each)}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise BodyError(f"{path}.required", f"{path}.required must be a list of strings")
    return schema


def _named(choice: dict[str, Any], tools: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The tool that tool_choice names."""
    path = "tool_choice"
    named = fields.record(path, choice, ("type", "function"))
    fields.one_of(f"{path}.type", named.get("type"), ("function",))
    function = fields.record(f"{path}.function", named.get("function"), ("name",))
    at = f"{path}.function.name"
    name = fields.function_name(at, function.get("name"))
    if name not in tools:
        raise BodyError(at, f"{at} must be the name of one of the tools, got {fields.shown(name)}")
    return tools[name]
