"""The messages of a chat body: read strictly, given on in the form that chat templates take.

A call's arguments are JSON text for OpenAI and an object for templates; a result is a message of
role tool. Whether the model has a format for either is for its tokenizer to say.
"""

from typing import Any

from jobs import openai_fields as fields
from jobs import strict_json
from jobs.openai_fields import BodyError, UnknownField, UnsupportedField, UnsupportedValue

MAX_MESSAGES = 4096
MAX_CALLS = 128  # of one message
MAX_CALL_ID = 128  # characters
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_FIELDS = ("role", "content", "name")
_FIELDS_OF_ROLE = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id",)}
# what OpenAI's clients send back as null with a message they were given
REFUSED = ("function_call", "refusal", "audio", "annotations")


def messages(value: object) -> list[dict[str, Any]]:
    """Raises BodyError with the path of what is wrong."""
    if not isinstance(value, list):
        raise BodyError("messages", f"messages must be a list, got {fields.kind(value)}")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise BodyError(
            "messages", f"messages must have 1 to {MAX_MESSAGES} entries, got {len(value)}"
        )
    read = [_message(f"messages[{i}]", message) for i, message in enumerate(value)]
    _name_results(read)
    return read


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Give each result the name of the function whose call it answers: some templates print it, and
    OpenAI's messages have only the call's id."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])


def _message(path: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BodyError(path, f"{path} must be an object, got {fields.kind(message)}")
    given = {name: value for name, value in message.items() if value is not None and value != []}
    role = _role(f"{path}.role", given.get("role"))
    _check_fields(path, message, given, role)
    read: dict[str, Any] = {"role": role}
    content = message.get("content")
    if content is None and ("tool_calls" in given or "reasoning_content" in given):
        content = ""  # as in a message of ours that says nothing else
    read["content"] = _content(f"{path}.content", content)
    if "tool_calls" in given:
        read["tool_calls"] = _tool_calls(f"{path}.tool_calls", given["tool_calls"])
    if role == "tool":
        read["tool_call_id"] = _call_id(f"{path}.tool_call_id", given.get("tool_call_id"))
    if "reasoning_content" in given:
        read["reasoning_content"] = fields.text(
            f"{path}.reasoning_content", given["reasoning_content"]
        )
    if "name" in given:
        read["name"] = fields.author(f"{path}.name", given["name"])
    return read


def _role(path: str, role: object) -> str:
    if role == "function":
        raise UnsupportedValue(path, f"{path} 'function' is not supported: use tool")
    if not isinstance(role, str) or role not in _ROLES:
        raise BodyError(
            path, f"{path} must be one of {', '.join(_ROLES)}, got {fields.shown(role)}"
        )
    return _ROLES[role]


def _check_fields(path: str, message: dict[str, Any], given: dict[str, Any], role: str) -> None:
    for name in message:
        if name in _FIELDS or name in _FIELDS_OF_ROLE.get(role, ()):
            continue
        owner = next((each for each, names in _FIELDS_OF_ROLE.items() if name in names), None)
        if owner is None and name not in REFUSED:
            at = f"{path}.{name[: fields.MAX_SHOWN]}"
            raise UnknownField(at, f"{at} is not a field of a message")
        if name not in given:
            continue
        if owner is None:
            raise UnsupportedField(f"{path}.{name}", f"{path}.{name} is not supported yet")
        raise BodyError(
            f"{path}.{name}", f"{path}.{name} is a field of messages of role {owner}, not {role}"
        )


def _content(path: str, content: object) -> str:
    if not isinstance(content, list):
        return fields.text(path, content)
    texts = []
    for i, part in enumerate(content):
        at = f"{path}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text":
            refusal = UnsupportedValue if isinstance(kind, str) else BodyError
            raise refusal(
                at,
                f"{at} must be a part of type text, got {fields.shown(kind or fields.kind(part))}",
            )
        for name in part:
            if name not in ("type", "text"):
                at = f"{at}.{name[: fields.MAX_SHOWN]}"
                raise UnknownField(at, f"{at} is not a field of a text part")
        texts.append(fields.text(f"{at}.text", part.get("text")))
    if not texts:
        raise BodyError(path, f"{path} must have at least 1 part")
    return "\n".join(texts)


def _tool_calls(path: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise BodyError(path, f"{path} must be a list, got {fields.kind(value)}")
    if len(value) > MAX_CALLS:
        raise BodyError(path, f"{path} may have at most {MAX_CALLS} calls, got {len(value)}")
    return [_tool_call(f"{path}[{i}]", call) for i, call in enumerate(value)]


def _tool_call(path: str, value: object) -> dict[str, Any]:
    call = fields.record(path, value, ("id", "type", "function"))
    fields.one_of(f"{path}.type", call.get("type"), ("function",))
    function = fields.record(f"{path}.function", call.get("function"), ("name", "arguments"))
    return {
        "id": _call_id(f"{path}.id", call.get("id")),
        "type": "function",
        "function": {
            "name": fields.function_name(f"{path}.function.name", function.get("name")),
            "arguments": _arguments(f"{path}.function.arguments", function.get("arguments")),
        },
    }


def _call_id(path: str, value: object) -> str:
    call_id = fields.text(path, value)
    if not 1 <= len(call_id) <= MAX_CALL_ID:
        raise BodyError(path, f"{path} must have 1 to {MAX_CALL_ID} characters, got {len(call_id)}")
    return call_id


def _arguments(path: str, value: object) -> dict[str, Any]:
    text = fields.text(path, value)
    if not text.strip():
        return {}  # how some clients write a call without arguments
    try:
        arguments = strict_json.loads(text.encode("utf-8", "surrogatepass"))
    except strict_json.JSONError as error:
        raise BodyError(path, f"{path} must be the JSON text of an object: {error}") from None
    if not isinstance(arguments, dict):
        raise BodyError(
            path, f"{path} must be the JSON text of an object, got {fields.kind(arguments)}"
        )
    return arguments
