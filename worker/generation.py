"""A job's body to what the engine takes, and what the engine gives to the job's result.

The one file of the worker that knows both worlds' words. The door check is the API's: it is made
again here because a job may come by Celery alone, and because this engine's limits may be smaller
than those the API knows.

Refusal
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.door import checked_params
from engine.parameter_error import ContextTooLong
from engine.reply import MAX_CALLS, PLAIN, Reply, ReplyForm, num_reasoning_tokens, parse_reply
from engine.sampling_params import MAX_N, ParameterError
from engine.tokenizer import Tokenizer
from jobs import openai
from jobs.lifecycle import ErrorCode, JobState
from jobs.openai_fields import BodyError
from jobs.openai_tools import ToolCall
from worker.messages import Ended
from worker.prompt import Prompt
from worker.scores import echo_of, logprobs_of, prompt_logprobs_of, text_of


class Refusal(Exception):
    """A job this engine cannot do; ends it as failed with this error."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        prompt_tokens: int = 0,  # 0: refused before they were counted
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.prompt_tokens = prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one engine."""

    max_model_len: int
    kv_tokens: int
    block_size: int = 1
    max_n: int = MAX_N

    def max_seq_len(self, num_beams: int) -> int:
        """Tokens of prompt and output together; beams run all at once, in blocks of their own."""
        num_blocks = self.kv_tokens // self.block_size // max(1, num_beams)
        return min(self.max_model_len, num_blocks * self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a generation ended, in a row's words. Times by the monotonic clock."""

    state: JobState
    output: dict[str, Any] | None = None
    code: ErrorCode | None = None
    message: str = ""
    param: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_at: float | None = None


def prepare(
    job_id: str,
    url: str,
    body: dict[str, Any],
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    streams: bool = False,
) -> Prompt:
    """The job's prompt and options. Raises Refusal."""
    token_ids: list[int] = []
    try:
        generation = openai.parse(url, body, streams=streams)
        token_ids = tokenizer.encode_input(
            prompt=generation.prompt,
            messages=generation.messages,
            tools=generation.tool_use.tools,
            variables=generation.template_variables,
        )
        prompt = _prepare(job_id, generation, token_ids, tokenizer, limits)
    except (BodyError, ParameterError) as error:
        named = isinstance(error, BodyError)
        raise Refusal(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED
            if isinstance(error, ContextTooLong)
            else ErrorCode.INVALID_REQUEST,
            str(error),
            param=error.param if named else openai.field_of(url, body, error.param),
            prompt_tokens=len(token_ids),
        ) from None
    max_tokens = prompt.params.max_tokens
    if len(token_ids) + max_tokens > limits.kv_tokens:
        raise Refusal(
            ErrorCode.EXCEEDS_CAPACITY,
            f"prompt ({len(token_ids)} tokens) + max_tokens ({max_tokens}) need more than "
            f"the {limits.kv_tokens} tokens this engine's KV cache holds",
            param=openai.field_of(url, body, "max_tokens"),
            prompt_tokens=len(token_ids),
        )
    return prompt


def _prepare(
    job_id: str,
    generation: openai.Generation,
    token_ids: list[int],
    tokenizer: Tokenizer,
    limits: Limits,
) -> Prompt:
    tool_use = generation.tool_use
    params = checked_params(
        tokenizer,
        token_ids,
        # an unseeded job draws the same noise in every attempt, so that one resumed from a
        # checkpoint is the text that would have been
        {"seed": seed_of(job_id), **generation.options},
        forced_tools=tool_use.forced,
        parallel_calls=tool_use.parallel,
        max_tokens=generation.max_tokens,
        room=limits.max_seq_len(generation.options.get("num_beams", 1)),
        max_model_len=limits.max_model_len,
        max_n=limits.max_n,
    )
    return Prompt(
        token_ids=token_ids,
        params=params,
        reply_form=_reply_form(generation, token_ids, tokenizer),
        echo=echo_of(generation, token_ids, params, tokenizer),
        prompt_logprobs=generation.prompt_logprobs,
    )


def _reply_form(
    generation: openai.Generation, token_ids: list[int], tokenizer: Tokenizer
) -> ReplyForm:
    """A completion is text. So is a chat that has to have a form: there is no room in it for a
    thought, though its prompt may end in one, and what looks like a call is the answer."""
    if generation.messages is None or "structured_outputs" in generation.options:
        return PLAIN
    tool_use = generation.tool_use
    max_calls = MAX_CALLS if tool_use.parallel else 1
    return tokenizer.reply_form(token_ids, tool_names=tool_use.names, max_calls=max_calls)


def seed_of(job_id: str) -> int:
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8]) >> 1


def outcome_of(
    ended: Ended,
    prompt: Prompt,
    tokenizer: Tokenizer,
    *,
    job_id: str,
    url: str,
    model: str,
    created: float,
    body: Mapping[str, Any] | None = None,
    generated: Sequence[Sequence[int]] = (),  # each sample's ids, those of earlier attempts too
) -> Outcome:
    """The row's result from the engine's: the worst sample decides the state."""
    outcome = Outcome(
        state=JobState.SUCCEEDED,
        finish_reason=_worst([sample.finish_reason for sample in ended.samples]),
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=ended.cached_tokens,
        completion_tokens=ended.completion_tokens,
        first_token_at=ended.first_token_at,
    )
    if outcome.finish_reason in ("error", "abort"):
        error = next((sample.error for sample in ended.samples if sample.error), "")
        return replace(outcome, state=JobState.FAILED, **_engine_error(error))
    expired = any(each.finish_reason == "deadline" and not each.timed_out for each in ended.samples)
    if expired:  # the job's own deadline_s; a sample cut short by its timeout_s is a result
        return replace(
            outcome,
            state=JobState.EXPIRED,
            code=ErrorCode.DEADLINE_EXCEEDED,
            message="the deadline passed before the job was done",
        )
    replies = [parse_reply(each.text, prompt.reply_form) for each in ended.samples]
    choices = [
        openai.Choice(
            index=sample.index,
            text=text_of(sample, prompt, reply.content, generated, tokenizer),
            finish_reason=sample.finish_reason,
            logprobs=logprobs_of(sample, ended, prompt, tokenizer, chat=url != openai.COMPLETIONS),
            reasoning=reply.reasoning,
            calls=tuple(ToolCall(call.name, call.arguments) for call in reply.calls),
        )
        for sample, reply in zip(ended.samples, replies, strict=True)
    ]
    output = openai.response_body(
        url,
        job_id=job_id,
        model=model,
        created=created,
        choices=choices,
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=ended.cached_tokens,
        completion_tokens=ended.completion_tokens,
        reasoning_tokens=_reasoning_tokens(ended, replies, generated, prompt.reply_form),
        prompt_logprobs=prompt_logprobs_of(ended, prompt, tokenizer),
        body=body,
    )
    return replace(outcome, output=output)


def _reasoning_tokens(
    ended: Ended,
    replies: Sequence[Reply],
    generated: Sequence[Sequence[int]],
    reply_form: ReplyForm,
) -> int | None:
    """Of all samples; None where the model does not think, or its thoughts cannot be counted."""
    if reply_form.thinking_ids is None or not generated:
        return None
    return sum(
        num_reasoning_tokens(generated[sample.index], reply_form.thinking_ids)
        for sample, reply in zip(ended.samples, replies, strict=True)
        if reply.reasoning
    )


def _worst(finish_reasons: Sequence[str]) -> str:
    """One word for all samples: that one of them was cut short is worth knowing."""
    return min(finish_reasons, key=_WORST_FIRST.index)


_WORST_FIRST = ("error", "abort", "deadline", "repetition", "length", "stop")


_ENGINES_CODES = (
    ErrorCode.NUMERICAL_ERROR,
    ErrorCode.INVALID_REQUEST,
    ErrorCode.RESOURCE_EXHAUSTED,
    ErrorCode.ENGINE_ERROR,
)


def _engine_error(error: str) -> dict[str, Any]:
    """The engine says "code: message"; a code the API does not have is an engine_error."""
    code, _, message = error.partition(": ")
    if code in _ENGINES_CODES:
        return {"code": ErrorCode(code), "message": message}
    message = error or "the engine gave up this generation"
    return {"code": ErrorCode.ENGINE_ERROR, "message": message}
