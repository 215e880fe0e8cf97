"""What workers do with jobs: claim, beat, hand back. Each write names the fence it holds.

Every function takes an open connection and `now`, seconds by the database's clock, and acts on up
to a few hundred jobs in one statement. What a statement does not return was no longer the caller's.

UnknownWorker
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Double,
    Row,
    Select,
    Text,
    bindparam,
    case,
    exists,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from jobs import attempts
from jobs.attempts import Begun, Outcome
from jobs.lifecycle import ErrorCode, JobState
from jobs.models import QUEUED, RUNNING, jobs, workers
from jobs.records import WorkerInfo
from jobs.retries import TAKEN, Backoff, after_crash, after_failure, due, taken
from jobs.rows import Given, decode, encode, given, given_columns, inserting, picked

Checkpoint = list[list[int]]  # generated token ids of each sample


def num_tokens(checkpoint: Checkpoint) -> int:
    return sum(map(len, checkpoint))


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
    prompt_tokens: int  # 0: it came whole in a message, nobody has counted them
    tenant_id: str
    stream: str | None = None  # a StreamMode
    max_attempts: int = 1
    retry_on: str = ""  # error codes, separated by spaces
    trace_parent: str | None = None

    def may_retry(self, code: ErrorCode) -> bool:
        """Whether another attempt follows one that fails like this."""
        return self.attempt < self.max_attempts and code in self.retry_on.split()


_CLAIMED = tuple(jobs.c[each.name] for each in fields(ClaimedJob))

# statements are made once: making one takes longer than most of them run
_AT: ColumnElement[float] = bindparam("at", type_=Double())
_WORKER: ColumnElement[str] = bindparam("worker", type_=Text())
_AMONG = jobs.c.id.in_(bindparam("ids", expanding=True, type_=Text()))


@dataclass(frozen=True, slots=True)
class Held:
    """A claim, as its holder names it."""

    id: str
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beaten:
    """What a beat has found of the jobs held."""

    lost: frozenset[Held]  # cancelled, or with others since a lapse: abort them, write nothing
    stored: frozenset[Held]  # whose checkpoints are in; others' rows somebody else was writing


def register_worker(
    connection: Connection, info: WorkerInfo, *, now: float, lease_s: float
) -> None:
    """Open the lease of a new incarnation, or open it again after UnknownWorker."""
    values = {name: getattr(info, name) for name in WorkerInfo.__dataclass_fields__}
    values |= {"started_at": now, "seen_at": now, "lease_until": now + lease_s, "stats": "{}"}
    connection.execute(_registering(connection.dialect.name), values)


@cache
def _registering(dialect: str) -> Any:
    opening = inserting(dialect, workers)
    again = {name: opening.excluded[name] for name in ("seen_at", "lease_until")}
    return opening.on_conflict_do_update(index_elements=[workers.c.id], set_=again)


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

    A job not returned has ended, is another's, is past its deadline or waits to be tried again: its
    message is dropped.
    """
    if not ids:
        return []
    named = {"ids": list(dict.fromkeys(ids)), "worker": worker_id, "at": now}
    rows = connection.execute(_claiming(), named)
    claimed = [_claimed(row) for row in rows]
    begun = [
        Begun(
            job_id=job.id,
            fence=job.fence,
            tenant_id=job.tenant_id,
            attempt=job.attempt,
            resumed_tokens=num_tokens(job.checkpoint or []),
        )
        for job in claimed
    ]
    attempts.begin(connection, begun, worker_id=worker_id, now=now)
    return claimed


@cache
def _claiming() -> ReturningUpdate[Any]:
    # SKIP LOCKED: a row locked just now is being claimed or cancelled by someone, so it is not
    # ours, and two workers with the same ids in another order cannot wait for each other
    in_time = or_(jobs.c.deadline_at.is_(None), jobs.c.deadline_at > _AT)
    free = select(jobs.c.id).where(_AMONG, QUEUED, in_time, due(_AT))
    return (
        update(jobs)
        .where(jobs.c.id.in_(picked(free.with_for_update(skip_locked=True))), QUEUED)
        .values(
            state=JobState.RUNNING,
            attempt=jobs.c.attempt + 1,
            fence=jobs.c.fence + 1,
            worker_id=_WORKER,
            started_at=_AT,
            not_before=None,
        )
        .returning(*_CLAIMED)
    )


_STANDS = select(exists().where(workers.c.id == _WORKER, workers.c.lease_until > _AT))


def lease_stands(connection: Connection, worker_id: str, *, now: float) -> bool:
    """Whether what the worker claims now would stay its own."""
    return bool(connection.scalar(_STANDS, {"worker": worker_id, "at": now}))


_PUTTING_BACK = update(jobs).where(_AMONG, QUEUED).values(published_at=None)


def put_back(connection: Connection, ids: Sequence[str]) -> None:
    """Their messages came to a worker that cannot claim: those still queued are published anew."""
    if ids:
        connection.execute(_PUTTING_BACK, {"ids": list(dict.fromkeys(ids))})


def claimed_by(connection: Connection, ids: Sequence[str], *, worker_id: str) -> list[ClaimedJob]:
    """Those of `ids` the worker holds: what `claim` returned, if its commit was in after all."""
    query = select(*_CLAIMED).where(
        jobs.c.id.in_(dict.fromkeys(ids)), RUNNING, jobs.c.worker_id == worker_id
    )
    return [_claimed(row) for row in connection.execute(query)] if ids else []


def release(
    connection: Connection,
    held: Sequence[Held],
    *,
    now: float,
    crashed: bool,
    max_crashes: int,
    checkpoints: Mapping[Held, Checkpoint] | None = None,
    first_tokens: Mapping[Held, float] | None = None,  # when each attempt's came
    pieces: Mapping[Held, str] | None = None,  # what the checkpoints' newest tokens say
    failures: Mapping[Held, ErrorCode] | None = None,  # given, each has failed and may_retry
    backoff: Backoff = Backoff(),  # noqa: B008 (frozen)
) -> dict[Held, JobState]:
    """Hand back what is still held: queued again, fence + 1, to be published anew.

    The next attempt goes on from its checkpoint, the one given here or that of the last beat.

    A hand-back in good order gives the attempt back too: a deployment that restarts often must not
    use up its jobs' attempts. With `failures` they have failed and wait for the next, by `backoff`.
    With `crashed`, the engine process died with these jobs: at `max_crashes` a job fails as
    poisoned, at its last attempt as max_attempts. Returns the state each released job is in now.
    """
    if not held:
        return {}
    _save(connection, held, checkpoints or {}, first_tokens or {}, pieces or {}, wait=True)
    outcome = Outcome.HANDED_BACK
    if failures is not None:
        outcome = Outcome.FAILED
    elif crashed:
        outcome = Outcome.SUSPECT
    releasing = _releasing(connection.dialect.name, outcome, backoff, max_crashes)
    parameters: dict[str, Any] = {**held_rows(connection, held).parameters}
    if outcome is not Outcome.HANDED_BACK:
        parameters["at"] = now
    released = connection.execute(releasing, parameters).all()
    codes = failures or {}
    closed = [taken(row, outcome, codes.get(Held(row.id, row.fence - 1))) for row in released]
    attempts.close(connection, closed, now=now)
    return {Held(row.id, row.fence - 1): JobState(row.state) for row in released}


@cache
def _releasing(
    dialect: str, outcome: Outcome, backoff: Backoff, max_crashes: int
) -> ReturningUpdate[Any]:
    values: dict[str, Any] = {"fence": jobs.c.fence + 1, "worker_id": None, "published_at": None}
    if outcome is Outcome.FAILED:
        values |= after_failure(backoff, _AT)
    elif outcome is Outcome.SUSPECT:
        values |= after_crash(backoff, _AT, max_crashes=max_crashes)
    else:
        values |= {"attempt": jobs.c.attempt - 1, "state": JobState.QUEUED, "started_at": None}
    return update(jobs).where(*_held(dialect)).values(values).returning(*TAKEN)


_HELD: dict[str, type] = {"id": str, "fence": int}


def _held(dialect: str) -> list[ColumnElement[bool]]:
    """Of the jobs given, those that are still what their holder names."""
    rows = given_columns(dialect, _HELD)
    return [jobs.c.id == rows["id"], jobs.c.fence == rows["fence"], RUNNING]


_EXTENDING = (
    update(workers)
    .where(workers.c.id == _WORKER)
    .values(
        lease_until=bindparam("until", type_=Double()),
        seen_at=_AT,
        stats=bindparam("told", type_=Text()),
    )
    .returning(workers.c.id)
)


def beat(
    connection: Connection,
    worker_id: str,
    *,
    now: float,
    lease_s: float,
    stats: Mapping[str, Any],
    checkpoints: Mapping[Held, Checkpoint],
    first_tokens: Mapping[Held, float] | None = None,  # when each attempt's came
    pieces: Mapping[Held, str] | None = None,  # what the checkpoints' newest tokens say
    held: Sequence[Held],
) -> Beaten:
    """Extend the lease, keep the tokens made so far; say what has become of those in `held`.

    Raises UnknownWorker, and then has changed nothing.
    """
    extended = connection.execute(
        _EXTENDING,
        {"worker": worker_id, "at": now, "until": now + lease_s, "told": encode(stats)},
    ).one_or_none()
    if extended is None:
        raise UnknownWorker(worker_id)
    if not held:
        return Beaten(lost=frozenset(), stored=frozenset())
    saved = _save(connection, held, checkpoints, first_tokens or {}, pieces or {}, wait=False)
    parameters = held_rows(connection, held).parameters
    ours = connection.execute(_still_held(connection.dialect.name), parameters)
    return Beaten(
        lost=frozenset(held) - {Held(*row) for row in ours},
        stored=frozenset(saved & checkpoints.keys()),
    )


@cache
def _still_held(dialect: str) -> Select[Any]:
    return select(jobs.c.id, jobs.c.fence).where(*_held(dialect))


_MARKING = (
    update(workers)
    .where(workers.c.id == _WORKER)
    .values(ledger_window=bindparam("window", type_=BigInteger()))
)
_MARKED = select(workers.c.ledger_window).where(workers.c.id == _WORKER).with_for_update()


def mark_window(connection: Connection, worker_id: str, window: int) -> None:
    """Let the row say that this transaction of the worker's ledger was committed, if it is."""
    connection.execute(_MARKING, {"worker": worker_id, "window": window})


def marked_window(connection: Connection, worker_id: str) -> int | None:
    """The last transaction that was marked; waits for one that is being committed."""
    return connection.scalar(_MARKED, {"worker": worker_id})


def _claimed(row: Row[Any]) -> ClaimedJob:
    values = dict(row._mapping)
    return ClaimedJob(**{**values, "body": decode(row.body), "checkpoint": decode(row.checkpoint)})


def _save(
    connection: Connection,
    held: Sequence[Held],
    checkpoints: Mapping[Held, Checkpoint],
    first_tokens: Mapping[Held, float],
    pieces: Mapping[Held, str],
    *,
    wait: bool,  # for rows that somebody else is writing; else those are passed over
) -> set[Held]:
    """Of each job what is given; its row keeps the rest. Those that were still held, and saved."""
    saved = []
    for each in held:
        if each in checkpoints or each in first_tokens:
            tokens = checkpoints.get(each)
            text = None if tokens is None else encode(tokens)
            num = None if tokens is None else num_tokens(tokens)
            saved.append((each.id, each.fence, text, num, first_tokens.get(each), pieces.get(each)))
    if not saved:
        return set()
    parameters = given(connection, _SAVED, saved).parameters
    written = connection.execute(_saving(connection.dialect.name, wait), parameters)
    return {Held(*row) for row in written}


_SAVED = _HELD | {"checkpoint": str, "tokens": int, "first": float, "pieces": str}


@cache
def _saving(dialect: str, wait: bool) -> ReturningUpdate[Any]:
    rows = given_columns(dialect, _SAVED)
    ours = [jobs.c.id == rows["id"], jobs.c.fence == rows["fence"], RUNNING]
    if not wait:
        # a job being finished just now needs no checkpoint, and a beat that waited for the ledger's
        # rows while the ledger waits for the beat's would be a deadlock
        free = select(jobs.c.id).where(*ours).with_for_update(skip_locked=True, of=jobs)
        ours.append(jobs.c.id.in_(picked(free)))
    return (
        update(jobs)
        .where(*ours)
        .values(
            checkpoint=func.coalesce(rows["checkpoint"], jobs.c.checkpoint),
            checkpoint_tokens=func.coalesce(rows["tokens"], jobs.c.checkpoint_tokens),
            first_token_at=func.coalesce(jobs.c.first_token_at, rows["first"]),
            pieces=with_pieces(rows["pieces"]),
        )
        .returning(jobs.c.id, jobs.c.fence)
    )


def with_pieces(more: ColumnElement[str]) -> ColumnElement[str | None]:
    """The column, with more lines behind those it has."""
    joined = func.coalesce(jobs.c.pieces, "").concat(more)
    return case((more.is_(None), jobs.c.pieces), else_=joined)


def held_rows(connection: Connection, held: Sequence[Held]) -> Given:
    return given(connection, _HELD, [(each.id, each.fence) for each in held])
