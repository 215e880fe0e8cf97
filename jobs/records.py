"""What goes into the store and what comes out of it: frozen values, no connection attached."""

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from sqlalchemy import Row

from jobs.lifecycle import RETRIED, RETRYABLE, TERMINAL, JobState
from jobs.rows import decode, encode
from jobs.streams import StreamMode

MIN_PRIORITY, MAX_PRIORITY = -10, 10
MAX_ATTEMPTS = 100
MAX_DEADLINE_S = 30 * 86_400
MAX_CUSTOM_ID_BYTES = 256
MAX_METADATA = 16
MAX_METADATA_KEY = 64  # characters
MAX_METADATA_VALUE = 512  # characters
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's: no i, l, o, u
_SURROGATE = re.compile("[\ud800-\udfff]")
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]
_JSON = ("body", "metadata", "output", "error")


def new_job_id() -> str:
    """An id nobody can guess, that sorts by the millisecond it was made in."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "job_" + "".join([_PAIRS[number >> shift & 1023] for shift in range(120, -1, -10)])


class JobError(ValueError):
    """A field of a job outside its bounds; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job to be accepted. The body has passed the door check; here only the row's own bounds.

    Raises JobError. Every road into the store comes through here: all have one set of bounds.
    """

    id: str = field(default_factory=new_job_id)
    url: str  # /v1/chat/completions or /v1/completions
    model: str
    body: Mapping[str, Any]
    custom_id: str | None = None
    priority: int = 0
    max_attempts: int = 5
    retry_on: Sequence[str] = RETRIED  # of RETRYABLE: after which failures it is tried again
    deadline_s: float | None = None  # from now
    metadata: Mapping[str, str] = field(default_factory=dict)
    batch_id: str | None = None
    row_number: int | None = None  # in its batch
    stream: StreamMode | None = None  # its tokens are told while they come
    trace_parent: str | None = None
    waiter_id: str | None = None  # the API process whose caller it ends with
    prompt_tokens: int = 0  # counted at the door; 0: not counted
    max_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("id", "url", "model", "custom_id"):
            value = getattr(self, name)
            if value is not None and not storable(value):
                raise JobError(name, "holds U+0000 or a lone surrogate")
        if not 1 <= len(self.id) <= 64:
            raise JobError("id", f"must have 1 to 64 characters, got {len(self.id)}")
        if self.custom_id is not None and not (
            1 <= len(self.custom_id.encode()) <= MAX_CUSTOM_ID_BYTES
        ):
            raise JobError("custom_id", f"must have 1 to {MAX_CUSTOM_ID_BYTES} bytes")
        _check_range("priority", self.priority, MIN_PRIORITY, MAX_PRIORITY)
        _check_range("max_attempts", self.max_attempts, 1, MAX_ATTEMPTS)
        for code in self.retry_on:
            if code not in RETRYABLE:
                known = ", ".join(RETRYABLE)
                raise JobError("retry_on", f"must be among {known}, got {code[:64]!r}")
        if self.deadline_s is not None and not 0 < self.deadline_s <= MAX_DEADLINE_S:
            raise JobError(
                "deadline_s", f"must be in (0, {MAX_DEADLINE_S}] seconds, got {self.deadline_s:g}"
            )
        if len(self.metadata) > MAX_METADATA:
            raise JobError(
                "metadata", f"must have at most {MAX_METADATA} keys, got {len(self.metadata)}"
            )
        for key, value in self.metadata.items():
            if not 1 <= len(key) <= MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
                raise JobError(
                    "metadata",
                    f"must have keys of 1 to {MAX_METADATA_KEY} and values of at most "
                    f"{MAX_METADATA_VALUE} characters",
                )

    def accepted(self, tenant: str, now: float) -> "JobRecord":
        """The queued row it becomes."""
        return JobRecord(
            id=self.id,
            tenant_id=tenant,
            custom_id=self.custom_id,
            batch_id=self.batch_id,
            row_number=self.row_number,
            url=self.url,
            model=self.model,
            body=dict(self.body),
            priority=self.priority,
            deadline_at=None if self.deadline_s is None else now + self.deadline_s,
            max_attempts=self.max_attempts,
            retry_on=tuple(str(code) for code in RETRYABLE if code in self.retry_on),
            metadata=dict(self.metadata),
            stream=self.stream,
            trace_parent=self.trace_parent,
            waiter_id=self.waiter_id,
            state=JobState.QUEUED,
            created_at=now,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
        )


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        shown = value if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
        raise JobError(name, f"must be in [{low}, {high}], got {shown}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job's row, its JSON columns decoded. Times are seconds by the database's clock."""

    id: str
    tenant_id: str
    custom_id: str | None
    batch_id: str | None
    url: str
    model: str
    body: dict[str, Any] | None  # None where it was not read
    priority: int
    deadline_at: float | None
    max_attempts: int
    retry_on: tuple[str, ...] = tuple(map(str, RETRIED))  # codes of errors
    metadata: dict[str, str]
    stream: str | None = None  # a StreamMode
    trace_parent: str | None = None
    state: JobState
    attempt: int = 0
    fence: int = 0
    crash_count: int = 0
    worker_id: str | None = None
    created_at: float
    published_at: float | None = None
    not_before: float | None = None  # queued, it waits until then
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    output: dict[str, Any] | None = None  # the endpoint's response body
    error: dict[str, Any] | None = None  # message, type, param, code
    finish_reason: str | None = None
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    wasted_tokens: int = 0
    row_number: int | None = None
    waiter_id: str | None = None  # the API process whose caller it ends with
    saved_tokens: int | None = None  # of the row whose result this one took

    @classmethod
    def of(cls, row: Row[Any]) -> Self:
        """From a row that holds every column of `columns`."""
        return cls.from_values(dict(row._mapping))

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """From the columns as the database has them."""
        for name in _JSON:
            values[name] = decode(values[name])
        values["retry_on"] = tuple(values["retry_on"].split())
        return cls(**{**values, "state": JobState(values["state"])})

    def row(self) -> dict[str, Any]:
        """The columns as the database takes them. Raises ValueError on NaN in a JSON column."""
        values = {name: getattr(self, name) for name in RECORD_COLUMNS}
        for name in _JSON:
            values[name] = None if values[name] is None else encode(values[name])
        stored = 1 if self.body is not None and self.body.get("store") is True else None
        return {
            **values,
            "state": str(self.state), "retry_on": " ".join(self.retry_on), "stored": stored,
        }  # fmt: skip

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    @property
    def usage(self) -> dict[str, int]:
        """Token counts as the job object shows them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "wasted_tokens": self.wasted_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    @property
    def timings(self) -> dict[str, float | None]:
        """Seconds from acceptance to the start, to the first token, to the end; and per token.

        None where the moment has not come. The start is the last attempt's.
        """
        tpot_s = None
        if self.first_token_at is not None and self.finished_at is not None:
            later_tokens = self.completion_tokens - 1
            if later_tokens > 0:
                tpot_s = (self.finished_at - self.first_token_at) / later_tokens
        return {
            "queue_s": self._since_creation(self.started_at),
            "ttft_s": self._since_creation(self.first_token_at),
            "tpot_s": tpot_s,
            "total_s": self._since_creation(self.finished_at),
        }

    def _since_creation(self, moment: float | None) -> float | None:
        return None if moment is None else max(0.0, moment - self.created_at)


RECORD_COLUMNS = tuple(each.name for each in fields(JobRecord))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker says of itself when it starts. `id` is new for every incarnation."""

    id: str
    hostname: str
    pid: int
    model: str
    max_num_seqs: int
    kv_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord(WorkerInfo):
    """A worker's row."""

    started_at: float
    seen_at: float
    lease_until: float
    stats: dict[str, Any]


def storable(text: str) -> bool:
    """Whether a plain text column takes it on both databases."""
    return "\0" not in text and (text.isascii() or not _SURROGATE.search(text))
