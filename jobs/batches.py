"""A batch's life: created, read, run, closed. Each statement's WHERE names the state it comes from.

    validating → failed
    validating → in_progress → finalizing → completed | expired
    validating | in_progress → cancelling → cancelled

Its rows are jobs, so that everything else about them is decided where it is for any job. Whoever
works on a batch (`worker.batch_keeper`) takes it for a while under a name of its own, and names
itself in every write: one that was thought dead changes nothing any more. Every function takes an
open connection and `now`, seconds by the database's clock.

UnknownBatch
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from sqlalchemy import (
    Connection,
    and_,
    func,
    insert,
    literal_column,
    or_,
    select,
    tuple_,
    update,
)

from jobs import attempts, webhooks
from jobs.attempts import Outcome
from jobs.batch_progress import progress, progress_object
from jobs.batch_record import BatchRecord, BatchState, StopReason
from jobs.lifecycle import ErrorCode, JobState, error_object
from jobs.models import LOST, QUEUED, RUNNING, batches, jobs
from jobs.records import JobRecord
from jobs.retries import TAKEN, taken
from jobs.rows import decode, encode, picked

PRIORITY = -5  # of rows, unless asked for another: what somebody waits for goes first
WINDOW_S = 86_400.0
KEEPER_S = 30.0  # a keeper silent for so long has lost its batch
MAX_ERRORS = 1000
MAX_LISTED = 100
_ROUND = 2000  # rows that one statement ends


class UnknownBatch(Exception):
    """No batch of that id; the same for one of another tenant."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"no batch with id {batch_id[:100]!r}")


class LostBatch(Exception):
    """The batch has another keeper by now, or another state: roll back and let go of it."""


_JSON = ("metadata", "errors", "usage", "progress")
_NAMES = tuple(each.name for each in fields(BatchRecord))
_RECORD = tuple(batches.c[name] for name in _NAMES)
ENDING = {BatchState.CANCELLED: JobState.CANCELLED, BatchState.EXPIRED: JobState.EXPIRED}


def new_batch_id() -> str:
    return "batch_" + secrets.token_hex(16)


def create(connection: Connection, record: BatchRecord) -> None:
    values = {name: getattr(record, name) for name in _NAMES}
    for name in _JSON:
        values[name] = None if values[name] is None else encode(values[name])
    values |= {"state": str(record.state), "dedupe": int(record.dedupe)}
    connection.execute(insert(batches).values(values))


def get(connection: Connection, batch_id: str, *, tenant: str, now: float) -> BatchRecord:
    """With counts of now. Raises UnknownBatch."""
    query = select(*_RECORD).where(batches.c.id == batch_id, batches.c.tenant_id == tenant)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise UnknownBatch(batch_id)
    return _counted(connection, _record(row), now)


def list_batches(
    connection: Connection, *, tenant: str, limit: int, now: float, after: str | None = None
) -> list[BatchRecord]:
    """The newest first, from behind the batch `after`. Raises UnknownBatch for that one."""
    key = (batches.c.created_at, batches.c.id)
    query = select(*_RECORD).where(batches.c.tenant_id == tenant)
    if after is not None:
        last = connection.execute(
            select(*key).where(batches.c.id == after, batches.c.tenant_id == tenant)
        ).one_or_none()
        if last is None:
            raise UnknownBatch(after)
        query = query.where(tuple_(*key) < tuple_(*last))
    query = query.order_by(*(column.desc() for column in key)).limit(limit)
    return [_counted(connection, _record(row), now) for row in connection.execute(query).all()]


def cancel(connection: Connection, batch_id: str, *, tenant: str, now: float) -> BatchRecord:
    """Begin to end it; one whose rows have all ended is left as it is. Raises UnknownBatch."""
    connection.execute(
        update(batches)
        .where(
            batches.c.id == batch_id,
            batches.c.tenant_id == tenant,
            batches.c.state.in_([BatchState.VALIDATING, BatchState.IN_PROGRESS]),
        )
        .values(state=BatchState.CANCELLING, ending=BatchState.CANCELLED, cancelling_at=now)
    )
    return get(connection, batch_id, tenant=tenant, now=now)


def pause(connection: Connection, batch_id: str, *, tenant: str, now: float) -> BatchRecord:
    """Put no more of its rows on the runway, until it is resumed. Raises UnknownBatch."""
    return _set_paused(connection, batch_id, tenant, now, paused=True)


def resume(connection: Connection, batch_id: str, *, tenant: str, now: float) -> BatchRecord:
    """Raises UnknownBatch."""
    return _set_paused(connection, batch_id, tenant, now, paused=False)


def _set_paused(
    connection: Connection, batch_id: str, tenant: str, now: float, *, paused: bool
) -> BatchRecord:
    other = batches.c.paused_at.is_(None) if paused else batches.c.paused_at.is_not(None)
    rested = batches.c.paused_s + now - batches.c.paused_at
    values = {"paused_at": now} if paused else {"paused_at": None, "paused_s": rested}
    connection.execute(
        update(batches)
        .where(
            batches.c.id == batch_id,
            batches.c.tenant_id == tenant,
            batches.c.state.in_([BatchState.VALIDATING, BatchState.IN_PROGRESS]),
            other,
        )
        .values(values)
    )
    return get(connection, batch_id, tenant=tenant, now=now)


_PAUSED = select(batches.c.id).where(
    batches.c.closed_at.is_(None), batches.c.paused_at.is_not(None)
)


def paused(connection: Connection) -> list[str]:
    """Those whose rows wait in SQL."""
    return list(connection.scalars(_PAUSED))


def rows_after(
    connection: Connection,
    batch_id: str,
    *,
    tenant: str,
    after: int,
    limit: int,
    ended: bool = False,  # only those that have
    bodies: bool = False,
) -> list[JobRecord]:
    """Its rows in the order of the file, from behind the row `after`."""
    query = (
        select(*(_ROW_AND_BODY if bodies else _ROW))
        .where(jobs.c.batch_id == batch_id, jobs.c.tenant_id == tenant, jobs.c.row_number > after)
        .order_by(jobs.c.row_number)
        .limit(limit)
    )
    if ended:
        query = query.where(jobs.c.finished_at.is_not(None))
    return [JobRecord.of(row) for row in connection.execute(query)]


def num_by_state(connection: Connection) -> dict[BatchState, int]:
    """All tenants' batches together."""
    query = select(batches.c.state, func.count()).group_by(batches.c.state)
    return {BatchState(state): num for state, num in connection.execute(query)}


# -- what its keeper does


def take_open(connection: Connection, keeper: str, *, now: float, limit: int) -> list[BatchRecord]:
    """Batches with something to do that are the caller's for KEEPER_S, the oldest first."""
    free = or_(
        batches.c.keeper.is_(None), batches.c.keeper == keeper, batches.c.keeper_until <= now
    )
    some = (
        select(batches.c.id)
        .where(batches.c.closed_at.is_(None), free)
        .order_by(batches.c.created_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    rows = connection.execute(
        update(batches)
        .where(batches.c.id.in_(picked(some)), free)
        .values(keeper=keeper, keeper_until=now + KEEPER_S)
        .returning(*_RECORD)
    )
    return sorted(map(_record, rows), key=lambda batch: batch.created_at)


def let_go(connection: Connection, keeper: str) -> None:
    """Whoever comes next need not wait."""
    connection.execute(
        update(batches)
        .where(batches.c.keeper == keeper, batches.c.closed_at.is_(None))
        .values(keeper=None, keeper_until=None)
    )


def keep(
    connection: Connection,
    batch: BatchRecord,
    keeper: str,
    *,
    now: float,
    values: Mapping[str, Any] | None = None,
) -> None:
    """A keeper's write: its batch stays its own, with these columns. Raises LostBatch where it is
    another's, or not in the state that the keeper knows."""
    kept = connection.execute(
        update(batches)
        .where(
            batches.c.id == batch.id,
            batches.c.tenant_id == batch.tenant_id,
            batches.c.state == str(batch.state),
            batches.c.keeper == keeper,
        )
        .values({"keeper_until": now + KEEPER_S, **(values or {})})
    )
    if not kept.rowcount:
        raise LostBatch


def refuse(
    connection: Connection,
    batch: BatchRecord,
    keeper: str,
    errors: Sequence[Mapping[str, Any]],
    *,
    now: float,
) -> None:
    """Its file is no batch: it has failed, and none of its rows was run."""
    values = {
        "state": BatchState.FAILED, "ending": BatchState.FAILED, "closed_at": now,
        "errors": encode([*errors][:MAX_ERRORS]),
    }  # fmt: skip
    keep(connection, batch, keeper, now=now, values=values)
    webhooks.record(connection, batch.tenant_id, "batch.failed", batch.id, now=now)


def expire(connection: Connection, batch: BatchRecord, keeper: str, *, now: float) -> None:
    """Its time is over: what has not ended by now will not be run."""
    values = {
        "state": BatchState.FINALIZING, "ending": BatchState.EXPIRED, "finalizing_at": now
    }  # fmt: skip
    keep(connection, batch, keeper, now=now, values=values)


def stop(
    connection: Connection, batch: BatchRecord, keeper: str, reason: StopReason, *, now: float
) -> None:
    """It has run into one of its limits: what has not ended by now will not be run."""
    values = {
        "state": BatchState.CANCELLING, "ending": BatchState.CANCELLED, "cancelling_at": now,
        "stop_reason": str(reason),
    }  # fmt: skip
    keep(connection, batch, keeper, now=now, values=values)


def num_open(connection: Connection, batch: BatchRecord) -> int:
    """How many of its rows have not ended; not counted beyond the first."""
    query = select(jobs.c.id).where(*_open_rows(batch)).limit(1)
    return len(connection.execute(query).all())


def end_rows(connection: Connection, batch: BatchRecord, *, now: float) -> tuple[int, list[str]]:
    """End some of the rows that have not, as the batch itself ends; how many, and those that ran.

    A worker that runs one is fenced out at once and hears of it at its next beat, or by a hint.
    """
    assert batch.ending is not None
    state = ENDING[BatchState(batch.ending)]
    open_rows = (
        select(jobs.c.id, jobs.c.worker_id).where(*_open_rows(batch)).limit(_ROUND)
        .with_for_update(of=jobs)
    )  # fmt: skip
    found = connection.execute(open_rows).all()
    running = [row.id for row in found if row.worker_id is not None]
    ids = [row.id for row in found]
    outcome = Outcome.CANCELLED if state == JobState.CANCELLED else Outcome.EXPIRED
    for start in range(0, len(ids), 500):
        ended = connection.execute(
            update(jobs)
            .where(jobs.c.id.in_(ids[start : start + 500]), jobs.c.tenant_id == batch.tenant_id)
            .values(
                state=str(state),
                fence=jobs.c.fence + 1,
                worker_id=None,
                finished_at=now,
                **ended_as(state, batch),
                **LOST,
            )
            .returning(*TAKEN)
        )
        attempts.close(connection, [taken(row, outcome) for row in ended.all()], now=now)
    return len(ids), running


def ended_as(state: JobState, batch: BatchRecord) -> dict[str, Any]:
    """What is said of a row that its batch took along when it ended."""
    if batch.stop_reason is not None:
        message = _STOPPED[StopReason(batch.stop_reason)].format(batch=batch)
        error = error_object(ErrorCode.BATCH_STOPPED, message)
        return {"finish_reason": "abort", "error": encode(error)}
    if state == JobState.CANCELLED:
        return {"finish_reason": "abort"}
    message = "the batch's completion window was over before this row was done"
    error = error_object(ErrorCode.DEADLINE_EXCEEDED, message)
    return {"finish_reason": "deadline", "error": encode(error)}


def num_promised(connection: Connection, *, tenant: str) -> int:
    """Rows of the tenant's batches that are no jobs yet, and will be."""
    query = select(func.coalesce(func.sum(batches.c.num_rows - batches.c.num_inserted), 0)).where(
        batches.c.tenant_id == tenant, batches.c.closed_at.is_(None)
    )
    return int(connection.scalar(query) or 0)


def reads_file(connection: Connection, file_id: str, *, tenant: str) -> bool:
    """Whether rows of a batch still stand nowhere but in this file."""
    query = select(batches.c.id).where(
        batches.c.input_file_id == file_id, batches.c.tenant_id == tenant, IS_READING
    )
    return connection.execute(query.limit(1)).one_or_none() is not None


IS_READING = and_(
    batches.c.closed_at.is_(None),
    or_(
        batches.c.state == BatchState.VALIDATING,
        batches.c.num_inserted < batches.c.num_rows,
    ),
)
_STOPPED = {
    StopReason.TOKEN_BUDGET: "the batch's token_budget, {batch.token_budget}, was used up before "
    "this row was done",
    StopReason.ERROR_RATE: "more of the batch's rows failed than its max_error_rate, "
    "{batch.max_error_rate}, allows",
}
_IS_ROW = jobs.c.row_number.is_not(None)
_ROW_AND_BODY = tuple(jobs.c[field.name] for field in fields(JobRecord))
_ROW = tuple(
    literal_column("NULL").label("body") if column.name == "body" else column
    for column in _ROW_AND_BODY
)


def _open_rows(batch: BatchRecord) -> tuple[Any, ...]:
    return (
        jobs.c.batch_id == batch.id,
        jobs.c.tenant_id == batch.tenant_id,
        _IS_ROW,
        or_(QUEUED, RUNNING),
    )


def _record(row: Any) -> BatchRecord:
    values = dict(row._mapping)
    for name in _JSON:
        values[name] = decode(values[name])
    values |= {"state": BatchState(values["state"]), "dedupe": bool(values["dedupe"])}
    return BatchRecord(**values)


def _counted(connection: Connection, batch: BatchRecord, now: float) -> BatchRecord:
    if batch.closed_at is not None:
        return batch
    found = progress(connection, batch, now=now)
    completed = found.num(JobState.SUCCEEDED)
    return replace(
        batch,
        num_completed=completed,
        num_failed=found.num_ended - completed,
        progress=progress_object(batch, found),
    )
