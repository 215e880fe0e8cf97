"""Rows of a batch that are the same as an earlier one: they take its result, and are not run.

They come into the queue last (see `worker.batch_plan`), each when the row before it of its kind has
ended. What that one came to is theirs, but for a failure that another try may not have: then it is
their turn to be run. Whoever stops between may be followed by another: a row is inserted with its
result, or not at all, and what it copies has ended and does not change.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO

from jobs.batch_record import BatchRecord
from jobs.batch_rows import BatchRow, Shared
from jobs.batches import ENDING
from jobs.earlier_rows import Earlier
from worker.batch_plan import Place
from worker.batch_reader import line_at, row_of

COPIES = 200  # at once: each may have a long text


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
