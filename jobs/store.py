"""What clients do with jobs: look, cancel, list; `jobs.submissions` accepts them.

One statement decides, its WHERE is the guard.

Every function takes an open connection and `now`, seconds by the database's clock. What a client
asks for names its tenant too, in each statement: another tenant's job is as unknown as no job.

StoreError
├── IdempotencyConflict
├── UnknownCursor
└── WrongSchema
"""

import logging
from collections.abc import Sequence
from dataclasses import fields

from sqlalchemy import (
    Connection,
    func,
    inspect,
    literal_column,
    null,
    select,
    tuple_,
)
from sqlalchemy import delete as delete_from
from sqlalchemy.exc import DBAPIError

from jobs import attempts, finishing
from jobs.attempts import Outcome
from jobs.database import error_kind, transient
from jobs.lifecycle import TERMINAL, JobState
from jobs.models import Base, jobs, workers
from jobs.records import (
    RECORD_COLUMNS,
    JobRecord,
    NewJob,
    WorkerInfo,
    WorkerRecord,
    new_job_id,
)
from jobs.retries import taken
from jobs.rows import decode, insert_into
from jobs.streams import Run, from_lines
from jobs.submissions import (
    CHUNK,
    IdempotencyConflict,
    StoreError,
    Submitted,
    submit,
    take_key,
)
from jobs.tenants import DEFAULT_TENANT

__all__ = [
    "IdempotencyConflict", "JobRecord", "NewJob", "StoreError", "Submitted", "UnknownCursor",
    "WorkerInfo", "WorkerRecord", "WrongSchema", "cancel", "counts", "delete", "ended", "get",
    "insert_new", "list_jobs", "live_workers", "need_schema", "new_job_id",
    "streamed", "submit", "take_key", "trace_parents", "unknown",
]  # fmt: skip

logger = logging.getLogger(__name__)

_RECORD = tuple(jobs.c[name] for name in RECORD_COLUMNS)
_WORKER = tuple(workers.c[each.name] for each in fields(WorkerRecord))
# a page of lists may be a thousand prompts of a megabyte each, which nobody asked for
_LISTED = tuple(null().label("body") if column.name == "body" else column for column in _RECORD)


class UnknownCursor(StoreError):
    """`after` names no job."""

    def __init__(self, after: str) -> None:
        super().__init__(f"no job {after!r} to list after")
        self.after = after


class WrongSchema(StoreError):
    """The tables are not there, or those of another version."""

    def __init__(self) -> None:
        super().__init__("the database's schema is not this version's: run `tokenmill migrate`")


def insert_new(connection: Connection, new_jobs: Sequence[NewJob], *, now: float) -> None:
    """Insert those not known yet: jobs that came whole in a message, which may come twice.

    Who can write to the broker is trusted, and says nothing of tenants: they are the default one's.
    One the database refuses is logged and left out.
    """
    if not new_jobs:
        return
    try:
        rows = [job.accepted(DEFAULT_TENANT, now).row() for job in new_jobs]
        with connection.begin_nested():
            connection.execute(insert_into(connection, jobs).on_conflict_do_nothing(), rows)
    except (DBAPIError, ValueError, OverflowError) as error:
        if transient(error):
            raise
        if len(new_jobs) > 1:
            for job in new_jobs:
                insert_new(connection, [job], now=now)
        else:
            logger.error(
                "job %s refused by the database: error=%s", new_jobs[0].id, error_kind(error)
            )


def need_schema(connection: Connection) -> None:
    """Raises WrongSchema unless every table has the columns this version reads and writes.

    Whoever took jobs on other tables would fail at their results and use up their attempts.
    """
    inspector = inspect(connection)
    for table in Base.metadata.sorted_tables:
        found: set[str] = set()
        if inspector.has_table(table.name):
            found = {column["name"] for column in inspector.get_columns(table.name)}
        if not found.issuperset(column.name for column in table.columns):
            raise WrongSchema


def get(connection: Connection, job_id: str, *, tenant: str) -> JobRecord | None:
    query = select(*_RECORD).where(jobs.c.id == job_id, jobs.c.tenant_id == tenant)
    row = connection.execute(query).one_or_none()
    return None if row is None else JobRecord.of(row)


def streamed(
    connection: Connection, job_id: str, *, tenant: str
) -> tuple[JobRecord, list[Run]] | None:
    """A job, and of one whose stream is kept what its tokens have said, up to the last beat."""
    mine = jobs.c.id == job_id, jobs.c.tenant_id == tenant
    query = select(*_RECORD, jobs.c.pieces).where(*mine)
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    values = dict(row._mapping)
    pieces = values.pop("pieces")
    return JobRecord.from_values(values), from_lines(job_id, pieces or "")


def delete(connection: Connection, job_id: str, *, tenant: str) -> bool:
    """Take the row away, whatever its state: a worker that holds it hears so at its next beat."""
    gone = connection.execute(
        delete_from(jobs)
        .where(jobs.c.id == job_id, jobs.c.tenant_id == tenant)
        .returning(jobs.c.id)
    )
    return gone.one_or_none() is not None


def ended(connection: Connection, ids: Sequence[str]) -> set[str]:
    """Which of these jobs have ended, whoever's they are."""
    return {
        job_id
        for chunk in _chunks(ids)
        for (job_id,) in connection.execute(
            select(jobs.c.id).where(jobs.c.id.in_(chunk), jobs.c.state.in_(TERMINAL))
        )
    }


def unknown(connection: Connection, ids: Sequence[str]) -> set[str]:
    """Those of `ids` that no row of any tenant has."""
    found = {
        job_id
        for chunk in _chunks(ids)
        for job_id in connection.scalars(select(jobs.c.id).where(jobs.c.id.in_(chunk)))
    }
    return set(ids) - found


def trace_parents(connection: Connection, ids: Sequence[str]) -> dict[str, str]:
    """Of those that have one, whoever's they are."""
    return {
        row.id: row.trace_parent
        for chunk in _chunks(ids)
        for row in connection.execute(
            select(jobs.c.id, jobs.c.trace_parent).where(
                jobs.c.id.in_(chunk), jobs.c.trace_parent.is_not(None)
            )
        )
    }


def list_jobs(
    connection: Connection,
    *,
    tenant: str,
    status: JobState | None = None,
    model: str | None = None,
    batch_id: str | None = None,
    custom_id: str | None = None,
    limit: int,
    after: str | None = None,
) -> list[JobRecord]:
    """Newest first, without their bodies, from behind the job `after`. Raises UnknownCursor."""
    newest_first = (jobs.c.created_at.desc(), jobs.c.id.desc())
    query = select(*_LISTED).where(jobs.c.tenant_id == tenant).order_by(*newest_first).limit(limit)
    if status is not None:
        # a constant, so that the partial indexes on queued and running jobs apply
        query = query.where(jobs.c.state == literal_column(f"'{JobState(status)}'"))
    for name, value in (("model", model), ("batch_id", batch_id), ("custom_id", custom_id)):
        if value is not None:
            query = query.where(jobs.c[name] == value)
    if after is not None:
        last = connection.execute(
            select(jobs.c.created_at, jobs.c.id).where(
                jobs.c.id == after, jobs.c.tenant_id == tenant
            )
        ).one_or_none()
        if last is None:
            raise UnknownCursor(after)
        query = query.where(tuple_(jobs.c.created_at, jobs.c.id) < tuple_(*last))
    return [JobRecord.of(row) for row in connection.execute(query)]


def cancel(connection: Connection, job_id: str, *, tenant: str, now: float) -> JobRecord | None:
    """Cancel it if it has not ended; its record either way, None if there is no such job.

    A running job's worker is fenced out at once and hears of it at its next beat or by a hint.
    """
    row = connection.execute(
        finishing.cancelling(now)
        .where(jobs.c.id == job_id, jobs.c.tenant_id == tenant)
        .returning(*_RECORD, jobs.c.checkpoint_tokens)
    ).one_or_none()
    if row is None:
        return get(connection, job_id, tenant=tenant)
    attempts.close(connection, [taken(row, Outcome.CANCELLED)], now=now)
    values = dict(row._mapping)
    del values["checkpoint_tokens"]
    return JobRecord.from_values(values)


def counts(connection: Connection) -> dict[tuple[str, JobState], int]:
    """How many jobs of each model are in each state, all tenants' together."""
    query = select(jobs.c.model, jobs.c.state, func.count()).group_by(jobs.c.model, jobs.c.state)
    return {(model, JobState(state)): n for model, state, n in connection.execute(query)}


def live_workers(connection: Connection, now: float) -> list[WorkerRecord]:
    """Workers whose lease has not run out, the oldest first."""
    query = select(*_WORKER).where(workers.c.lease_until > now).order_by(workers.c.started_at)
    return [
        WorkerRecord(**{**row._mapping, "stats": decode(row.stats)})
        for row in connection.execute(query)
    ]


def _chunks(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)]
