"""Rows of a batch that are the same as an earlier one: they take its result, and are not run.

They come into the queue last (see `worker.batch_plan`), each when the row before it of its kind has
ended. What that one came to is theirs, but for a failure that another try may not have: then it is
their turn to be run. Whoever stops between may be followed by another: a row is inserted with its
result, or not at all, and what it copies has ended and does not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from sqlalchemy import Connection, select

from jobs.batch_record import BatchRecord
from jobs.batch_rows import BatchRow, Shared
from jobs.batches import ENDING
from jobs.lifecycle import TERMINAL, ErrorCode, JobState
from jobs.models import jobs
from jobs.rows import decode
from worker.batch_plan import Place
from worker.batch_reader import line_at, row_of

COPIES = 200  # at once: each may have a long text


@dataclass(slots=True)
class Earlier:
    """What rows that others are the same as have come to, by their numbers."""

    results: dict[int, tuple[str, Shared]] = field(default_factory=dict)  # id of the job, and what
    open: set[int] = field(default_factory=set)  # have not ended


def earlier(connection: Connection, batch: BatchRecord, places: Sequence[Place]) -> Earlier:
    """Of the rows before these."""
    numbers = [each.previous for each in places]
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


def copied(
    file: BinaryIO, batch: BatchRecord, places: Sequence[Place], before: Earlier, *, max_bytes: int
) -> list[BatchRow]:
    """These rows, up to the first whose earlier one has not ended; `before` is added to."""
    ends = batch.ending in ENDING  # and nothing is waited for
    rows: list[BatchRow] = []
    for place in places:
        assert place.previous is not None
        if place.previous in before.open and not ends:
            break
        row = row_of(batch.endpoint, line_at(file, max_bytes, place.start), place.number)
        result = before.results.get(place.previous)
        if row.error is None and result is not None:
            row = replace(row, max_tokens=0, shared=_own(row.id, *result))
            assert row.shared is not None
            before.results[place.number] = (row.id, row.shared)
        elif row.error is None:
            before.open.add(place.number)
        rows.append(row)
    return rows


def _own(job_id: str, other_id: str, result: Shared) -> Shared:
    """With ids of its own: of the answer, and of what stands in it."""
    if result.output is None:
        return result
    number, other = (each.removeprefix("job_") for each in (job_id, other_id))
    return replace(result, output=result.output.replace(other, number))
