"""OpenAI's shapes, both ways: a body to a generation, a generation's outcome to a response body.

Every field of the endpoints is in a table (`jobs.openai_tables`): it works, it is harmless and
ignored, it is accepted at the one value that asks for nothing, or it is refused by name. Bounds of
sampling options are the engine's to check; here only that each has the right type.

BodyError
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs import openai_fields as fields
from jobs import (
    openai_messages,
    openai_response_object,
    openai_responses,
    openai_streaming,
    openai_tools,
    structured_outputs,
)
from jobs import openai_tables as tables
from jobs.openai_fields import BodyError, UnknownField, UnsupportedField
from jobs.openai_tools import NO_TOOLS, ToolCall, ToolUse

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
URLS = (CHAT, COMPLETIONS, RESPONSES)
_PREFIXES = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", RESPONSES: openai_response_object.PREFIX}
COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default for the older endpoint
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a body asks for. Exactly one of messages and prompt is given."""

    model: str
    messages: list[dict[str, Any]] | None = None  # as chat templates take them
    tool_use: ToolUse = NO_TOOLS
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | tuple[int, ...] | None = None  # text or token ids
    options: Mapping[str, Any]  # the sampling options given, under SamplingParams' names
    max_tokens: int | None = None  # None: as many as the model's length leaves room for
    echo: bool = False  # the prompt stands before the text
    prompt_logprobs: int | None = None  # shown in the response, so many at each place


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample's outcome."""

    index: int
    text: str
    finish_reason: str  # the engine's: stop, length, repetition, deadline
    logprobs: Mapping[str, Any] | None = None  # in the endpoint's own shape
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def parse(url: str, body: object, *, streams: bool = False) -> Generation:
    """Read the body of an endpoint; `streams`: whoever sent it is told of tokens while they come.

    Raises BodyError naming what is unknown, unsupported or odd.
    """
    if url not in URLS:
        raise BodyError("url", f"url must be one of {', '.join(URLS)}, got {fields.shown(url)}")
    if not isinstance(body, dict):
        raise BodyError("body", f"body must be an object, got {fields.kind(body)}")
    if url == RESPONSES:
        return _parse_response(body, streams)
    _refuse_unknown(url, body)
    given = {name: value for name, value in body.items() if value is not None}
    options = {
        field: read(field, given[field]) for field, read in tables.OPTIONS.items() if field in given
    }
    openai_streaming.check(given, streams=streams)
    if fields.boolean("use_beam_search", given.get("use_beam_search", False)):
        _search_as_vllm(options)
    form = structured_outputs.read(given)
    if form is not None:
        options["structured_outputs"] = form
    model = fields.text("model", given.get("model"))
    if not model:
        raise BodyError("model", "model must not be empty")
    shown = options.get("prompt_logprobs")
    if url == CHAT:
        fields.boolean("store", given.get("store", False))
        tool_use = openai_tools.tool_use(given)
        if tool_use.forced and form is not None:
            raise BodyError(
                "tool_choice", f"tool_choice and {form['param']} both ask for a form; give one"
            )
        return Generation(
            model=model,
            messages=openai_messages.messages(given.get("messages")),
            tool_use=tool_use,
            template_variables=openai_tools.template_variables(
                given.get("chat_template_kwargs", {})
            ),
            options=options | _chat_logprobs(given),
            max_tokens=_max_tokens(given),
            prompt_logprobs=shown,
        )
    echo = fields.boolean("echo", given.get("echo", False))
    return Generation(
        model=model,
        prompt=_prompt(given.get("prompt")),
        options=options | _completion_logprobs(given, echo, shown),
        echo=echo,
        prompt_logprobs=shown,
        max_tokens=fields.integer("max_tokens", given.get("max_tokens", COMPLETIONS_MAX_TOKENS)),
    )


def _parse_response(body: dict[str, Any], streams: bool) -> Generation:
    chat = openai_responses.chat_body(body)
    try:
        return parse(CHAT, chat, streams=streams)
    except BodyError as error:
        was, error.param = error.param, openai_responses.field_of(error.param)
        error.args = (str(error).replace(was, error.param),)
        raise


def field_of(url: str, body: Mapping[str, Any], param: str) -> str:
    """The name in this body of what the engine calls `param`."""
    if url == RESPONSES:
        return openai_responses.field_of(param)
    if url != CHAT:
        return param
    if param == "max_tokens" and body.get("max_tokens") is None:
        return (
            "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        )
    return "messages" if param == "prompt" else param  # a chat's prompt is made of them


def reply_id(url: str, job_id: str) -> str:
    """What the endpoint calls the job."""
    return _PREFIXES[url] + job_id.removeprefix("job_")


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
    reasoning_tokens: int | None = None,  # of these; None for a model that does not think
    prompt_logprobs: Sequence[Any] | None = None,
    body: Mapping[str, Any] | None = None,  # the request's, which a response repeats
) -> dict[str, Any]:
    """The endpoint's own response body."""
    assert url in URLS, url
    chat = url == CHAT
    details = (
        {}
        if reasoning_tokens is None
        else {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    )
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        **details,
    }
    if url == RESPONSES:
        return _response(body or {}, job_id, model, created, choices[0], usage)
    # where vLLM has it: with each completion, with the whole chat
    prompt_scores = {} if prompt_logprobs is None else {"prompt_logprobs": list(prompt_logprobs)}
    return {
        "id": reply_id(url, job_id),
        "object": "chat.completion" if chat else "text_completion",
        "created": int(created),
        "model": model,
        "choices": [
            _choice(choice, job_id if chat else None) | ({} if chat else prompt_scores)
            for choice in choices
        ],
        **(prompt_scores if chat else {}),
        "usage": usage,
    }


def _response(
    body: Mapping[str, Any],
    job_id: str,
    model: str,
    created: float,
    choice: Choice,
    usage: Mapping[str, Any],
) -> dict[str, Any]:
    items = openai_response_object.output_items(
        job_id, choice.text, choice.reasoning, choice.calls, choice.logprobs
    )
    return openai_response_object.finished(
        body, job_id, model, created, items, _FINISH_REASONS[choice.finish_reason][0], usage
    )


# OpenAI has no word for a generation ended because it repeated itself: stop is the nearest, and
# vLLM's field says more. One cut short by its own timeout_s is neither a stop nor a length, and who
# asks for a timeout can be told by its own name.
_FINISH_REASONS: dict[str, tuple[str, dict[str, str]]] = {
    "stop": ("stop", {}),
    "length": ("length", {}),
    "repetition": ("stop", {"stop_reason": "repetition_detected"}),
    "deadline": ("deadline", {}),
}


def _choice(choice: Choice, chat_id: str | None) -> dict[str, Any]:
    finish_reason, marker = _FINISH_REASONS[choice.finish_reason]
    outcome: dict[str, Any]
    if chat_id is None:
        outcome = {"text": choice.text}
    else:
        message = openai_tools.message(
            choice.text,
            reasoning=choice.reasoning,
            calls=choice.calls,
            job_id=chat_id,
            sample=choice.index,
        )
        outcome = {"message": message}
    if choice.calls and choice.finish_reason == "stop":
        finish_reason = "tool_calls"
    return {
        "index": choice.index,
        **outcome,
        "logprobs": choice.logprobs,
        "finish_reason": finish_reason,
        **marker,
    }


def _refuse_unknown(url: str, body: Mapping[str, Any]) -> None:
    """Null means that a field is not given; a field that does not exist is refused all the same."""
    chat = url == CHAT
    works = tables.CHAT_FIELDS if chat else tables.COMPLETIONS_FIELDS
    neutral = tables.CHAT_NEUTRAL if chat else tables.COMPLETIONS_NEUTRAL
    refused = tables.CHAT_REFUSED if chat else frozenset[str]()
    for name, value in body.items():
        if name in works or name in tables.OPTIONS or name in tables.BOTH_WORK:
            continue
        if value is None and (name in tables.HARMLESS or name in neutral or name in refused):
            continue
        if name in tables.HARMLESS:
            tables.HARMLESS[name](name, value)
        elif name in neutral:
            # by type too: 0 is not false
            if not any(type(value) is type(each) and value == each for each in neutral[name]):
                raise fields.unsupported(name, value, neutral[name])
        elif name in refused:
            raise UnsupportedField(name, f"{name} is not supported yet")
        else:
            name = name[: fields.MAX_SHOWN]
            raise UnknownField(name, f"{name} is not a field of {url}")


def _search_as_vllm(options: dict[str, Any]) -> None:
    """vLLM's way to ask for a beam search: n is how many beams there are, and all are texts."""
    if options.setdefault("num_beams", options.get("n", 1)) == 1:
        raise BodyError("use_beam_search", "use_beam_search needs n, or num_beams, of at least 2")


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    values = {
        name: fields.integer(name, given[name])
        for name in ("max_completion_tokens", "max_tokens")
        if name in given
    }
    if len(set(values.values())) > 1:
        raise BodyError(
            "max_tokens", "max_tokens and max_completion_tokens are one limit under two names; "
            f"got {fields.shown(values['max_tokens'])} and "
            f"{fields.shown(values['max_completion_tokens'])}",
        )  # fmt: skip
    return next(iter(values.values()), None)


def _chat_logprobs(given: Mapping[str, Any]) -> dict[str, int]:
    wanted = fields.boolean("logprobs", given.get("logprobs", False))
    if "top_logprobs" not in given:
        return {"logprobs": 0} if wanted else {}
    num_top = fields.integer("top_logprobs", given["top_logprobs"])
    if not wanted:
        raise BodyError("top_logprobs", "top_logprobs needs logprobs to be true")
    if not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise BodyError(
            "top_logprobs", f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {num_top}"
        )
    return {"logprobs": num_top}


def _completion_logprobs(given: Mapping[str, Any], echo: bool, shown: int | None) -> dict[str, int]:
    """An echoed prompt is scored as the output is, and perhaps for its own field as well."""
    if "logprobs" not in given:
        return {}
    num_top = fields.integer("logprobs", given["logprobs"])
    scored = {"prompt_logprobs": max(num_top, shown or 0)} if echo else {}
    return {"logprobs": num_top} | scored


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a batch of one
    if isinstance(value, str):
        if not value:
            raise BodyError("prompt", "prompt must not be empty")
        return value
    if not isinstance(value, list):
        raise BodyError(
            "prompt", f"prompt must be a string or a list of token ids, got {fields.kind(value)}"
        )
    if not value:
        raise BodyError("prompt", "prompt must have at least 1 token, got 0")
    if all(isinstance(each, str | list) for each in value):
        raise BodyError("prompt", f"prompt must be one prompt a job, got {len(value)} of them")
    for i, token_id in enumerate(value):
        if type(token_id) is not int or token_id < 0:
            raise BodyError(
                "prompt",
                f"prompt[{i}] must be a token id, a whole number from 0, "
                f"got {fields.shown(token_id)}",
            )
    return tuple(value)
