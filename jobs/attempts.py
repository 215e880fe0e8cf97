"""The record of attempts: each claim of a job, what came of it, and how often which came of one.

Written in the transaction that claims or ends, so that it never differs from the job's row. It
decides nothing: who holds a job is its row's to say. What is counted is appended, and added up by
the sweeper now and then; a count outlives the jobs it was made of.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    Double,
    Select,
    Update,
    bindparam,
    case,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from jobs.models import attempts, engine_deaths, tallies
from jobs.rows import encode, given, given_columns, insert_into, picked

FORGET_DEATHS_S = 30 * 86_400.0
ROUND = 10_000  # most tallies one call adds up


class Outcome(StrEnum):
    """What came of an attempt. The first three ended the job as well."""

    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"  # `error_code` says how; the job may have been tried again
    HANDED_BACK = "handed_back"  # in good order, by a worker that stops or has no engine
    LAPSED = "lapsed"  # taken from a worker whose lease ran out
    SUSPECT = "suspect"  # it ran in an engine process that died


class Count(StrEnum):
    """What is counted; behind it, what its label is."""

    ATTEMPTS = "attempts"  # an Outcome
    WASTED_TOKENS = "wasted_tokens"  # none
    STALE_WRITES = "stale_writes"  # what was refused: result, hand_back
    ENGINE_DEATHS = "engine_deaths"  # how it ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A claim that has been made."""

    job_id: str
    fence: int
    tenant_id: str
    attempt: int
    resumed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """An end that has been written."""

    job_id: str
    fence: int  # under which it was claimed
    outcome: Outcome
    error_code: str | None = None
    # those of the job that are in its output or checkpoint now, earlier attempts' too
    kept_tokens: int = 0
    wasted_tokens: int = 0  # with the job's, this attempt's or an earlier one's
    stored_tokens: int = 0  # in the job's checkpoint when it was taken from its worker


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """An attempt's row. Times are seconds by the database's clock."""

    attempt: int
    fence: int
    worker_id: str
    started_at: float
    ended_at: float | None
    outcome: str | None  # an Outcome; None: it goes on
    error_code: str | None
    kept_tokens: int
    wasted_tokens: int


_RECORD = tuple(attempts.c[name] for name in AttemptRecord.__dataclass_fields__)

# statements are made once: making one takes longer than most of them run
_BEGINNING, _COUNTING = insert(attempts), insert(tallies)


def begin(connection: Connection, begun: Sequence[Begun], *, worker_id: str, now: float) -> None:
    """A row for each claim, of which nothing has come yet."""
    if begun:
        common = {"worker_id": worker_id, "started_at": now, "kept_tokens": 0, "wasted_tokens": 0}
        connection.execute(
            _BEGINNING,
            [{name: getattr(each, name) for name in Begun.__slots__} | common for each in begun],
        )


def close(connection: Connection, closed: Sequence[Closed], *, now: float) -> None:
    """What came of each; and count it, and the tokens wasted."""
    if not closed:
        return
    values = [tuple(getattr(each, name) for name in _CLOSED) for each in closed]
    parameters = {**given(connection, _CLOSED, values).parameters, "at": now}
    ended = connection.execute(_closing(connection.dialect.name), parameters)
    counts = Counter[tuple[str, str]]((Count.ATTEMPTS, each) for each in ended.scalars())
    counts[Count.WASTED_TOKENS, ""] = sum(each.wasted_tokens for each in closed)
    count(connection, counts)


_ATTEMPT: dict[str, type] = {"job_id": str, "fence": int}
_CLOSED = _ATTEMPT | {
    "outcome": str,
    "error_code": str,
    "kept_tokens": int,
    "wasted_tokens": int,
    "stored_tokens": int,
}


@cache
def _closing(dialect: str) -> ReturningUpdate[Any]:
    rows = given_columns(dialect, _CLOSED)
    own = rows["kept_tokens"] - attempts.c.resumed_tokens
    return (
        update(attempts)
        .where(
            attempts.c.job_id == rows["job_id"],
            attempts.c.fence == rows["fence"],
            attempts.c.outcome.is_(None),
        )
        .values(
            ended_at=bindparam("at", type_=Double()),
            outcome=rows["outcome"],
            error_code=rows["error_code"],
            kept_tokens=case((own > 0, own), else_=0),
            wasted_tokens=attempts.c.wasted_tokens + rows["wasted_tokens"],
            stored_tokens=rows["stored_tokens"],
        )
        .returning(attempts.c.outcome)
    )


def add_wasted(connection: Connection, wasted: Iterable[tuple[str, int, int]]) -> None:
    """Tokens of attempts (job, fence, tokens) that were told of behind their end."""
    totals: Counter[tuple[str, int]] = Counter()
    for job_id, fence, tokens in wasted:
        totals[job_id, fence] += tokens
    if not totals:
        return
    values = [(job_id, fence, tokens) for (job_id, fence), tokens in totals.items()]
    parameters = given(connection, _WASTED, values).parameters
    connection.execute(_wasting(connection.dialect.name), parameters)


_WASTED = _ATTEMPT | {"tokens": int}


@cache
def _wasting(dialect: str) -> Update:
    rows = given_columns(dialect, _WASTED)
    return (
        update(attempts)
        .where(attempts.c.job_id == rows["job_id"], attempts.c.fence == rows["fence"])
        .values(wasted_tokens=attempts.c.wasted_tokens + rows["tokens"])
    )


def stored_tokens(
    connection: Connection, ended: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], int]:
    """What the checkpoints of jobs held when they were taken from these attempts (job, fence)."""
    parameters = given(connection, _ATTEMPT, sorted(set(ended))).parameters
    query = _stored(connection.dialect.name)
    return {
        (row.job_id, row.fence): row.stored_tokens for row in connection.execute(query, parameters)
    }


@cache
def _stored(dialect: str) -> Select[tuple[str, int, int]]:
    rows = given_columns(dialect, _ATTEMPT)
    return select(attempts.c.job_id, attempts.c.fence, attempts.c.stored_tokens).where(
        attempts.c.job_id == rows["job_id"], attempts.c.fence == rows["fence"]
    )


def of_job(connection: Connection, job_id: str, *, tenant: str) -> list[AttemptRecord]:
    """The oldest first."""
    query = (
        select(*_RECORD)
        .where(attempts.c.job_id == job_id, attempts.c.tenant_id == tenant)
        .order_by(attempts.c.fence)
    )
    return [AttemptRecord(**row._mapping) for row in connection.execute(query)]


def record_death(
    connection: Connection,
    death_id: str,
    *,
    worker_id: str,
    model: str,
    ending: str,
    job_ids: Sequence[str],
    now: float,
) -> None:
    """An engine process died with these jobs. Told twice, it is one death."""
    values = {
        "id": death_id,
        "worker_id": worker_id,
        "model": model,
        "died_at": now,
        "ending": ending,
        "job_ids": encode(job_ids),
    }
    statement = insert_into(connection, engine_deaths).values(values).on_conflict_do_nothing()
    if connection.execute(statement.returning(engine_deaths.c.id)).one_or_none() is not None:
        count(connection, {(Count.ENGINE_DEATHS, ending): 1})


def count(connection: Connection, counts: Mapping[tuple[str, str], int]) -> None:
    """Add to what is counted, by name and label."""
    added = [
        {"id": secrets.token_hex(16), "name": str(name), "label": label[:64], "amount": amount}
        for (name, label), amount in counts.items()
        if amount
    ]
    if added:
        connection.execute(_COUNTING, added)


def totals(connection: Connection) -> dict[tuple[str, str], int]:
    """All that has been counted, by name and label."""
    query = select(tallies.c.name, tallies.c.label, func.sum(tallies.c.amount))
    grouped = query.group_by(tallies.c.name, tallies.c.label)
    return {(name, label): int(amount) for name, label, amount in connection.execute(grouped)}


def purge(connection: Connection, now: float) -> None:
    """Forget old deaths, and make one tally of many."""
    connection.execute(
        delete(engine_deaths).where(engine_deaths.c.died_at <= now - FORGET_DEATHS_S)
    )
    some = select(tallies.c.id).limit(ROUND).with_for_update(skip_locked=True)
    taken: Counter[tuple[Any, ...]] = Counter()
    gone = delete(tallies).where(tallies.c.id.in_(picked(some))).returning(*tallies.c)
    for row in connection.execute(gone):
        taken[row.name, row.label] += row.amount
    count(connection, taken)
