"""What became of the jobs that ended in the last minutes: for metrics, of all tenants together."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, literal_column, select

from jobs.lifecycle import TERMINAL, JobState
from jobs.models import jobs

WINDOW_S = 300.0
MAX_JOBS = 500  # of a model and a state: the newest
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lately:
    """One model's jobs that ended in the window. Seconds by quantile; empty where none had any."""

    num_jobs: int
    num_attempts: int
    wasted_tokens: int
    queue_s: dict[float, float]
    ttft_s: dict[float, float]
    tpot_s: dict[float, float]


def lately(connection: Connection, model: str, now: float) -> Lately:
    rows = [row for state in TERMINAL for row in _ended(connection, model, state, now)]
    return Lately(
        num_jobs=len(rows),
        num_attempts=sum(row.attempt for row in rows),
        wasted_tokens=sum(row.wasted_tokens for row in rows),
        queue_s=quantiles(
            [row.started_at - row.created_at for row in rows if row.started_at is not None]
        ),
        ttft_s=quantiles(
            [row.first_token_at - row.created_at for row in rows if row.first_token_at is not None]
        ),
        tpot_s=quantiles(
            [
                (row.finished_at - row.first_token_at) / (row.completion_tokens - 1)
                for row in rows
                if row.first_token_at is not None and row.completion_tokens > 1
            ]
        ),
    )


def quantiles(values: Sequence[float]) -> dict[float, float]:
    """Of the values as they are: between two of them, in proportion."""
    if not values:
        return {}
    if len(values) == 1:
        return dict.fromkeys(QUANTILES, values[0])
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {each: cuts[round(each * 100) - 1] for each in QUANTILES}


def _ended(connection: Connection, model: str, state: JobState, now: float) -> Sequence[Any]:
    query = (
        select(
            jobs.c.attempt,
            jobs.c.wasted_tokens,
            jobs.c.created_at,
            jobs.c.started_at,
            jobs.c.first_token_at,
            jobs.c.finished_at,
            jobs.c.completion_tokens,
        )
        .where(
            jobs.c.model == model,
            jobs.c.state == literal_column(f"'{state}'"),
            jobs.c.finished_at > now - WINDOW_S,
        )
        .order_by(jobs.c.finished_at.desc())
        .limit(MAX_JOBS)
    )
    return connection.execute(query).all()
