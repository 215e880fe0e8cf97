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

    cost_s: float  # seconds that the last mask took

    def mask(self, generated_ids: abc.Sequence[int]) -> bytes:
        """One bit for each id, lowest first. Raises ValueError: from here on nothing may come."""


class FinishReason(StrEnum):
    """Why a sequence ended. Never a lie: a deadline is not a length."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens
    DEADLINE = "deadline"
    REPETITION = "repetition"  # caught in a loop; see RepetitionDetection
    ABORT = "abort"  # the client cancelled
    ERROR = "error"  # this sequence cannot go on; see Sequence.error


@dataclass(slots=True, weakref_slot=True, kw_only=True, eq=False)
class Sequence:
    """Mutable state of one sample of one request. Owned by the Scheduler."""

    seq_id: int  # unique in the engine's life
    request_id: str
    sample_index: int  # 0 … params.n - 1
    token_ids: list[int]  # prompt, then generated
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # of this request's noise; with sample_index and position it fixes every draw
    token_rules: TokenRules = NO_RULES
    token_filter: TokenFilter | None = None  # of this sequence alone; None: any token may come
    priority: int = 0  # higher first
    arrival: int = 0  # order of arrival; ties of priority are served in it
    cache_salt: bytes = b""  # sequences with different salts never share blocks
    state: SequenceState = SequenceState.WAITING
    block_table: list[int] = field(default_factory=list)  # position p lies in entry p // block_size
    block_keys: list[bytes] = field(default_factory=list)  # BlockManager's, of leading full blocks
    num_computed_tokens: int = 0  # leading tokens whose K and V lie in the block table
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

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
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens
