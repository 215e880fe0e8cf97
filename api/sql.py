"""Runs the statements of `jobs` in threads, and says 503 when the database does not answer.

A commit whose answer was lost is reported the same way: nothing is claimed to be accepted that may
not be, and a client that repeats its call with its Idempotency-Key finds what the commit did.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, overload

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, TimeoutError

from api.errors import Unavailable
from api.pool import Pool
from jobs.database import Database, misses_schema, transient, trouble
from jobs.store import WrongSchema

logger = logging.getLogger(__name__)

R = TypeVar("R")
S = TypeVar("S")

CLOCK_KEPT_S = 1.0


class Sql:
    """`statement` takes the transaction's connection and the database's time, in epoch seconds."""

    def __init__(self, database: Database, *, reads: Pool, writes: Pool, checks: Pool) -> None:
        self.database = database
        self.reads = reads
        self.writes = writes
        self.checks = checks
        self._trouble: tuple[float, str] | None = None  # of the last write: monotonic time, what
        self._clock = (float("-inf"), 0.0)  # monotonic time, and the database's then

    async def read(self, statement: Callable[[Connection, float], R]) -> R:
        return await self.reads.run(self._read, statement)

    async def check(self, statement: Callable[[Connection, float], R]) -> R:
        """A read for readiness, behind no other reads."""
        return await self.checks.run(self._read, statement)

    async def urgent(self, statement: Callable[[Connection, float], R]) -> R:
        """A small write, behind no other calls' writes."""
        return await self.checks.run(self._write, statement)

    @overload
    async def write(self, statement: Callable[[Connection, float], R]) -> R: ...

    @overload
    async def write(
        self,
        statement: Callable[[Connection, float], R],
        then: Callable[[R, Connection | None, float], S],
    ) -> S: ...

    async def write(
        self,
        statement: Callable[[Connection, float], R],
        then: Callable[[R, Connection | None, float], S] | None = None,
    ) -> R | S:
        """`then` reads after the commit, in the same thread; without a connection where the
        database has gone away meanwhile."""
        if then is None:
            return await self.writes.run(self._write, statement)
        return await self.writes.run(self._write_then, statement, then)

    def write_trouble(self, within_s: float) -> str | None:
        """What kept the last write from being done, if that was so lately; None when it was done.

        A database may answer every question and refuse every write.
        """
        trouble = self._trouble
        if trouble is None or time.monotonic() - trouble[0] > within_s:
            return None
        return trouble[1]

    def close(self) -> None:
        for pool in (self.reads, self.writes, self.checks):
            pool.close()
        self.database.dispose()

    def _read(self, statement: Callable[[Connection, float], R]) -> R:
        with _away_is_503(), self.database.read() as connection:
            return statement(connection, self._about_now(connection))

    def _about_now(self, connection: Connection) -> float:
        """The database's time, for who only reads: asked for once a second."""
        asked_at, now = self._clock
        elapsed = time.monotonic() - asked_at
        if elapsed < CLOCK_KEPT_S:
            return now + elapsed
        moment = self.database.moment(connection)
        self._clock = (moment.asked_at, moment.now)
        return moment.now

    def _write_then(
        self,
        statement: Callable[[Connection, float], R],
        then: Callable[[R, Connection | None, float], S],
    ) -> S:
        result = self._write(statement)
        try:
            return self._read(lambda connection, now: then(result, connection, now))
        except Unavailable:
            pass
        except Exception:  # what has been committed must not look as if it had not
            logger.exception("reading after a commit failed")
        return then(result, None, 0.0)

    def _write(self, statement: Callable[[Connection, float], R]) -> R:
        try:
            with _away_is_503(), self.database.begin() as connection:
                result = statement(connection, self.database.clock(connection))
        except Unavailable as error:
            self._trouble = (time.monotonic(), error.message)
            raise
        self._trouble = None
        return result


@contextmanager
def _away_is_503() -> Iterator[None]:
    """A statement that the database refuses for its content stays what it is: a fault of ours."""
    try:
        yield
    except (DBAPIError, TimeoutError) as error:
        if isinstance(error, DBAPIError) and misses_schema(error):
            raise Unavailable(str(WrongSchema()), code="database_unavailable") from error
        if not transient(error):
            raise
        raise Unavailable(trouble(error), code="database_unavailable") from error
