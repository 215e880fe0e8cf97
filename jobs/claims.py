"""What workers do with jobs: claim, finish, hand back, beat. Each write names the fence it holds.

Every function takes an open connection and `now`, seconds by the database's clock, and acts on up
to a few hundred jobs in one statement. What a statement does not return was no longer the caller's.

UnknownWorker
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Connection, Row, Table, case, func, literal, null, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from jobs.database import transient
from jobs.lifecycle import NEXT, TERMINAL, ErrorCode, JobState, error_object
from jobs.models import QUEUED, RUNNING, jobs, workers
from jobs.records import NewJob, WorkerInfo, storable
from jobs.rows import Given, decode, encode, given, picked

logger = logging.getLogger(__name__)

Checkpoint = list[list[int]]  # generated token ids of each sample


class UnknownWorker(Exception):
    """No lease row of that id: never registered, or lapsed so long ago that it was swept away.

    The caller registers again; what it held has gone to others.
    """

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"no worker {worker_id!r}")
        self.worker_id = worker_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    """A job that is the caller's until its lease lapses, and what is needed to run it."""

    id: str
    fence: int
    attempt: int
    url: str
    model: str
    body: dict[str, Any]
    priority: int
    deadline_at: float | None
    checkpoint: Checkpoint | None  # of an earlier attempt, to go on from
    crash_count: int
    created_at: float


_CLAIMED = tuple(jobs.c[each.name] for each in fields(ClaimedJob))


@dataclass(frozen=True, slots=True)
class Held:
    """A claim, as its holder names it."""

    id: str
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a held job ended. Times are by the database's clock; None keeps what the row has."""

    id: str
    fence: int
    state: JobState  # succeeded, failed, expired
    output: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    wasted_tokens: int = 0  # added to what earlier attempts wasted
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        assert self.state in TERMINAL & NEXT[JobState.RUNNING], self.state
        assert (self.state == JobState.SUCCEEDED) == (self.error is None), self.id


def register_worker(
    connection: Connection, info: WorkerInfo, *, now: float, lease_s: float
) -> None:
    """Open the lease of a new incarnation, or open it again after UnknownWorker."""
    values = {name: getattr(info, name) for name in WorkerInfo.__dataclass_fields__}
    values |= {"started_at": now, "seen_at": now, "lease_until": now + lease_s, "stats": "{}"}
    connection.execute(
        _insert(connection, workers)
        .values(values)
        .on_conflict_do_update(
            index_elements=[workers.c.id], set_={"seen_at": now, "lease_until": now + lease_s}
        )
    )


def unregister_worker(connection: Connection, worker_id: str, *, now: float) -> None:
    """End the lease at once: a worker that has handed everything back is no longer alive."""
    connection.execute(
        update(workers)
        .where(workers.c.id == worker_id, workers.c.lease_until > now)
        .values(lease_until=now)
    )


def claim(
    connection: Connection, ids: Sequence[str], *, worker_id: str, now: float
) -> list[ClaimedJob]:
    """Take those that are queued: running, attempt + 1, fence + 1. In no particular order.

    A job not returned has ended, is another's, or is past its deadline: its message is dropped.
    """
    if not ids:
        return []
    # SKIP LOCKED: a row locked just now is being claimed or cancelled by someone, so it is not
    # ours, and two workers with the same ids in another order cannot wait for each other
    free = (
        select(jobs.c.id)
        .where(
            jobs.c.id.in_(dict.fromkeys(ids)),
            QUEUED,
            or_(jobs.c.deadline_at.is_(None), jobs.c.deadline_at > now),
        )
        .with_for_update(skip_locked=True)
    )
    rows = connection.execute(
        update(jobs)
        .where(jobs.c.id.in_(picked(free)), QUEUED)
        .values(
            state=JobState.RUNNING,
            attempt=jobs.c.attempt + 1,
            fence=jobs.c.fence + 1,
            worker_id=worker_id,
            started_at=now,
        )
        .returning(*_CLAIMED)
    )
    return [_claimed(row) for row in rows]


def claimed_by(connection: Connection, ids: Sequence[str], *, worker_id: str) -> list[ClaimedJob]:
    """Those of `ids` the worker holds: what `claim` returned, if its commit was in after all."""
    query = select(*_CLAIMED).where(
        jobs.c.id.in_(dict.fromkeys(ids)), RUNNING, jobs.c.worker_id == worker_id
    )
    return [_claimed(row) for row in connection.execute(query)] if ids else []


def insert_new(connection: Connection, new_jobs: Sequence[NewJob], *, now: float) -> None:
    """Insert those not known yet: jobs that came whole in a message, which may come twice.

    One the database refuses is logged and left out.
    """
    if not new_jobs:
        return
    try:
        rows = [job.accepted(now).row() for job in new_jobs]
        with connection.begin_nested():
            connection.execute(_insert(connection, jobs).on_conflict_do_nothing(), rows)
    except (DBAPIError, ValueError) as error:
        if transient(error):
            raise
        if len(new_jobs) > 1:
            for job in new_jobs:
                insert_new(connection, [job], now=now)
        else:
            logger.error("job %s refused by the database: error=%s", new_jobs[0].id, _named(error))


def finish(connection: Connection, results: Sequence[JobResult], *, now: float) -> set[str]:
    """Write results of jobs still held; the ids accepted, the rest were fenced out.

    A result the database refuses does not sink the others: its job fails as `unstorable`.
    """
    # the first of two for one claim counts; an old and a new claim of one job may both be here
    results = list({(each.id, each.fence): each for each in reversed(results)}.values())
    if not results:
        return set()
    try:
        with connection.begin_nested():
            return _finish(connection, results, now)
    except (DBAPIError, ValueError) as error:
        if transient(error):
            raise
        if len(results) > 1:
            return set().union(*(finish(connection, [result], now=now) for result in results))
        refused = _named(error)
    result = results[0]
    logger.error("job %s has a result the database refuses: error=%s", result.id, refused)
    failure = JobResult(
        id=result.id,
        fence=result.fence,
        state=JobState.FAILED,
        error=error_object(ErrorCode.UNSTORABLE, f"the result could not be stored ({refused})"),
        wasted_tokens=result.wasted_tokens + result.completion_tokens,
    )
    with connection.begin_nested():
        return _finish(connection, [failure], now)


def ended_under(connection: Connection, held: Sequence[Held]) -> set[str]:
    """Those that ended under this very fence: what `finish` returned, if its commit was in."""
    rows = _held(connection, held)
    query = select(jobs.c.id).where(
        jobs.c.id == rows["id"],
        jobs.c.fence == rows["fence"],
        jobs.c.state.in_([str(state) for state in TERMINAL]),
    )
    return set(connection.scalars(query, rows.parameters)) if held else set()


def release(
    connection: Connection,
    held: Sequence[Held],
    *,
    now: float,
    crashed: bool,
    max_crashes: int,
    checkpoints: Mapping[str, Checkpoint] | None = None,
) -> dict[str, JobState]:
    """Hand back what is still held: queued again, fence + 1, to be published anew.

    The next attempt goes on from its checkpoint, the one given here or that of the last beat.

    A hand-back in good order gives the attempt back too: a deployment that restarts often must not
    use up its jobs' attempts. With `crashed`, the engine process died with these jobs: at
    `max_crashes` a job fails as poisoned, at its last attempt as max_attempts. Returns the state
    each released job is in now.
    """
    if not held:
        return {}
    _save(connection, held, checkpoints or {}, now=now)
    rows = _held(connection, held)
    values: dict[str, Any] = {
        "fence": jobs.c.fence + 1,
        "worker_id": None,
        "published_at": None,
        "started_at": None,
    }
    if crashed:
        poisoned = jobs.c.crash_count + 1 >= max_crashes
        spent = jobs.c.attempt >= jobs.c.max_attempts
        values |= {
            "crash_count": jobs.c.crash_count + 1,
            **ending(
                (poisoned, ErrorCode.POISONED, "the engine process died with this job too often"),
                (spent, ErrorCode.MAX_ATTEMPTS, "the last attempt ended with the engine process"),
                now=now,
            ),
        }
    else:
        values |= {"attempt": jobs.c.attempt - 1, "state": JobState.QUEUED}
    released = connection.execute(
        update(jobs)
        .where(jobs.c.id == rows["id"], jobs.c.fence == rows["fence"], RUNNING)
        .values(values)
        .returning(jobs.c.id, jobs.c.state),
        rows.parameters,
    )
    return {id_: JobState(state) for id_, state in released}


def beat(
    connection: Connection,
    worker_id: str,
    *,
    now: float,
    lease_s: float,
    stats: Mapping[str, Any],
    checkpoints: Mapping[str, Checkpoint],
    held: Sequence[Held],
) -> set[str]:
    """Extend the lease, keep the tokens made so far; the ids in `held` that are no longer ours.

    Those were cancelled, or went to others while the lease had lapsed: abort them, write nothing.
    Raises UnknownWorker, and then has changed nothing.
    """
    extended = connection.execute(
        update(workers)
        .where(workers.c.id == worker_id)
        .values(lease_until=now + lease_s, seen_at=now, stats=encode(stats))
        .returning(workers.c.id)
    ).one_or_none()
    if extended is None:
        raise UnknownWorker(worker_id)
    if not held:
        return set()
    _save(connection, held, checkpoints, now=now)
    rows = _held(connection, held)
    ours = connection.scalars(
        select(jobs.c.id).where(jobs.c.id == rows["id"], jobs.c.fence == rows["fence"], RUNNING),
        rows.parameters,
    )
    return {each.id for each in held} - set(ours)


def account_wasted(connection: Connection, tokens: Sequence[tuple[str, int]]) -> None:
    """Add tokens that were generated for nothing: the job was cancelled, or went to another."""
    totals: dict[str, int] = {}
    for job_id, num_tokens in tokens:
        totals[job_id] = totals.get(job_id, 0) + num_tokens
    if not totals:
        return
    rows = given(connection, {"id": str, "tokens": int}, list(totals.items()))
    connection.execute(
        update(jobs)
        .where(jobs.c.id == rows["id"])
        .values(wasted_tokens=jobs.c.wasted_tokens + rows["tokens"]),
        rows.parameters,
    )


def ending(*endings: tuple[Any, ErrorCode, str], now: float) -> dict[str, Any]:
    """Columns of a running job that fails on the first condition that holds, else is queued."""
    assert NEXT[JobState.RUNNING] >= {JobState.FAILED, JobState.QUEUED}
    fails = or_(*(condition for condition, _, _ in endings))
    errors = [
        (condition, literal(encode(error_object(code, message))))
        for condition, code, message in endings
    ]
    return {
        "state": case((fails, JobState.FAILED), else_=JobState.QUEUED),
        "error": case(*errors, else_=null()),
        "finished_at": case((fails, now), else_=null()),
        "checkpoint": case((fails, null()), else_=jobs.c.checkpoint),
    }


_RESULT: dict[str, type] = {
    "id": str,
    "fence": int,
    "state": str,
    "output": str,
    "error": str,
    "finish_reason": str,
    "prompt_tokens": int,
    "cached_tokens": int,
    "completion_tokens": int,
    "wasted_tokens": int,
    "started_at": float,
    "first_token_at": float,
    "finished_at": float,
}


def _claimed(row: Row[Any]) -> ClaimedJob:
    values = dict(row._mapping)
    return ClaimedJob(**{**values, "body": decode(row.body), "checkpoint": decode(row.checkpoint)})


def _save(
    connection: Connection,
    held: Sequence[Held],
    checkpoints: Mapping[str, Checkpoint],
    *,
    now: float,
) -> None:
    saved = [
        (each.id, each.fence, encode(checkpoints[each.id]))
        for each in held
        if each.id in checkpoints
    ]
    if not saved:
        return
    rows = given(connection, {"id": str, "fence": int, "checkpoint": str}, saved)
    ours = (jobs.c.id == rows["id"], jobs.c.fence == rows["fence"], RUNNING)
    # SKIP LOCKED: a job being finished just now needs no checkpoint, and a beat that waited for the
    # ledger's rows while the ledger waits for the beat's would be a deadlock
    free = select(jobs.c.id).where(*ours).with_for_update(skip_locked=True, of=jobs)
    connection.execute(
        update(jobs)
        .where(jobs.c.id.in_(picked(free)), *ours)
        .values(
            checkpoint=rows["checkpoint"],
            first_token_at=func.coalesce(jobs.c.first_token_at, now),
        ),
        rows.parameters,
    )


def _finish(connection: Connection, results: Sequence[JobResult], now: float) -> set[str]:
    rows = given(connection, _RESULT, [_values(result) for result in results])
    first = rows["first_token_at"]
    accepted = connection.scalars(
        update(jobs)
        .where(jobs.c.id == rows["id"], jobs.c.fence == rows["fence"], RUNNING)
        .values(
            {
                **{name: rows[name] for name in ("state", "output", "error", "finish_reason")},
                "prompt_tokens": case(
                    (rows["prompt_tokens"] > 0, rows["prompt_tokens"]), else_=jobs.c.prompt_tokens
                ),
                "cached_tokens": rows["cached_tokens"],
                "completion_tokens": rows["completion_tokens"],
                "wasted_tokens": jobs.c.wasted_tokens + rows["wasted_tokens"],
                "started_at": func.coalesce(rows["started_at"], jobs.c.started_at),
                # a beat's stamp is late by up to a beat; an earlier attempt's is the true first
                "first_token_at": case(
                    (jobs.c.first_token_at <= first, jobs.c.first_token_at),
                    else_=func.coalesce(first, jobs.c.first_token_at),
                ),
                "finished_at": func.coalesce(rows["finished_at"], now),
                "checkpoint": None,
            }
        )
        .returning(jobs.c.id),
        rows.parameters,
    )
    return set(accepted)


def _values(result: JobResult) -> tuple[Any, ...]:
    values = {name: getattr(result, name) for name in _RESULT}
    for name in ("output", "error"):
        values[name] = None if values[name] is None else encode(values[name])
    values["state"] = str(result.state)
    if result.finish_reason is not None and not storable(result.finish_reason):
        # a plain text column: PostgreSQL refuses it, SQLite would keep what is before it
        raise ValueError("finish_reason holds U+0000 or a lone surrogate")
    return tuple(values.values())


def _held(connection: Connection, held: Sequence[Held]) -> Given:
    return given(connection, {"id": str, "fence": int}, [(each.id, each.fence) for each in held])


def _insert(connection: Connection, table: Table) -> Any:
    """An INSERT with ON CONFLICT in it, in the dialect of the connection."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def _named(error: Exception) -> str:
    """The kind of an error, without the values it quotes: those may be a prompt or an output."""
    return type(error.orig if isinstance(error, DBAPIError) and error.orig else error).__name__
