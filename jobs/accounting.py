"""What is learnt of a job's tokens beside its claim and its result, whoever holds it by now.

No fence guards these writes: how long a prompt is, and that tokens were generated for nothing, is
true of the job itself. Takes an open connection; any number of jobs in one statement.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from sqlalchemy import Connection, func, update
from sqlalchemy.sql.dml import ReturningUpdate

from jobs import attempts
from jobs.attempts import Count
from jobs.models import jobs
from jobs.rows import given, given_columns


@dataclass(frozen=True, slots=True)
class Wasted:
    """Tokens that were generated for nothing: the job was cancelled, or went to another."""

    job_id: str
    tokens: int
    first_token_at: float | None = None  # by the database's clock; None: not known
    fence: int = 0  # of the attempt


@dataclass(frozen=True, slots=True)
class Counted:
    """A job that came whole in a message, once its prompt is tokenized."""

    job_id: str
    prompt_tokens: int
    max_tokens: int  # 0: not known, its options were refused


def account_left(connection: Connection, left: Sequence[Wasted]) -> None:
    """Attempts that were ended by others: `tokens` is all that each had, stored ones too.

    A beat may have stored more than the worker knew when it let go, so the record of the attempt
    says how many its checkpoint took: those are counted with the job's end, or the next attempt's.
    """
    if not left:
        return
    stored = attempts.stored_tokens(connection, [(each.job_id, each.fence) for each in left])
    lost = [
        replace(each, tokens=max(0, each.tokens - stored.get((each.job_id, each.fence), 0)))
        for each in left
    ]
    account_wasted(connection, lost)


def account_wasted(connection: Connection, wasted: Sequence[Wasted]) -> None:
    """Add them up, and fill in when the first token came where the row does not say.

    Not those of its checkpoint: they go to the next attempt, or `models.LOST` counts them.
    """
    totals: dict[str, Wasted] = {}
    for each in wasted:
        before = totals.get(each.job_id, Wasted(each.job_id, 0))
        times = [at for at in (before.first_token_at, each.first_token_at) if at is not None]
        totals[each.job_id] = Wasted(
            each.job_id, before.tokens + each.tokens, min(times, default=None)
        )
    if not totals:
        return
    values = [(each.job_id, each.tokens, each.first_token_at) for each in totals.values()]
    parameters = given(connection, _WASTED, values).parameters
    known = connection.scalars(_wasting(connection.dialect.name), parameters).all()
    attempts.add_wasted(connection, [(each.job_id, each.fence, each.tokens) for each in wasted])
    tokens = sum(totals[job_id].tokens for job_id in known)
    attempts.count(connection, {(Count.WASTED_TOKENS, ""): tokens})


_WASTED: dict[str, type] = {"id": str, "tokens": int, "first_token_at": float}


@cache
def _wasting(dialect: str) -> ReturningUpdate[Any]:
    """Made once: making it takes longer than it runs."""
    rows = given_columns(dialect, _WASTED)
    return (
        update(jobs)
        .where(jobs.c.id == rows["id"])
        .values(
            wasted_tokens=jobs.c.wasted_tokens + rows["tokens"],
            first_token_at=func.coalesce(jobs.c.first_token_at, rows["first_token_at"]),
        )
        .returning(jobs.c.id)
    )


def count_prompts(connection: Connection, counted: Sequence[Counted]) -> None:
    """Write down what nobody has counted before."""
    if not counted:
        return
    rows = given(
        connection,
        {"id": str, "prompt_tokens": int, "max_tokens": int},
        [(each.job_id, each.prompt_tokens, each.max_tokens) for each in counted],
    )
    connection.execute(
        update(jobs)
        .where(jobs.c.id == rows["id"], jobs.c.prompt_tokens == 0)
        .values(prompt_tokens=rows["prompt_tokens"], max_tokens=rows["max_tokens"]),
        rows.parameters,
    )
