"""What is posted to a worker's ledger: each entry is one write, answered after its commit."""

from collections.abc import Callable
from dataclasses import dataclass

from jobs.accounting import Counted
from jobs.claims import Checkpoint, ClaimedJob, Held
from jobs.lifecycle import ErrorCode
from jobs.records import NewJob
from worker.generation import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Take the row for this worker; insert it first, when the message carried the whole job."""

    job_id: str
    new_job: NewJob | None = None
    answer: Callable[[ClaimedJob | None, float], None]  # None: somebody has it. And SQL's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBack:
    """Its message came here, and this worker will not claim it: publish it for others."""

    job_id: str
    answer: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Insert:
    """Store a row for the workers of another model."""

    new_job: NewJob
    answer: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End the row as `outcome` says, if it is still held under this fence."""

    held: Held
    outcome: Outcome
    wasted_tokens: int
    pieces: str | None = None  # of its stream, what the row has not yet
    answer: Callable[[bool], None]  # False: it was cancelled, or another attempt has it


@dataclass(frozen=True, slots=True, kw_only=True)
class HandBack:
    """Put the row back into the queue, to go on from `checkpoint` elsewhere."""

    held: Held
    checkpoint: Checkpoint | None  # None: it has not come to look at the row's
    num_tokens: int  # all that the attempt has; waste, but for those in the row, if it is late
    first_token_at: float | None  # monotonic; of this attempt
    pieces: str | None = None  # of its stream, what the row has not yet
    crashed: bool  # the engine process died with it
    failed: ErrorCode | None = None  # it failed by itself, and is to be tried again
    answer: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The client revoked the job through Celery; insert its row first, as for a claim."""

    job_id: str
    new_job: NewJob | None = None
    answer: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Tokens were generated for a job that this worker does not hold any more."""

    held: Held  # as it was
    tokens: int
    whole: bool = False  # all that the attempt had: those in the checkpoint it left are none
    first_token_at: float | None  # monotonic; of its attempt, or of these tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The prompt of a job that came whole in a message has been tokenized."""

    counted: Counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Nothing to write; answered when everything posted before it is."""

    answer: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """An engine process ended; what it ran is handed back as suspects beside."""

    id: str  # of this death: the entry may be written twice
    model: str
    ending: str
    job_ids: list[str]


Entry = Claim | PutBack | Insert | Finish | HandBack | Cancel | Waste | Count | Died | Flush
