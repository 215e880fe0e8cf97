"""Runs the statements of `jobs` in threads, and says 503 when the database does not answer.

A commit whose answer was lost is reported the same way: nothing is claimed to be accepted that may
not be, and a client that repeats its call with its Idempotency-Key finds what the commit did.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, TimeoutError

from api.errors import Unavailable
from api.pool import Pool
from jobs.database import Database, transient

R = TypeVar("R")


class Sql:
    """`statement` takes the transaction's connection and the database's time, in epoch seconds."""

    def __init__(self, database: Database, pool: Pool) -> None:
        self.database = database
        self.pool = pool

    async def read(self, statement: Callable[[Connection, float], R]) -> R:
        return await self.pool.run(self._read, statement)

    async def write(self, statement: Callable[[Connection, float], R]) -> R:
        return await self.pool.run(self._write, statement)

    def close(self) -> None:
        self.pool.close()
        self.database.dispose()

    def _read(self, statement: Callable[[Connection, float], R]) -> R:
        with _away_is_503(), self.database.read() as connection:
            return statement(connection, self.database.clock(connection))

    def _write(self, statement: Callable[[Connection, float], R]) -> R:
        with _away_is_503(), self.database.begin() as connection:
            return statement(connection, self.database.clock(connection))


@contextmanager
def _away_is_503() -> Iterator[None]:
    """A statement that the database refuses for its content stays what it is: a fault of ours."""
    try:
        yield
    except (DBAPIError, TimeoutError) as error:
        if not transient(error):
            raise
        raise Unavailable("the database does not answer", code="database_unavailable") from error
