"""What becomes of a job whose attempt has come to nothing: queued again, or failed, and why.

Parts of the statements of claims, finishing and sweep, which say whose attempts these are.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Double, Row, case, cast, literal, null, or_

from jobs.attempts import Closed, Outcome
from jobs.lifecycle import NEXT, TERMINAL, ErrorCode, JobState, error_object
from jobs.models import jobs
from jobs.rows import decode, encode

Time = ColumnElement[float]  # a bound parameter: these statements are made once

GROWTH = 4.0
SPENT = jobs.c.attempt >= jobs.c.max_attempts

# of a job taken from its holder, or ended over it, for the record of its attempt
TAKEN = tuple(
    jobs.c[name] for name in ("id", "fence", "state", "model", "error", "checkpoint_tokens")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long a job waits after a failure of its own: each time four times as long, up to a bound.

    Less up to half of it, by the job's age: jobs that failed together do not return together.
    """

    base_s: float = 1.0
    most_s: float = 60.0

    def until(self, num_failures: ColumnElement[int], now: Time) -> ColumnElement[float]:
        """When it may be tried again, by the number of times it failed."""
        waits_s = [self.base_s]
        while 0 < waits_s[-1] < self.most_s:
            waits_s.append(waits_s[-1] * GROWTH)
        last = min(waits_s.pop(), self.most_s)
        known = [(num_failures <= i, wait_s) for i, wait_s in enumerate(waits_s, start=1)]
        wait: ColumnElement[float] = case(*known, else_=last) if known else literal(last)
        # a microsecond lies between two jobs of one submission
        spread = (cast(jobs.c.created_at * 1e6, BigInteger) + 37 * jobs.c.fence) % 101
        return now + wait * (1.0 - cast(spread, Double) / 202.0)


def may_retry(code: ErrorCode) -> ColumnElement[bool]:
    """Whether the job's policy has a failure of this kind tried again."""
    return (" " + jobs.c.retry_on + " ").contains(f" {code} ")


def ending(
    *endings: tuple[Any, ErrorCode, str],
    now: Time,
    not_before: ColumnElement[float] | None = None,  # of one that is queued; None: at once
) -> dict[str, Any]:
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
        "not_before": None if not_before is None else case((fails, null()), else_=not_before),
        "started_at": case((fails, jobs.c.started_at), else_=null()),
        "finished_at": case((fails, now), else_=null()),
        "finish_reason": case((fails, "error"), else_=null()),
        "checkpoint": case((fails, null()), else_=jobs.c.checkpoint),
        "wasted_tokens": jobs.c.wasted_tokens + case((fails, jobs.c.checkpoint_tokens), else_=0),
    }


def after_failure(backoff: Backoff, now: Time) -> dict[str, Any]:
    """Columns of a job that failed by itself and is tried again."""
    return {
        "state": JobState.QUEUED,
        "started_at": None,
        "not_before": backoff.until(jobs.c.attempt, now),
    }


def after_crash(backoff: Backoff, now: Time, *, max_crashes: int) -> dict[str, Any]:
    """Columns of a job whose engine process died."""
    num_crashes = jobs.c.crash_count + 1
    return {
        "crash_count": num_crashes,
        **ending(
            (
                ~may_retry(ErrorCode.ENGINE_CRASH),
                ErrorCode.ENGINE_CRASH,
                "the engine process died with this job, which was not to be tried again",
            ),
            (
                num_crashes >= max_crashes,
                ErrorCode.POISONED,
                "the engine process died with this job too often",
            ),
            (SPENT, ErrorCode.MAX_ATTEMPTS, "the last attempt ended with the engine process"),
            now=now,
            not_before=backoff.until(num_crashes, now),
        ),
    }


def after_lapse(now: Time) -> dict[str, Any]:
    """Columns of a job whose worker's lease ran out. It is queued at once: it did nothing wrong."""
    return ending(
        (
            ~may_retry(ErrorCode.WORKER_LOST),
            ErrorCode.WORKER_LOST,
            "its worker was lost with this job, which was not to be tried again",
        ),
        (SPENT, ErrorCode.MAX_ATTEMPTS, "the last attempt ended with its worker"),
        now=now,
    )


def due(now: Time) -> ColumnElement[bool]:
    """Of queued jobs, those that do not wait to be tried again."""
    return or_(jobs.c.not_before.is_(None), jobs.c.not_before <= now)


def taken(row: Row[Any], outcome: Outcome, code: ErrorCode | None = None) -> Closed:
    """The end of an attempt whose job has gone to the next fence, as TAKEN has it."""
    ended = JobState(row.state) in TERMINAL
    error = decode(row.error) or {}
    return Closed(
        job_id=row.id,
        fence=row.fence - 1,
        outcome=outcome,
        error_code=error.get("code") if code is None else str(code),
        kept_tokens=0 if ended else row.checkpoint_tokens,
        wasted_tokens=row.checkpoint_tokens if ended else 0,
        stored_tokens=row.checkpoint_tokens,
    )
