"""OpenAI's shapes, both ways: a body to a generation, a generation's outcome to a response body.

Every field of the endpoints is in a table here: it works, it is harmless and ignored, it is
accepted at the one value that asks for nothing, or it is refused by name. Bounds of sampling
options are the engine's to check; here only that each has the right type.

BodyError
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT, COMPLETIONS)
COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default for the older endpoint
MAX_MESSAGES = 4096
_NAME = re.compile(r"[^\s<|\\/>]{1,64}")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class BodyError(ValueError):
    """A body that cannot be run; `param` is the field to change."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a body asks for. Exactly one of messages and prompt is given."""

    model: str
    messages: list[dict[str, Any]] | None = None  # role, content, perhaps name
    prompt: str | tuple[int, ...] | None = None  # text or token ids
    options: Mapping[str, Any]  # the sampling options given, under SamplingParams' names
    max_tokens: int | None = None  # None: as many as the model's length leaves room for


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample's outcome."""

    index: int
    text: str
    finish_reason: str  # the engine's: stop, length, repetition


def parse(url: str, body: object) -> Generation:
    """Read the body of an endpoint. Raises BodyError naming what is unknown, unsupported or odd."""
    if url not in URLS:
        raise BodyError("url", f"url must be one of {', '.join(URLS)}, got {url!r}")
    if not isinstance(body, dict):
        raise BodyError("body", f"body must be an object, got {_kind(body)}")
    _refuse_unknown(url, body)
    given = {name: value for name, value in body.items() if value is not None}
    options = {
        field: read(field, given[field]) for field, read in _OPTIONS.items() if field in given
    }
    model = _text("model", given.get("model"))
    if not model:
        raise BodyError("model", "model must not be empty")
    if url == CHAT:
        return Generation(
            model=model,
            messages=_messages(given.get("messages")),
            options=options,
            max_tokens=_max_tokens(given),
        )
    return Generation(
        model=model,
        prompt=_prompt(given.get("prompt")),
        options=options,
        max_tokens=_int("max_tokens", given.get("max_tokens", COMPLETIONS_MAX_TOKENS)),
    )


def response_body(
    url: str,
    *,
    job_id: str,
    model: str,
    created: float,
    choices: Sequence[Choice],
    prompt_tokens: int,
    cached_tokens: int,
    completion_tokens: int,
) -> dict[str, Any]:
    """The endpoint's own response body."""
    assert url in URLS, url
    chat = url == CHAT
    suffix = job_id.removeprefix("job_")
    return {
        "id": f"chatcmpl-{suffix}" if chat else f"cmpl-{suffix}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(created),
        "model": model,
        "choices": [_choice(choice, chat) for choice in choices],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        },
    }


def _choice(choice: Choice, chat: bool) -> dict[str, Any]:
    # OpenAI has no word for a generation ended because it repeated itself; stop is the nearest
    finish_reason = {"stop": "stop", "length": "length", "repetition": "stop"}[choice.finish_reason]
    outcome: dict[str, Any] = (
        {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        if chat
        else {"text": choice.text}
    )
    return {"index": choice.index, **outcome, "logprobs": None, "finish_reason": finish_reason}


def _refuse_unknown(url: str, body: Mapping[str, Any]) -> None:
    """Null means that a field is not given; a field that does not exist is refused all the same."""
    chat = url == CHAT
    works = _CHAT_FIELDS if chat else _COMPLETIONS_FIELDS
    neutral = _NEUTRAL | (_CHAT_NEUTRAL if chat else _COMPLETIONS_NEUTRAL)
    refused = _CHAT_REFUSED if chat else _COMPLETIONS_REFUSED
    for name, value in body.items():
        if name in works or name in _OPTIONS:
            continue
        if value is None and (name in _HARMLESS or name in neutral or name in refused):
            continue
        if name in _HARMLESS:
            _HARMLESS[name](name, value)
        elif name in neutral:
            # by type too: 0 is not false
            if not any(type(value) is type(each) and value == each for each in neutral[name]):
                if name == "stream":
                    raise BodyError(name, "stream is not supported for jobs: poll or wait for one")
                raise BodyError(name, f"{name} is not supported yet")
        elif name in refused:
            raise BodyError(name, f"{name} is not supported yet")
        else:
            raise BodyError(name, f"{name} is not a field of {url}")


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    values = {
        name: _int(name, given[name])
        for name in ("max_completion_tokens", "max_tokens")
        if name in given
    }
    if len(set(values.values())) > 1:
        raise BodyError(
            "max_tokens", "max_tokens and max_completion_tokens are one limit under two names; "
            f"got {values['max_tokens']} and {values['max_completion_tokens']}",
        )  # fmt: skip
    return next(iter(values.values()), None)


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise BodyError("messages", f"messages must be a list, got {_kind(value)}")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise BodyError(
            "messages", f"messages must have 1 to {MAX_MESSAGES} entries, got {len(value)}"
        )
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _message(path: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BodyError(path, f"{path} must be an object, got {_kind(message)}")
    given = {name: value for name, value in message.items() if value is not None and value != []}
    for name in message:
        if name in ("tool_calls", "tool_call_id", "function_call", "refusal", "audio"):
            if name in given:
                raise BodyError(f"{path}.{name}", f"{path}.{name} is not supported yet")
        elif name not in ("role", "content", "name"):
            raise BodyError(f"{path}.{name}", f"{path}.{name} is not a field of a message")
    role = given.get("role")
    if role in ("tool", "function"):
        raise BodyError(f"{path}.role", f"{path}.role {role!r} is not supported yet")
    if not isinstance(role, str) or role not in _ROLES:
        raise BodyError(
            f"{path}.role", f"{path}.role must be one of {', '.join(_ROLES)}, got {role!r}"
        )
    read = {"role": _ROLES[role], "content": _content(f"{path}.content", given.get("content"))}
    if "name" in given:
        name = _text(f"{path}.name", given["name"])
        if not _NAME.fullmatch(name):
            raise BodyError(
                f"{path}.name", f"{path}.name must have 1 to 64 characters without spaces or <|\\/>"
            )
        read["name"] = name
    return read


def _content(path: str, content: object) -> str:
    if not isinstance(content, list):
        return _text(path, content)
    texts = []
    for i, part in enumerate(content):
        at = f"{path}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text":
            raise BodyError(at, f"{at} must be a part of type text, got {kind or _kind(part)!r}")
        for name in part:
            if name not in ("type", "text"):
                raise BodyError(f"{at}.{name}", f"{at}.{name} is not a field of a text part")
        texts.append(_text(f"{at}.text", part.get("text")))
    if not texts:
        raise BodyError(path, f"{path} must have at least 1 part")
    return "\n".join(texts)


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a batch of one
    if isinstance(value, str):
        if not value:
            raise BodyError("prompt", "prompt must not be empty")
        return value
    if not isinstance(value, list):
        raise BodyError(
            "prompt", f"prompt must be a string or a list of token ids, got {_kind(value)}"
        )
    if not value:
        raise BodyError("prompt", "prompt must have at least 1 token, got 0")
    if any(isinstance(each, str | list) for each in value):
        raise BodyError("prompt", f"prompt must be one prompt a job, got {len(value)} of them")
    for i, token_id in enumerate(value):
        if type(token_id) is not int or token_id < 0:
            raise BodyError(
                "prompt", f"prompt[{i}] must be a token id, a whole number from 0, got {token_id!r}"
            )
    return tuple(value)


def _kind(value: object) -> str:
    """What JSON calls it."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string",
             list: "a list", dict: "an object", type(None): "nothing"}  # fmt: skip
    return names.get(type(value), type(value).__name__)


def _text(path: str, value: object) -> str:
    if not isinstance(value, str):
        raise BodyError(path, f"{path} must be a string, got {_kind(value)}")
    return value


def _int(path: str, value: object) -> int:
    if type(value) is not int:  # a bool is an int to Python and a mistake to a client
        raise BodyError(path, f"{path} must be an integer, got {value!r}")
    return value


def _number(path: str, value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise BodyError(path, f"{path} must be a finite number, got {value!r}")
    return value  # type: ignore[return-value]


def _bool(path: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise BodyError(path, f"{path} must be true or false, got {value!r}")
    return value


def _stop(path: str, value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise BodyError(path, f"{path} must be a string or a list of strings")
    return tuple(values)


def _token_ids(path: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BodyError(path, f"{path} must be a list of token ids, got {_kind(value)}")
    return tuple(_int(f"{path}[{i}]", each) for i, each in enumerate(value))


def _metadata(path: str, value: object) -> None:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise BodyError(path, f"{path} must be an object of strings")


_OPTIONS: dict[str, Callable[[str, object], Any]] = {
    "n": _int,
    "temperature": _number,
    "top_p": _number,
    "seed": _int,
    "stop": _stop,
    # vLLM's names for what OpenAI lacks
    "top_k": _int,
    "min_p": _number,
    "min_tokens": _int,
    "ignore_eos": _bool,
    "stop_token_ids": _token_ids,
}
_CHAT_FIELDS = {"model", "messages", "max_tokens", "max_completion_tokens"}
_COMPLETIONS_FIELDS = {"model", "prompt", "max_tokens"}

# labels for the sender's own use, and hints about caching that change no output
_HARMLESS: dict[str, Callable[[str, object], Any]] = {
    "user": _text,
    "metadata": _metadata,
    "safety_identifier": _text,
    "prompt_cache_key": _text,
}
# accepted only at a value that asks for nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
}
_CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_COMPLETIONS_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
_CHAT_REFUSED = frozenset({
    "audio", "moderation", "prediction", "prompt_cache_options", "prompt_cache_retention",
    "reasoning_effort", "stream_options", "top_logprobs", "verbosity", "web_search_options",
})  # fmt: skip
_COMPLETIONS_REFUSED = frozenset({"logprobs", "stream_options"})
