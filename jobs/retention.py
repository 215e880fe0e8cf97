"""Batches whose rows are to go: bodies, outputs and their files. What is counted of them stays.

When a batch ends it is written down until when its rows are kept. From then on nobody is shown any
of them, and a while later they are deleted some at a time, then its files, and last the batch says
that they are gone; whoever is killed between leaves the rest to the next. All its rows have ended
by then: none is run, copied or told of any more. Every function takes an open connection and `now`,
seconds by the database's clock.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, delete, select, update

from jobs.batch_record import BatchRecord
from jobs.models import batches, files, jobs
from jobs.rows import picked

ROUND = 500  # rows that one call deletes
GRACE_S = 60.0  # who began to read rows before their time was over has read them


@dataclass(frozen=True, slots=True)
class Emptied:
    """Of a batch that is over: how many rows went now, and files whose bytes are to go."""

    batch_id: str
    num_rows: int
    file_ids: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        return self.num_rows < ROUND


def are_over(batch: BatchRecord, now: float) -> bool:
    """Whether its rows are not to be shown any more: some of them may be gone."""
    expire_at = batch.rows_expire_at
    return batch.rows_removed_at is not None or (expire_at is not None and expire_at <= now)


def empty_one(connection: Connection, now: float) -> Emptied | None:
    """Delete some rows of the batch that is over longest; None where none is."""
    query = (
        select(batches.c.id, batches.c.tenant_id, batches.c.output_file_id, batches.c.error_file_id)
        .where(batches.c.rows_expire_at.is_not(None), batches.c.rows_expire_at <= now - GRACE_S)
        .order_by(batches.c.rows_expire_at)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    batch = connection.execute(query).one_or_none()
    if batch is None:
        return None
    some = (
        select(jobs.c.id)
        .where(
            jobs.c.batch_id == batch.id,
            jobs.c.tenant_id == batch.tenant_id,
            jobs.c.row_number.is_not(None),
        )
        .limit(ROUND)
    )
    gone = connection.scalars(
        delete(jobs)
        .where(jobs.c.id.in_(picked(some)), jobs.c.tenant_id == batch.tenant_id)
        .returning(jobs.c.id)
    ).all()
    emptied = Emptied(batch.id, len(gone))
    if not emptied.is_done:
        return emptied
    named = [each for each in (batch.output_file_id, batch.error_file_id) if each is not None]
    connection.execute(
        delete(files).where(files.c.id.in_(named), files.c.tenant_id == batch.tenant_id)
    )
    connection.execute(
        update(batches)
        .where(batches.c.id == batch.id, batches.c.tenant_id == batch.tenant_id)
        .values(rows_expire_at=None, rows_removed_at=now)
    )
    return Emptied(batch.id, len(gone), tuple(named))
