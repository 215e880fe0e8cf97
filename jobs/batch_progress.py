"""How far a batch is: its rows and tokens, their rate, and when it will be done.

All of it is counted from its rows when asked, by one look into an index: nothing is kept that could
differ from them. What is left is guessed from what has ended: each row is expected to generate as
much of its limit as others did of theirs. What runs now has done as much in its seat as others did
in theirs in that time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, case, func, select

from jobs.batch_record import BatchRecord, BatchState, StopReason
from jobs.lifecycle import TERMINAL, ErrorCode, JobState
from jobs.models import jobs, workers

MIN_ENDED = 10  # rows, before anything is said of the rest
MIN_RATED = 20  # rows that have ended, before their errors are a rate
SURE = 0.05  # of the estimate: what it is off by however many rows have ended
SPREAD = 1.2  # of rows' costs among each other, in their mean: 90 % lie within


@dataclass(frozen=True, slots=True)
class RowsIn:
    """Of a batch's rows in one state."""

    num: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    limits: int = 0  # what those with a limit may generate at most
    num_limited: int = 0
    num_copies: int = 0  # of them: took another's result, and cost nothing
    saved_tokens: int = 0  # so many tokens of others

    @property
    def num_run(self) -> int:
        return self.num - self.num_copies


@dataclass(frozen=True, slots=True)
class Eta:
    """Seconds until the last row ends, and between what bounds that is nine times of ten."""

    s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    rows: Mapping[JobState, RowsIn]
    failures: Mapping[str, int] = field(default_factory=dict)  # by code
    elapsed_s: float | None = None  # since its first row could run, without pauses
    tokens_per_s: float | None = None  # generated, of rows that succeeded
    eta: Eta | None = None

    def num(self, *states: JobState) -> int:
        return sum(self.rows[state].num for state in states if state in self.rows)

    @property
    def num_ended(self) -> int:
        return self.num(*TERMINAL)

    @property
    def tokens(self) -> dict[str, int]:
        names = ("prompt_tokens", "cached_tokens", "completion_tokens")
        return {
            name: sum(getattr(self.rows[state], name) for state in TERMINAL if state in self.rows)
            for name in names
        }


def rows_in(connection: Connection, batch_id: str, *, tenant: str) -> dict[JobState, RowsIn]:
    """Of each state; by an index alone."""
    limited = case((jobs.c.max_tokens > 0, 1), else_=0)
    sums = (jobs.c.prompt_tokens, jobs.c.cached_tokens, jobs.c.completion_tokens, jobs.c.max_tokens)
    query = (
        select(jobs.c.state, func.count(), *map(func.sum, sums), func.sum(limited))
        .where(
            jobs.c.batch_id == batch_id, jobs.c.tenant_id == tenant, jobs.c.row_number.is_not(None)
        )
        .group_by(jobs.c.state)
    )
    return {
        JobState(state): RowsIn(*map(int, numbers)) for state, *numbers in connection.execute(query)
    }


def with_copies(
    connection: Connection, batch: BatchRecord, rows: Mapping[JobState, RowsIn]
) -> dict[JobState, RowsIn]:
    """Beside them how many are copies; by an index alone."""
    query = (
        select(jobs.c.state, func.count(), func.sum(jobs.c.saved_tokens))
        .where(
            jobs.c.batch_id == batch.id,
            jobs.c.tenant_id == batch.tenant_id,
            jobs.c.saved_tokens.is_not(None),
        )
        .group_by(jobs.c.state)
    )
    found = {state: (num, int(saved)) for state, num, saved in connection.execute(query)}
    return {
        state: replace(some, num_copies=found[state][0], saved_tokens=found[state][1])
        if state in found
        else some
        for state, some in rows.items()
    }


def failures(connection: Connection, batch_id: str, *, tenant: str) -> dict[str, int]:
    """How many rows failed with each code."""
    kinds = [
        func.sum(case((jobs.c.error.endswith(f'"code":"{code}"}}', autoescape=True), 1), else_=0))
        for code in ErrorCode
    ]
    query = select(*kinds).where(
        jobs.c.batch_id == batch_id,
        jobs.c.tenant_id == tenant,
        jobs.c.row_number.is_not(None),
        jobs.c.state == JobState.FAILED,
    )
    found = connection.execute(query).one()
    return {str(code): int(num) for code, num in zip(ErrorCode, found, strict=True) if num}


def progress(connection: Connection, batch: BatchRecord, *, now: float) -> Progress:
    """Of a batch that has not been closed."""
    tenant = batch.tenant_id
    rows = rows_in(connection, batch.id, tenant=tenant) if batch.num_inserted else {}
    if batch.dedupe:
        rows = with_copies(connection, batch, rows)
    found = Progress(rows=rows)
    if found.num(JobState.FAILED):
        found = Progress(rows=rows, failures=failures(connection, batch.id, tenant=tenant))
    if batch.in_progress_at is None:
        return found
    elapsed_s = elapsed(batch, now)
    seats, running_s = 0, 0.0
    if batch.state == BatchState.IN_PROGRESS and found.num(JobState.RUNNING):
        query = select(func.sum(workers.c.max_num_seqs)).where(
            workers.c.model == batch.model, workers.c.lease_until > now
        )
        seats = int(connection.scalar(query) or 0)
        running_s = _running_s(connection, batch, now)
    done = rows.get(JobState.SUCCEEDED, RowsIn()).completion_tokens
    return Progress(
        rows=rows,
        failures=found.failures,
        elapsed_s=elapsed_s,
        tokens_per_s=done / elapsed_s if elapsed_s > 0 else None,
        eta=estimate(batch, rows, elapsed_s, seats, running_s),
    )


def _running_s(connection: Connection, batch: BatchRecord, now: float) -> float:
    """Since their first tokens, of all rows that run, as far as a beat has told of it."""
    query = select(func.sum(now - jobs.c.first_token_at)).where(
        jobs.c.batch_id == batch.id,
        jobs.c.tenant_id == batch.tenant_id,
        jobs.c.row_number.is_not(None),
        jobs.c.state == JobState.RUNNING,
    )
    return float(connection.scalar(query) or 0.0)


def elapsed(batch: BatchRecord, now: float) -> float:
    assert batch.in_progress_at is not None
    until = batch.finalizing_at or batch.cancelling_at or batch.paused_at or now
    return max(0.0, until - batch.in_progress_at - batch.paused_s)


def estimate(
    batch: BatchRecord,
    rows: Mapping[JobState, RowsIn],
    elapsed_s: float,
    seats: int,  # of all engines
    running_s: float,  # for how long rows that run have done so, together
) -> Eta | None:
    """None where nothing can be said yet, or nothing runs. Pure.

    A row costs the tokens it generates, and one for the work that each has beside.
    """
    if batch.state != BatchState.IN_PROGRESS or batch.paused_at is not None:
        return None
    done = rows.get(JobState.SUCCEEDED, RowsIn())
    failed = rows.get(JobState.FAILED, RowsIn())
    if done.num_run < MIN_ENDED or elapsed_s <= 0:
        return None
    mean = done.completion_tokens / done.num_run
    share = done.completion_tokens / done.limits if done.limits else 1.0

    def cost(some: RowsIn) -> float:
        return some.num_run + share * some.limits + mean * (some.num_run - some.num_limited)

    running, queued = rows.get(JobState.RUNNING, RowsIn()), rows.get(JobState.QUEUED, RowsIn())
    spent = float(done.num_run + done.completion_tokens + failed.num_run)
    under_way, seats_s = 0.0, elapsed_s * min(seats, running.num)
    if 0 < running_s < seats_s:
        under_way = min(spent * running_s / (seats_s - running_s), cost(running))
    spent += under_way
    num_run = sum(each.num_run for each in rows.values())
    not_there = max(0, batch.num_rows - batch.num_same - num_run)
    num_seen = running.num + queued.num + done.num_run
    average = (cost(running) + cost(queued) + cost(done)) / num_seen
    left = cost(running) + cost(queued) + not_there * average - under_way
    eta_s = left * elapsed_s / spent
    off = SURE + SPREAD / math.sqrt(done.num_run)
    return Eta(eta_s, eta_s * max(0.0, 1 - off), eta_s * (1 + off))


def limit_reached(batch: BatchRecord, found: Progress) -> StopReason | None:
    """Pure."""
    tokens = found.tokens
    used = tokens["prompt_tokens"] + tokens["completion_tokens"]
    if batch.token_budget is not None and used >= batch.token_budget:
        return StopReason.TOKEN_BUDGET
    num_failed, num_ended = found.num(JobState.FAILED), found.num_ended
    if batch.max_error_rate is not None and num_ended >= MIN_RATED:
        return StopReason.ERROR_RATE if num_failed > batch.max_error_rate * num_ended else None
    return None


def progress_object(batch: BatchRecord, found: Progress) -> dict[str, Any]:
    """As the batch object has it."""
    states = (JobState.QUEUED, JobState.RUNNING, *sorted(TERMINAL))
    eta = found.eta
    return {
        "rows": {
            "total": batch.num_rows,
            "waiting": batch.num_rows - sum(each.num for each in found.rows.values()),
            **{str(state): found.num(state) for state in states},
        },
        "tokens": found.tokens,
        "saved": {
            "rows": sum(each.num_copies for each in found.rows.values()),
            "tokens": sum(each.saved_tokens for each in found.rows.values()),
        },
        "failures": dict(found.failures),
        "elapsed_s": _rounded(found.elapsed_s),
        "tokens_per_s": _rounded(found.tokens_per_s),
        "eta_s": None if eta is None else _rounded(eta.s),
        "eta_low_s": None if eta is None else _rounded(eta.low_s),
        "eta_high_s": None if eta is None else _rounded(eta.high_s),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
