"""One generation in the engine: the tokens it knows, how many of them are computed, where they lie.

Knows nothing of text, models or the queue. Imports no torch.
"""

from collections import abc
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from engine.sampling_params import SamplingParams
from engine.token_rules import NO_RULES, TokenRules


class SequenceState(StrEnum):
    WAITING = "waiting"  # holds no blocks; new, or preempted
    RUNNING = "running"  # holds blocks; may be scheduled
    FINISHED = "finished"  # holds nothing; has a finish_reason


class TokenFilter(Protocol):
    """What may come next in a sequence whose output must have a form."""

    cost_s: float  # seconds that the last mask took, or the first is expected to

    def mask(self, generated_ids: abc.Sequence[int]) -> bytes:
        """One bit for each id, lowest first. Raises ValueError: from here on nothing may come."""

    def num_allowed(self, generated_ids: abc.Sequence[int], draft_ids: abc.Sequence[int]) -> int:
        """How many of the drafts may come, one after the other."""


class FinishReason(StrEnum):
    """Why a sequence ended. Never a lie: a deadline is not a length."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens
    DEADLINE = "deadline"
    REPETITION = "repetition"  # caught in a loop; see RepetitionDetection
    ABORT = "abort"  # the client cancelled
    ERROR = "error"  # this sequence cannot go on; see Sequence.error


# reasons of a sequence that has all the tokens it will ever have
COMPLETE = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})


@dataclass(slots=True, weakref_slot=True, kw_only=True, eq=False)
class Sequence:
    """Mutable state of one sample of one request. Owned by the Scheduler."""

    seq_id: int  # unique in the engine's life
    request_id: str
    sample_index: int  # 0 … params.num_seqs - 1
    token_ids: list[int]  # prompt, then generated
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # of this sample's noise; with the position it fixes every draw
    token_rules: TokenRules = NO_RULES
    token_filter: TokenFilter | None = None  # of this sequence alone; None: any token may come
    priority: int = 0  # higher first
    arrival: int = 0  # order of arrival; ties of priority are served in it
    cache_salt: bytes = b""  # sequences with different salts never share blocks
    state: SequenceState = SequenceState.WAITING
    block_table: list[int] = field(default_factory=list)  # position p lies in entry p // block_size
    block_keys: list[bytes] = field(default_factory=list)  # BlockManager's, of leading full blocks
    num_computed_tokens: int = 0  # leading tokens whose K and V lie in the block table
    # leading tokens whose log-probability is known or not asked for; None: no token's is asked for
    num_scored_tokens: int | None = field(init=False)
    # with it, all tokens are known and no more are drawn: it ends so when these are computed
    ending: FinishReason | None = None
    is_complete: bool = False  # its last token is drawn, but has yet to be read from the device
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        # the first token has no probability: nothing precedes it. One sample scores the prompt for
        # all
        if self.params.prompt_logprobs is not None and self.sample_index == 0:
            self.num_scored_tokens = 1
        else:
            asked = self.params.logprobs is not None
            self.num_scored_tokens = self.num_prompt_tokens if asked else None

    def mark_scored(self) -> None:
        """Take in that what is computed has told the log-probability of each next known token."""
        if self.num_scored_tokens is not None:
            told = min(self.num_computed_tokens + 1, self.num_tokens)
            self.num_scored_tokens = max(self.num_scored_tokens, told)

    def take_in(self, drawn: abc.Sequence[int], eos_token_ids: frozenset[int]) -> int:
        """Append what was drawn, up to what ends the sequence; returns how many tokens that is."""
        for count, token_id in enumerate(drawn, start=1):
            self.token_ids.append(token_id)
            if self.reason_to_end(eos_token_ids) is not None:
                return count
        return len(drawn)

    def reason_to_end(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why no more tokens are to be drawn behind the newest; None while there are."""
        if self.ending is not None:
            return self.ending
        params = self.params
        stops = self.token_ids[-1] in params.stop_ids(eos_token_ids)
        # the stopping token itself is no part of the text, so min_tokens come before it
        if stops and self.num_generated_tokens > params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_generated_tokens >= params.max_tokens else None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_unscored_tokens(self) -> int:
        """Known tokens whose log-probability is asked for and has yet to be computed."""
        if self.num_scored_tokens is None:
            return 0
        wanted = self.num_tokens if self.params.logprobs is not None else self.num_prompt_tokens
        return max(0, wanted - self.num_scored_tokens)

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens that may come from the prefix cache.

        The last known token is computed for its logits, and so is each whose logits score another:
        a cache has keys and values but no logits.
        """
        known = self.num_tokens
        if self.num_scored_tokens is not None and self.num_unscored_tokens:
            known = self.num_scored_tokens
        return known - 1

    def num_tokens_to_score(self, limit: int) -> int:
        """Most next tokens to compute so that no more than `limit` known tokens are scored by it.

        At least 1, so that a sequence always goes on.
        """
        if self.num_scored_tokens is None or not self.num_unscored_tokens:
            return self.num_uncomputed_tokens
        return max(1, self.num_scored_tokens - 1 - self.num_computed_tokens + limit)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


def rank(sequence: Sequence) -> tuple[int, int, int]:
    """Who goes first: higher priority, then earlier arrival. Unique, and never changes."""
    return (-sequence.priority, sequence.arrival, sequence.sample_index)
