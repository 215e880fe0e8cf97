"""What workers do with jobs: claim, beat, hand back. Each write names the fence it holds.

Every function takes an open connection and `now`, seconds by the database's clock, and acts on up
to a few hundred jobs in one statement. What a statement does not return was no longer the caller's.

UnknownWorker
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    case,
    exists,
    func,
    or_,
    select,
    update,
)

from jobs import attempts
from jobs.attempts import Begun, Outcome
from jobs.lifecycle import ErrorCode, JobState
from jobs.models import QUEUED, RUNNING, jobs, workers
from jobs.records import WorkerInfo
from jobs.retries import TAKEN, Backoff, after_crash, after_failure, due, taken
from jobs.rows import Given, decode, encode, given, insert_into, picked

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
    connection.execute(
        insert_into(connection, workers)
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

    A job not returned has ended, is another's, is past its deadline or waits to be tried again: its
    message is dropped.
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
            due(now),
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
            not_before=None,
        )
        .returning(*_CLAIMED)
    )
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


def lease_stands(connection: Connection, worker_id: str, *, now: float) -> bool:
    """Whether what the worker claims now would stay its own."""
    alive = exists().where(workers.c.id == worker_id, workers.c.lease_until > now)
    return bool(connection.scalar(select(alive)))


def put_back(connection: Connection, ids: Sequence[str]) -> None:
    """Their messages came to a worker that cannot claim: those still queued are published anew."""
    connection.execute(
        update(jobs).where(jobs.c.id.in_(dict.fromkeys(ids)), QUEUED).values(published_at=None)
    )


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
    rows = held_rows(connection, held)
    values: dict[str, Any] = {
        "fence": jobs.c.fence + 1,
        "worker_id": None,
        "published_at": None,
    }
    outcome = Outcome.HANDED_BACK
    if failures is not None:
        outcome = Outcome.FAILED
        values |= after_failure(backoff, now)
    elif crashed:
        outcome = Outcome.SUSPECT
        values |= after_crash(backoff, now, max_crashes=max_crashes)
    else:
        values |= {"attempt": jobs.c.attempt - 1, "state": JobState.QUEUED, "started_at": None}
    released = connection.execute(
        update(jobs)
        .where(jobs.c.id == rows["id"], jobs.c.fence == rows["fence"], RUNNING)
        .values(values)
        .returning(*TAKEN),
        rows.parameters,
    ).all()
    codes = failures or {}
    closed = [taken(row, outcome, codes.get(Held(row.id, row.fence - 1))) for row in released]
    attempts.close(connection, closed, now=now)
    return {Held(row.id, row.fence - 1): JobState(row.state) for row in released}


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
        update(workers)
        .where(workers.c.id == worker_id)
        .values(lease_until=now + lease_s, seen_at=now, stats=encode(stats))
        .returning(workers.c.id)
    ).one_or_none()
    if extended is None:
        raise UnknownWorker(worker_id)
    if not held:
        return Beaten(lost=frozenset(), stored=frozenset())
    saved = _save(connection, held, checkpoints, first_tokens or {}, pieces or {}, wait=False)
    rows = held_rows(connection, held)
    ours = connection.execute(
        select(jobs.c.id, jobs.c.fence).where(
            jobs.c.id == rows["id"], jobs.c.fence == rows["fence"], RUNNING
        ),
        rows.parameters,
    )
    return Beaten(
        lost=frozenset(held) - {Held(*row) for row in ours},
        stored=frozenset(saved & checkpoints.keys()),
    )


def mark_window(connection: Connection, worker_id: str, window: int) -> None:
    """Let the row say that this transaction of the worker's ledger was committed, if it is."""
    connection.execute(
        update(workers).where(workers.c.id == worker_id).values(ledger_window=window)
    )


def marked_window(connection: Connection, worker_id: str) -> int | None:
    """The last transaction that was marked; waits for one that is being committed."""
    query = select(workers.c.ledger_window).where(workers.c.id == worker_id).with_for_update()
    return connection.scalar(query)


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
    columns = {"id": str, "fence": int, "checkpoint": str, "tokens": int, "first": float}
    rows = given(connection, columns | {"pieces": str}, saved)
    ours = [jobs.c.id == rows["id"], jobs.c.fence == rows["fence"], RUNNING]
    if not wait:
        # a job being finished just now needs no checkpoint, and a beat that waited for the ledger's
        # rows while the ledger waits for the beat's would be a deadlock
        free = select(jobs.c.id).where(*ours).with_for_update(skip_locked=True, of=jobs)
        ours.append(jobs.c.id.in_(picked(free)))
    written = connection.execute(
        update(jobs)
        .where(*ours)
        .values(
            checkpoint=func.coalesce(rows["checkpoint"], jobs.c.checkpoint),
            checkpoint_tokens=func.coalesce(rows["tokens"], jobs.c.checkpoint_tokens),
            first_token_at=func.coalesce(jobs.c.first_token_at, rows["first"]),
            pieces=with_pieces(rows["pieces"]),
        )
        .returning(jobs.c.id, jobs.c.fence),
        rows.parameters,
    )
    return {Held(*row) for row in written}


def with_pieces(more: ColumnElement[str]) -> ColumnElement[str | None]:
    """The column, with more lines behind those it has."""
    joined = func.coalesce(jobs.c.pieces, "").concat(more)
    return case((more.is_(None), jobs.c.pieces), else_=joined)


def held_rows(connection: Connection, held: Sequence[Held]) -> Given:
    return given(connection, {"id": str, "fence": int}, [(each.id, each.fence) for each in held])
