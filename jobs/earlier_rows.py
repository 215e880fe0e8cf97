"""What rows of a batch have come to, for others that are the same: see `worker.batch_copies`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, select

from jobs.batch_record import BatchRecord
from jobs.batch_rows import Shared
from jobs.lifecycle import TERMINAL, ErrorCode, JobState
from jobs.models import jobs
from jobs.rows import decode


@dataclass(slots=True)
class Earlier:
    """What rows that others are the same as have come to, by their numbers."""

    results: dict[int, tuple[str, Shared]] = field(default_factory=dict)  # id of the job, and what
    open: set[int] = field(default_factory=set)  # have not ended


def earlier(connection: Connection, batch: BatchRecord, numbers: Sequence[int]) -> Earlier:
    """Of rows with these numbers."""
    names = ("id", "row_number", "state", "attempt", "output", "error", "finish_reason")
    tokens = (f"{kind}_tokens" for kind in ("prompt", "completion", "saved"))
    query = select(*(jobs.c[name] for name in (*names, *tokens))).where(
        jobs.c.batch_id == batch.id,
        jobs.c.tenant_id == batch.tenant_id,
        jobs.c.row_number.in_(numbers),
    )
    found = Earlier()
    for row in connection.execute(query):
        state, is_copy = JobState(row.state), row.saved_tokens is not None
        if state not in TERMINAL:
            found.open.add(row.row_number)
        elif _is_shared(state, row.error, was_run=is_copy or row.attempt > 0):
            saved = row.saved_tokens if is_copy else row.prompt_tokens + row.completion_tokens
            found.results[row.row_number] = (
                row.id,
                Shared(
                    state=state, output=row.output, error=row.error,
                    finish_reason=row.finish_reason, saved_tokens=saved,
                ),
            )  # fmt: skip
    return found


def _is_shared(state: JobState, error: str | None, *, was_run: bool) -> bool:
    """Whether another try comes to the same, as far as can be known."""
    if state != JobState.FAILED:
        return state == JobState.SUCCEEDED
    said = decode(error)
    fault = said["type"] == "invalid_request_error" and was_run  # else of how its line is written
    return fault or said["code"] == ErrorCode.POISONED
