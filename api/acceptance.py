"""Accepts jobs: the calls that come while one transaction is under way share the next.

A reply comes after the commit of the transaction that its jobs are in. What one call has wrong (its
key's other body, its tenant's quota) is its own reply; what the database refuses of a transaction
fails all that are in it, and then each is tried alone. A call of many jobs goes alone, so that
small ones do not wait for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection

from api.errors import Unavailable
from api.present import Presenter
from api.sql import Sql
from api.together import Together
from jobs import store, submissions
from jobs.database import held_up
from jobs.quotas import QuotaExceeded
from jobs.records import JobRecord
from jobs.submissions import Submission

MAX_TOGETHER = 128  # calls in one transaction
ALONE_JOBS = 16  # a call of more has a transaction of its own
ALONE_TOKENS = 4096  # of prompts
MAX_WAITING = 4096
TIMEOUT_S = 20.0  # the database's own limits, of about 15 s, come first


@dataclass(frozen=True, slots=True)
class Accepted:
    records: Sequence[JobRecord]
    replayed: bool
    objects: Sequence[dict[str, Any]] | None  # with a forecast; None where there is none


class Acceptance:
    """Belongs to the event loop's thread."""

    def __init__(self, sql: Sql, presenter: Presenter, *, ttl_s: float) -> None:
        self._sql = sql
        self._presenter = presenter
        self._ttl_s = ttl_s  # of an Idempotency-Key
        self._together: Together[Submission, Accepted] = Together(
            "the database's writes",
            self._accept,
            max_items=MAX_TOGETHER,
            max_waiting=MAX_WAITING,
            timeout_s=TIMEOUT_S,
        )

    async def __call__(self, submission: Submission) -> Accepted:
        """Raises IdempotencyConflict, QuotaExceeded, Overloaded, Unavailable."""
        tokens = sum(job.prompt_tokens for job in submission.new_jobs)
        if len(submission.new_jobs) <= ALONE_JOBS and tokens <= ALONE_TOKENS:
            return await self._together(submission, submission.name)
        [outcome] = await self._write([submission])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _accept(self, group: Sequence[Submission]) -> Sequence[Accepted | Exception]:
        """What becomes of each. One that fails does not take others with it."""
        try:
            return await self._write(group)
        except Unavailable as error:
            # the database is away, or the commit's answer was lost: to try again is the callers'
            if len(group) == 1 or not held_up(error.__cause__):
                raise
        except Exception:
            if len(group) == 1:
                raise
        return [await self._alone(each) for each in group]

    async def _alone(self, submission: Submission) -> Accepted | Exception:
        try:
            [outcome] = await self._write([submission])
        except Exception as error:  # noqa: BLE001 - its caller raises it
            return error
        return outcome

    async def _write(self, group: Sequence[Submission]) -> list[Accepted | Exception]:
        return await self._sql.write(partial(self._submit, group), then=self._shown)

    def _submit(
        self, group: Sequence[Submission], connection: Connection, now: float
    ) -> list[submissions.Outcome]:
        return submissions.submit_together(connection, group, now=now, ttl_s=self._ttl_s)

    def _shown(
        self, outcomes: list[submissions.Outcome], connection: Connection | None, now: float
    ) -> list[Accepted | Exception]:
        """After the commit, since nobody should wait for a forecast to write; a database that went
        away in between takes nothing back: there is no forecast then."""
        submitted = [each for each in outcomes if isinstance(each, store.Submitted)]
        records = [record for each in submitted for record in each.records]
        objects: dict[str, dict[str, Any]] | None = None
        if connection is not None:
            shown = self._presenter.objects(records, connection, now)
            objects = {each["id"]: each for each in shown}
        return [_accepted(each, objects) for each in outcomes]


def _accepted(
    outcome: submissions.Outcome, objects: dict[str, dict[str, Any]] | None
) -> Accepted | Exception:
    if isinstance(outcome, QuotaExceeded | store.IdempotencyConflict):
        return outcome
    shown = None if objects is None else [objects[each.id] for each in outcome.records]
    return Accepted(outcome.records, outcome.replayed, shown)
