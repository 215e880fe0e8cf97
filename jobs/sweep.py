"""What the sweeper does with jobs: rescue, expire, publish, purge. Any number may run at once.

Every function takes an open connection and `now`, seconds by the database's clock. Rows another
sweeper has locked are passed over (PostgreSQL); on SQLite writers take turns.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Integer,
    Select,
    Text,
    bindparam,
    delete,
    exists,
    func,
    select,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from jobs import attempts, order
from jobs.attempts import Outcome
from jobs.lifecycle import ErrorCode, JobState, error_object
from jobs.models import (
    BACKGROUND,
    FOREGROUND,
    LOST,
    QUEUE_ORDER,
    QUEUED,
    RUNNING,
    idempotency_keys,
    jobs,
    workers,
)
from jobs.retries import TAKEN, after_lapse, taken
from jobs.rows import encode, picked

ROUND = 1000  # most rows one call touches: transactions stay short, the next call goes on
FORGET_WORKER_S = 3600.0


@dataclass(frozen=True, slots=True)
class Reaped:
    """A job taken from a worker whose lease ran out."""

    id: str
    model: str
    state: JobState  # queued, or failed at its last attempt


def reap(connection: Connection, now: float) -> list[Reaped]:
    """Take jobs from workers silent or unknown: queued again, or failed at their last attempt."""
    rows = connection.execute(_reaping(), {"at": now}).all()
    attempts.close(connection, [taken(row, Outcome.LAPSED) for row in rows], now=now)
    return [Reaped(row.id, row.model, JobState(row.state)) for row in rows]


# statements are made once: making one takes longer than most of them run
_AT: ColumnElement[float] = bindparam("at", type_=Double())
_OF_MODEL = jobs.c.model == bindparam("of_model", type_=Text())


@cache
def _reaping() -> ReturningUpdate[Any]:
    alive = exists().where(workers.c.id == jobs.c.worker_id, workers.c.lease_until > _AT)
    return (
        update(jobs)
        .where(jobs.c.id.in_(_free(select(jobs.c.id).where(RUNNING, ~alive))), RUNNING)
        .values(fence=jobs.c.fence + 1, worker_id=None, published_at=None, **after_lapse(_AT))
        .returning(*TAKEN)
    )


def expire(connection: Connection, now: float) -> list[str]:
    """End queued jobs whose deadline has passed; their ids."""
    rows = connection.execute(_expiring(), {"at": now}).all()
    attempts.close(connection, [taken(row, Outcome.EXPIRED) for row in rows], now=now)
    return [row.id for row in rows]


@cache
def _expiring() -> ReturningUpdate[Any]:
    late = select(jobs.c.id).where(QUEUED, jobs.c.deadline_at <= _AT)
    error = error_object(
        ErrorCode.DEADLINE_EXCEEDED, "the deadline passed before the job was started"
    )
    return (
        update(jobs)
        .where(jobs.c.id.in_(_free(late)), QUEUED)
        .values(
            state=JobState.EXPIRED,
            fence=jobs.c.fence + 1,
            finished_at=_AT,
            finish_reason="deadline",
            error=encode(error),
            **LOST,
        )
        .returning(*TAKEN)
    )


def publishable(
    connection: Connection,
    model: str,
    *,
    limit: int,
    now: float,
    num_before: int = 0,
    background: bool | None = None,
) -> list[str]:
    """The next jobs not on the runway yet, in order, marked as published by this statement.

    `num_before`: how many the caller has taken before, see `jobs.order`.
    """
    if limit <= 0:
        return []
    ids = order.best(
        connection, model, limit=limit, now=now, num_before=num_before, background=background
    )
    chosen = {"chosen": ids, "at": now, "most": limit}
    marked = set(_publish(connection, _publishing(), chosen)) if ids else set()
    return [job_id for job_id in ids if job_id in marked]


def republish(
    connection: Connection,
    model: str,
    *,
    limit: int,
    now: float,
    older_than_s: float,
    num_messages: int | None,
    background: bool | None = None,
) -> list[str]:
    """Published jobs whose message must have been lost, best first, marked as published anew.

    Messages leave the runway in the order they came: one is lost if another that came
    `older_than_s` later has been claimed. Of a runway that is nearly empty `num_messages` says
    how many ids are left: there each published job beyond these has lost its message.
    """
    parameters: dict[str, Any] = {"of_model": model}
    if num_messages is not None:
        num_published = connection.scalar(_num_published(background), parameters)
        limit = min(limit, (num_published or 0) - num_messages)
    if limit <= 0:
        return []
    parameters |= {"at": now, "most": limit, "behind": older_than_s}
    return _publish(connection, _republishing(background, num_messages is None), parameters)


def _published(background: bool | None) -> Select[str]:
    query = select(jobs.c.id).where(_OF_MODEL, QUEUED, jobs.c.published_at.is_not(None))
    return query.where(*_lane(background))


def _lane(background: bool | None) -> list[ColumnElement[bool]]:
    return [] if background is None else [BACKGROUND if background else FOREGROUND]


@cache
def _num_published(background: bool | None) -> Select[int]:
    return select(func.count()).select_from(_published(background).subquery())


@cache
def _publishing() -> ReturningUpdate[Any]:
    chosen = jobs.c.id.in_(bindparam("chosen", expanding=True))
    return _marking(select(jobs.c.id).where(chosen, jobs.c.published_at.is_(None)))


@cache
def _republishing(background: bool | None, by_claims: bool) -> ReturningUpdate[Any]:
    reached: ColumnElement[float] = _AT
    if by_claims:
        running = [RUNNING, _OF_MODEL, *_lane(background)]
        reached = select(func.max(jobs.c.published_at)).where(*running).scalar_subquery()
    behind: ColumnElement[float] = bindparam("behind", type_=Double())
    return _marking(_published(background).where(jobs.c.published_at <= reached - behind))


def purge(connection: Connection, *, now: float, idempotency_ttl_s: float) -> None:
    """Forget old idempotency keys and workers long gone that hold nothing; add up tallies."""
    connection.execute(_FORGETTING_KEYS, {"at": now - idempotency_ttl_s})
    connection.execute(_FORGETTING_WORKERS, {"at": now - FORGET_WORKER_S})
    attempts.purge(connection, now)


_HOLDS = exists().where(jobs.c.worker_id == workers.c.id, RUNNING)
_FORGETTING_WORKERS = delete(workers).where(workers.c.lease_until <= _AT, ~_HOLDS)
_FORGETTING_KEYS = delete(idempotency_keys).where(idempotency_keys.c.created_at <= _AT)


def _marking(candidates: Select[str]) -> ReturningUpdate[Any]:
    most: ColumnElement[int] = bindparam("most", type_=Integer())
    best = candidates.order_by(*QUEUE_ORDER).limit(most).with_for_update(skip_locked=True)
    return (
        update(jobs)
        .where(jobs.c.id.in_(picked(best)), QUEUED)
        .values(published_at=_AT)
        .returning(*QUEUE_ORDER)
    )


def _publish(
    connection: Connection, marking: ReturningUpdate[Any], parameters: dict[str, Any]
) -> list[str]:
    return [row.id for row in sorted(connection.execute(marking, parameters), key=tuple)]


def _free(candidates: Select[str]) -> Select[str]:
    return picked(candidates.limit(ROUND).with_for_update(skip_locked=True, of=jobs))
