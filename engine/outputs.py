"""What the engine hands out: pieces of text as they come, and a request's end with its statistics.

Values only; imports no torch. Times are seconds of the engine's clock, which is monotonic.
"""

from dataclasses import dataclass
from typing import NamedTuple

from engine.parameter_error import ParameterError
from engine.sequence import FinishReason


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities at one place of a sequence, by the model's own distribution.

    That is the softmax of its logits in float32, before temperature, penalties and limits. They
    differ in their last bits with what else a step computes.
    """

    token_id: int  # the one that stands there
    logprob: float
    rank: int  # 1: none is likelier
    top: tuple[tuple[int, float], ...]  # the likeliest ids, as many as asked for, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sample, ended. `token_ids` holds the stop id that ended it; `text` only if asked for."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or stop id; None for the model's own eos
    error: str | None = None  # "code: message", with finish_reason error
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of token_ids, if asked for
    timed_out: bool = False  # the deadline it ended at was its own timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Counts of all samples together; a prompt counts once, however many samples share it."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    completion_tokens: int  # those of an earlier attempt's checkpoint included
    num_preemptions: int
    arrived_at: float
    first_scheduled_at: float | None
    first_token_at: float | None
    finished_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request, all of whose samples have ended."""

    request_id: str
    completions: tuple[Completion, ...]  # by index
    # of the prompt, if asked for; its first token has none. Fewer when it was cut short
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    stats: RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a step added to one sample. The text may lag behind the ids, never run ahead."""

    sample_index: int
    token_ids: tuple[int, ...]
    text: str
    # what of the text each id let out, the same however many ids a step brings; the rest of the
    # text was held back until the end
    pieces: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of the ids, if asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUpdate:
    """What a step brought for one request; the last has its output or its refusal."""

    request_id: str
    deltas: tuple[Delta, ...]
    output: RequestOutput | None = None
    refusal: ParameterError | None = None  # in place of all: its form cannot be used


# seconds; a step of a few tokens on a GPU takes milliseconds, a prefill on a CPU seconds
STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """State now, and totals since the engine was built."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    free_seqs: int  # sequences that could be added and run in the next step
    free_tokens: int  # KV tokens neither held nor promised to unfinished sequences
    max_num_batched_tokens: int  # in one step: the setting, or what was chosen in its place
    last_step_seqs: int
    last_step_tokens: int
    peak_step_seqs: int
    num_steps: int
    num_preemptions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    scheduled_tokens: int  # tokens computed, recomputed ones counted again
    scheduled_seqs: int  # sum over the steps of the sequences in each
    drawing_seqs: int  # of those that drew; generated_tokens to each is 1, but for drafts
    draft_tokens: int  # guessed beforehand; of which
    confirmed_tokens: int  # the model drew the same
    peak_used_blocks: int
    step_bounds_s: tuple[float, ...]
    steps_by_time: tuple[int, ...]  # that took up to each of these bounds, and longer ones
    step_s: float  # time in step(), of which
    run_s: float  # time in the model runner
