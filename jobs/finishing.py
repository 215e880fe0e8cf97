"""How a held job ends: its result is written once, by whoever names the fence it holds.

Takes an open connection and `now`, seconds by the database's clock; up to a few hundred results in
one statement. What a statement does not return was no longer the caller's.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Update,
    bindparam,
    case,
    func,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.dml import ReturningUpdate

from jobs import attempts
from jobs.attempts import Closed, Outcome
from jobs.claims import Held, held_rows, with_pieces
from jobs.database import error_kind, transient
from jobs.lifecycle import NEXT, TERMINAL, ErrorCode, JobState, error_object
from jobs.models import LOST, RUNNING, jobs
from jobs.records import storable
from jobs.retries import TAKEN, taken
from jobs.rows import encode, given, given_columns

logger = logging.getLogger(__name__)


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
    wasted_tokens: int = 0  # with those of its checkpoint; added to what earlier attempts wasted
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    pieces: str | None = None  # added to the row's

    def __post_init__(self) -> None:
        assert self.state in TERMINAL & NEXT[JobState.RUNNING], self.state
        assert (self.state == JobState.SUCCEEDED) == (self.error is None), self.id


def finish(connection: Connection, results: Sequence[JobResult], *, now: float) -> set[Held]:
    """Write results of jobs still held; those accepted, the rest were fenced out.

    A result the database refuses does not sink the others: its job fails as `unstorable`.
    """
    # the first of two for one claim counts; an old and a new claim of one job may both be here
    results = list({(each.id, each.fence): each for each in reversed(results)}.values())
    if not results:
        return set()
    try:
        with connection.begin_nested():
            return _finish(connection, results, now)
    except (DBAPIError, ValueError, OverflowError) as error:
        if transient(error):
            raise
        if len(results) > 1:
            return set().union(*(finish(connection, [result], now=now) for result in results))
        refused = error_kind(error)
    result = results[0]
    logger.error("job %s has a result the database refuses: error=%s", result.id, refused)
    failure = JobResult(
        id=result.id,
        fence=result.fence,
        state=JobState.FAILED,
        error=error_object(ErrorCode.UNSTORABLE, f"the result could not be stored ({refused})"),
        finish_reason="error",
        prompt_tokens=result.prompt_tokens,
        wasted_tokens=result.wasted_tokens + result.completion_tokens,
        first_token_at=result.first_token_at,
    )
    with connection.begin_nested():
        return _finish(connection, [failure], now)


def cancelling(now: float) -> Update:
    """Cancels those of its WHERE that have not ended."""
    return (
        update(jobs)
        .where(jobs.c.state.in_(_before(JobState.CANCELLED)))
        .values(
            state=JobState.CANCELLED,
            fence=jobs.c.fence + 1,
            finished_at=now,
            finish_reason="abort",
            **LOST,
        )
    )


def revoke(connection: Connection, job_id: str, *, now: float) -> bool:
    """Cancel what a Celery client revokes, whoever's it is. Whether it has ended, now or before."""
    where = jobs.c.id == job_id
    row = connection.execute(cancelling(now).where(where).returning(*TAKEN)).one_or_none()
    if row is not None:
        attempts.close(connection, [taken(row, Outcome.CANCELLED)], now=now)
        return True
    state = connection.scalar(select(jobs.c.state).where(where))
    return state is not None and JobState(state) in TERMINAL


def _before(state: JobState) -> list[str]:
    """The states a job may come from."""
    return [str(old) for old, following in NEXT.items() if state in following]


def ended_under(connection: Connection, held: Sequence[Held]) -> set[Held]:
    """Those that ended under this very fence: what `finish` returned, if its commit was in."""
    rows = held_rows(connection, held)
    query = select(jobs.c.id, jobs.c.fence).where(
        jobs.c.id == rows["id"],
        jobs.c.fence == rows["fence"],
        jobs.c.state.in_([str(state) for state in TERMINAL]),
    )
    ended = connection.execute(query, rows.parameters) if held else ()
    return {Held(*row) for row in ended}


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
    "pieces": str,
}


def _finish(connection: Connection, results: Sequence[JobResult], now: float) -> set[Held]:
    rows = given(connection, _RESULT, [_values(result) for result in results])
    finishing = _finishing(connection.dialect.name)
    accepted = connection.execute(finishing, {**rows.parameters, "at": now})
    ended = {Held(*row) for row in accepted}
    closed = [_closed(each) for each in results if Held(each.id, each.fence) in ended]
    attempts.close(connection, closed, now=now)
    return ended


@cache
def _finishing(dialect: str) -> ReturningUpdate[Any]:
    """Made once: making it takes longer than it runs."""
    rows = given_columns(dialect, _RESULT)
    first = rows["first_token_at"]
    at: ColumnElement[float] = bindparam("at", type_=Double())
    return (
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
                # the engine's own time is before a beat's; an earlier attempt's is the true first
                "first_token_at": case(
                    (jobs.c.first_token_at <= first, jobs.c.first_token_at),
                    else_=func.coalesce(first, jobs.c.first_token_at),
                ),
                "finished_at": func.coalesce(rows["finished_at"], at),
                "pieces": with_pieces(rows["pieces"]),
                "checkpoint": None,
                "checkpoint_tokens": 0,
            }
        )
        .returning(jobs.c.id, jobs.c.fence)
    )


def _closed(result: JobResult) -> Closed:
    return Closed(
        job_id=result.id,
        fence=result.fence,
        outcome=Outcome(result.state),
        error_code=None if result.error is None else str(result.error.get("code")),
        kept_tokens=result.completion_tokens,
        wasted_tokens=result.wasted_tokens,
    )


def _values(result: JobResult) -> tuple[Any, ...]:
    values = {name: getattr(result, name) for name in _RESULT}
    for name in ("output", "error"):
        values[name] = None if values[name] is None else encode(values[name])
    values["state"] = str(result.state)
    if result.finish_reason is not None and not storable(result.finish_reason):
        # a plain text column: PostgreSQL refuses it, SQLite would keep what is before it
        raise ValueError("finish_reason holds U+0000 or a lone surrogate")
    return tuple(values.values())
