"""Rows of a batch on their way in: many at once, each a job like any other.

On SQLite by one prepared statement, on PostgreSQL by COPY: of a row's cost most is the database's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from jobs.batch_record import BatchRecord, BatchState
from jobs.batches import ENDING, ended_as
from jobs.lifecycle import RETRIED, JobState
from jobs.rows import encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What a row like it has come to, for one that need not be run."""

    state: JobState
    output: str | None  # JSON
    error: str | None  # JSON
    finish_reason: str | None
    saved_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """What a line of the file becomes: a queued job, or one that has ended."""

    id: str
    custom_id: str
    row_number: int
    body: str  # JSON, as the line has it
    max_tokens: int
    error: Mapping[str, Any] | None = None  # what the endpoint says of its body
    stored: bool = False  # its body says so
    shared: Shared | None = None


def insert_rows(
    connection: Connection,
    batch: BatchRecord,
    rows: Sequence[BatchRow],
    *,
    now: float,
    max_attempts: int,
) -> None:
    """In the order given, which is that in which they are to run. Of a batch that has been told to
    end, each ends as it does."""
    values = _values(batch, rows, now, max_attempts)
    if connection.dialect.name == "postgresql":
        driver: Any = connection.connection.driver_connection
        with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
            for each in values:
                copy.write_row(each)
    else:
        connection.exec_driver_sql(_INSERT, list(values))


def know_size(connection: Connection) -> None:
    """Have PostgreSQL count again what it plans by. It believes in no more rows than at the last
    count, and would sort all of a new batch for each page that is read of it."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("ANALYZE jobs")


# of each row, and then of all rows alike
_OWN = ("id", "custom_id", "row_number", "body", "max_tokens", "stored", "created_at")
_ENDS = ("state", "error", "finish_reason", "finished_at", "output", "saved_tokens")
_COMMON = (
    "batch_id",
    "tenant_id",
    "url",
    "model",
    "priority",
    "max_attempts",
    "retry_on",
    "metadata",
)
_ZERO = (
    *("attempt", "fence", "crash_count", "prompt_tokens", "cached_tokens", "completion_tokens"),
    "wasted_tokens",
)
_NAMES = (*_OWN, *_ENDS, *_COMMON, *_ZERO)


def _values(
    batch: BatchRecord, rows: Sequence[BatchRow], now: float, max_attempts: int
) -> Iterator[tuple[Any, ...]]:
    common: tuple[Any, ...] = (
        *(batch.id, batch.tenant_id, batch.endpoint, batch.model, batch.priority, max_attempts),
        *(" ".join(map(str, RETRIED)), "{}", *(0 for _ in _ZERO)),
    )
    as_others: tuple[Any, ...] = (str(JobState.QUEUED), None, None, None, None, None)
    if batch.ending in ENDING:  # never to be run, but each input has its line
        state = ENDING[BatchState(batch.ending)]
        ended = ended_as(state, batch)
        as_others = (str(state), ended.get("error"), ended["finish_reason"], now, None, None)
    for i, row in enumerate(rows):
        ends = as_others
        if row.error is not None:
            ends = (str(JobState.FAILED), encode(row.error), "error", now, None, None)
        elif (same := row.shared) is not None:
            ends = (
                *(str(same.state), same.error, same.finish_reason, now),
                *(same.output, same.saved_tokens),
            )
        yield (
            *(row.id, row.custom_id, row.row_number, row.body, row.max_tokens),
            *(1 if row.stored else None, now + i * 1e-6),
            *ends,
            *common,
        )


_COLUMNS = ", ".join(_NAMES)
_INSERT = f"INSERT INTO jobs ({_COLUMNS}) VALUES ({', '.join('?' for _ in _NAMES)})"
_COPY = f"COPY jobs ({_COLUMNS}) FROM STDIN"
