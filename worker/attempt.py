"""One job in a worker's hands, under one fence: its prompt, the tokens it has, how far it is."""

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.tokenizer import Tokenizer
from jobs.claims import Checkpoint, ClaimedJob, Held, num_tokens
from worker.admission import UNKNOWN_LOAD, Load
from worker.delivery import Delivery
from worker.generation import Refusal
from worker.prompt import Prompt
from worker.streaming import Streaming, Unstored, streaming_of


def key_of(held: Held) -> str:
    """A claim's name in the engine: the same job may come back here as another attempt."""
    return f"{held.id}:{held.fence}"


def held_of(key: str) -> Held:
    job_id, _, fence = key.rpartition(":")
    return Held(job_id, int(fence))


class Phase(Enum):
    CLAIMED = auto()  # its prompt is being prepared
    WAITING = auto()  # for its turn in the engine
    RUNNING = auto()  # in the engine
    ENDING = auto()  # its result is on its way into SQL


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """One job of ours under one fence."""

    job: ClaimedJob
    delivery: Delivery
    deadline_at: float | None  # monotonic
    refusal: Refusal | None  # known before the claim
    phase: Phase = Phase.CLAIMED
    prompt: Prompt | None = None
    generated: Checkpoint = field(default_factory=list)  # ids of each sample, resumed ones too
    first_token_at: float | None = None  # monotonic; the first that is this attempt's own
    num_resumed: int = 0  # of these, made by earlier attempts
    num_seen: int = 0  # of these, by the last beat
    num_left: int = 0  # in the row's checkpoint, and not of these
    claimed_at: float = field(default_factory=time.monotonic)
    running_at: float | None = None  # monotonic; given to the engine
    limit: str | None = None  # the time limit it ran into
    streaming: Streaming | None = None  # None: nobody hears of its tokens before its end

    def __post_init__(self) -> None:
        self.num_left = num_tokens(self.job.checkpoint or [])

    @property
    def key(self) -> str:
        return key_of(self.held)

    @property
    def held(self) -> Held:
        return Held(self.job.id, self.job.fence)

    @property
    def num_generated(self) -> int:
        return num_tokens(self.generated)

    @property
    def num_in_all(self) -> int:
        """Its tokens, and those of an earlier attempt that it could not go on from."""
        return self.num_left + self.num_generated

    def resume(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        """Take the prompt, and the tokens of an earlier attempt where they fit it."""
        self.prompt = prompt
        checkpoint = self.job.checkpoint or []
        if len(checkpoint) == prompt.params.n and all(
            len(ids) <= prompt.params.max_tokens for ids in checkpoint
        ):
            self.generated = [list(ids) for ids in checkpoint]
            self.num_left = 0
        else:
            self.generated = [[] for _ in range(prompt.params.n)]
        self.num_resumed = self.num_generated
        job = self.job
        self.streaming = streaming_of(
            job.id, job.url, job.stream, prompt, self.generated, tokenizer
        )

    @property
    def unstored_pieces(self) -> Unstored | None:
        return None if self.streaming is None else self.streaming.unstored()

    @property
    def load(self) -> Load:
        if self.prompt is None:
            return UNKNOWN_LOAD
        return Load(
            num_seqs=self.prompt.params.num_seqs,
            prompt_tokens=len(self.prompt.token_ids),
            max_tokens=self.prompt.params.max_tokens,
            generated_tokens=self.num_generated,
            started=self.num_generated > self.num_resumed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What the lease has to say to SQL of the jobs held."""

    held: list[Held]
    checkpoints: dict[Held, Checkpoint]
    first_tokens: dict[Held, float] = field(default_factory=dict)  # monotonic
    pieces: dict[Held, Unstored] = field(default_factory=dict)  # of what the checkpoints hold
