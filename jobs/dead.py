"""Dead jobs: those that have failed, why, and how an operator has them tried once more.

All tenants' together: this is who runs the deployment, not its clients. Every function takes an
open connection and `now`, seconds by the database's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, case, literal_column, null, select, update

from jobs.lifecycle import JobState
from jobs.models import jobs
from jobs.rows import decode, picked

ROUND = 500  # most jobs that one call requeues: transactions stay short, the next call goes on
_FAILED = jobs.c.state == literal_column(f"'{JobState.FAILED}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """Of failed jobs, those meant; None is all."""

    model: str | None = None
    tenant: str | None = None
    error: str | None = None  # the code of the job's error
    since: float | None = None  # when it failed, by the database's clock
    until: float | None = None

    def of(self, query: Select[Any]) -> Select[Any]:
        query = query.where(_FAILED)
        if self.model is not None:
            query = query.where(jobs.c.model == self.model)
        if self.tenant is not None:
            query = query.where(jobs.c.tenant_id == self.tenant)
        if self.error is not None:
            # the last of the object's keys, as `lifecycle.error_object` has them
            query = query.where(jobs.c.error.endswith(f'"code":"{self.error}"}}', autoescape=True))
        if self.since is not None:
            query = query.where(jobs.c.finished_at >= self.since)
        if self.until is not None:
            query = query.where(jobs.c.finished_at <= self.until)
        return query


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadJob:
    """A job that has failed. Times are seconds by the database's clock."""

    id: str
    tenant: str
    model: str
    custom_id: str | None
    error: str  # code
    reason: str
    attempt: int
    max_attempts: int
    crash_count: int
    created_at: float
    failed_at: float


def list_dead(connection: Connection, which: Which, *, limit: int) -> list[DeadJob]:
    """The last that failed first."""
    query = which.of(
        select(
            *(
                jobs.c[name]
                for name in (
                    "id", "tenant_id", "model", "custom_id", "error", "attempt", "max_attempts",
                    "crash_count", "created_at", "finished_at",
                )
            )
        )
    )  # fmt: skip
    newest = query.order_by(jobs.c.finished_at.desc(), jobs.c.id.desc()).limit(limit)
    return [_dead(dict(row._mapping)) for row in connection.execute(newest)]


def requeue(connection: Connection, ids: Sequence[str], *, now: float) -> dict[str, str | None]:
    """Queue them again with all of their attempts before them; by id, why one was not, or None.

    Fences go on, so that whoever ever held one is still refused. What it generated is gone.
    """
    wanted = list(dict.fromkeys(ids))[:ROUND]
    done = set(_requeue(connection, select(jobs.c.id).where(jobs.c.id.in_(wanted), _FAILED), now))
    left = [job_id for job_id in wanted if job_id not in done]
    query = select(jobs.c.id, jobs.c.state, jobs.c.batch_id).where(jobs.c.id.in_(left))
    found = {row.id: row for row in connection.execute(query)} if left else {}
    return dict.fromkeys(done) | {job_id: _why_not(found.get(job_id)) for job_id in left}


def requeue_all(connection: Connection, which: Which, *, now: float) -> list[str]:
    """Up to ROUND of them, the first that failed first; their ids."""
    oldest = which.of(select(jobs.c.id)).order_by(jobs.c.finished_at, jobs.c.id)
    return _requeue(connection, oldest, now)


def _requeue(connection: Connection, candidates: Select[Any], now: float) -> list[str]:
    # a batch counts its rows once: one of them is submitted again by who wants it again
    some = candidates.where(jobs.c.batch_id.is_(None)).limit(ROUND)
    values: dict[str, Any] = dict.fromkeys(
        (
            "worker_id", "checkpoint", "published_at", "started_at", "first_token_at",
            "finished_at", "error", "finish_reason", "pieces", "announced_at", "not_before",
            "waiter_id",  # whoever waited has been told that it failed
        )
    )  # fmt: skip
    values |= dict.fromkeys(("attempt", "crash_count", "cached_tokens", "checkpoint_tokens"), 0)
    overdue = jobs.c.deadline_at <= now
    rows = connection.execute(
        update(jobs)
        .where(jobs.c.id.in_(picked(some.with_for_update(skip_locked=True))), _FAILED)
        .values(
            state=JobState.QUEUED,
            fence=jobs.c.fence + 1,
            deadline_at=case((overdue, null()), else_=jobs.c.deadline_at),
            **values,
        )
        .returning(jobs.c.id)
    )
    return [row.id for row in rows]


def _why_not(row: Any) -> str:
    if row is None:
        return "there is no such job"
    if row.state != JobState.FAILED:
        return f"it has not failed: it is {row.state}"
    if row.batch_id is not None:
        return f"it is a row of {row.batch_id}, which has counted it"
    return "it is being written just now"


def _dead(row: dict[str, Any]) -> DeadJob:
    error = decode(row.pop("error")) or {}
    return DeadJob(
        tenant=row.pop("tenant_id"),
        failed_at=row.pop("finished_at"),
        error=str(error.get("code")),
        reason=str(error.get("message")),
        **row,
    )
