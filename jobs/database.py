"""Connections to the database of a deployment: SQLite or PostgreSQL, writing or reading, its clock.

Knows how to open, begin and commit on each of the two; every statement stands in its own module.

DatabaseURLError
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import (
    URL,
    Connection,
    Double,
    Select,
    create_engine,
    event,
    literal_column,
    make_url,
    select,
)
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    DisconnectionError,
    OperationalError,
    TimeoutError,
)
from sqlalchemy.pool import ConnectionPoolEntry

BUSY_TIMEOUT_S = 15.0
POOL_TIMEOUT_S = 15.0
PING_AFTER_S = 1.0  # a connection idle for so long is asked whether it is still one
_WRITES = "tokenmill_writes"
_USED_AT = "tokenmill_used_at"  # monotonic

_SQLITE_CLOCK = "(julianday('now') - 2440587.5) * 86400.0"
_POSTGRES_CLOCK = "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
# the disk may be mended or writable again, the writer may end, a descriptor may become free
_TRANSIENT_SQLITE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
    }
)
# 08: connection; 40: serialization failure, deadlock; 53: out of disk, memory or connections;
# 57: a statement cancelled by its timeout or by a person, a server going down or not yet up
_TRANSIENT_CLASSES = ("08", "40", "53", "57")
# read-only, as before a failover has ended; a frozen transaction's end; lock timeout; disk errors
_TRANSIENT_SQLSTATES = frozenset({"25006", "25P03", "25P04", "55P03", "58030"})
_HELD_UP = frozenset({"40001", "40P01", "55P03"})
_NOT_THERE = ("42P01", "42703")  # undefined table, undefined column
_DATABASE_DROPPED = "57P04"


class DatabaseURLError(ValueError):
    """A database URL that is neither SQLite's nor PostgreSQL's. Never repeats a password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One point of time by the database's clock and by this process's monotonic one."""

    now: float
    asked_at: float  # monotonic, before the database was asked

    def at(self, monotonic: float) -> float:
        """An earlier time by the database's clock: between the `now` of the claim it followed and
        this one, however long the answer took."""
        return self.now - (self.asked_at - monotonic)


class Database:
    """A pool of connections. Thread-safe; not to be carried across a fork or a spawn.

    Raises DatabaseURLError when made; SQLAlchemy's OperationalError where the server is away and
    TimeoutError where the pool stays empty (see `transient`).
    """

    def __init__(self, url: str, *, pool_size: int = 5) -> None:
        self.url = parse_url(url)
        self.sqlite = self.url.get_backend_name() == "sqlite"
        self._engine = create_engine(
            self.url,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_S,
            pool_recycle=-1 if self.sqlite else 300,
            connect_args={} if self.sqlite else _POSTGRES_CONNECT,
            hide_parameters=True,  # they are prompts and outputs, and errors end up in logs
        )
        clock = _SQLITE_CLOCK if self.sqlite else _POSTGRES_CLOCK
        self._clock: Select[float] = select(literal_column(clock, Double()))
        if self.sqlite:
            if self.url.database:
                Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
            event.listen(self._engine, "connect", _open_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)
            self._writing = self._engine.execution_options(**{_WRITES: True})
            self._reading = self._engine
        else:
            event.listen(self._engine, "checkin", _note_use)
            event.listen(self._engine, "checkout", _ping_idle)
            # a session only reads unless it says otherwise, in its BEGIN; what reads needs none
            self._writing = self._engine.execution_options(postgresql_readonly=False)
            self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A writing transaction: committed at the end, rolled back by an exception."""
        with self._writing.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """For statements that only read: on SQLite one transaction, which never waits for a writer;
        on PostgreSQL each sees what has been committed before it."""
        with self._reading.begin() as connection:
            yield connection

    def clock(self, connection: Connection) -> float:
        """Seconds since 1970 by the database: the only clock that decides anything."""
        return float(connection.execute(self._clock).scalar_one())

    def moment(self, connection: Connection) -> Moment:
        """The clock, and the caller's own beside it, read in a transaction that has begun."""
        asked_at = time.monotonic()
        return Moment(now=self.clock(connection), asked_at=asked_at)

    def dispose(self) -> None:
        self._engine.dispose()


def parse_url(url: str) -> URL:
    """A URL with our driver in it. Raises DatabaseURLError."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise DatabaseURLError("the database URL cannot be read") from None
    backend = parsed.drivername.split("+")[0]
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise DatabaseURLError("a SQLite URL must name a file: sqlite:///PATH")
        return parsed.set(drivername="sqlite+pysqlite")
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise DatabaseURLError(f"databases are sqlite and postgresql, got {backend!r}")


def misses_schema(error: DBAPIError) -> bool:
    """Whether a table or column is not there: nobody has migrated yet, or another version has."""
    sqlstate = getattr(error.orig, "sqlstate", None)
    if isinstance(error.orig, sqlite3.OperationalError):
        return str(error.orig).startswith(("no such table", "no such column", "table "))
    return sqlstate in _NOT_THERE


def transient(error: BaseException) -> bool:
    """Whether the same transaction may well succeed when tried again."""
    if isinstance(error, TimeoutError):  # the pool stayed empty
        return True
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    if isinstance(error.orig, sqlite3.OperationalError):
        return (getattr(error.orig, "sqlite_errorcode", 0) & 0xFF) in _TRANSIENT_SQLITE
    sqlstate = getattr(error.orig, "sqlstate", None)
    if sqlstate is None:
        return isinstance(error, OperationalError)  # psycopg: the server could not be reached
    if sqlstate == _DATABASE_DROPPED:
        return False
    return sqlstate in _TRANSIENT_SQLSTATES or sqlstate[:2] in _TRANSIENT_CLASSES


def held_up(error: BaseException | None) -> bool:
    """Whether another transaction was in the way, and nothing has been done."""
    return str(getattr(getattr(error, "orig", None), "sqlstate", None)) in _HELD_UP


def trouble(error: BaseException) -> str:
    """What a transient error is about, without the statement or the values that it quotes."""
    cause = getattr(error, "orig", None)
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    sqlstate = str(getattr(cause, "sqlstate", None))
    if code == sqlite3.SQLITE_FULL or sqlstate == "53100":
        return "the database's disk is full"
    if code == sqlite3.SQLITE_IOERR or sqlstate == "58030":
        return "the database's disk is full or fails"  # SQLite says the one or the other
    if code == sqlite3.SQLITE_CANTOPEN:
        return "the database's file cannot be opened"
    if code == sqlite3.SQLITE_READONLY or sqlstate == "25006":
        return "the database is read-only"
    if sqlstate == "57014":
        return "the database took too long, or was told to stop"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or sqlstate == "55P03":
        return "the database is busy with another writer"
    if sqlstate.startswith("53"):
        return "the database has no memory or no connection left"
    return "the database does not answer"


def error_kind(error: Exception) -> str:
    """The kind of an error, without the values it quotes: those may be a prompt or an output."""
    return type(error.orig if isinstance(error, DBAPIError) and error.orig else error).__name__


# a half-open connection is noticed in about 15 s; a frozen process loses its locks after 30 s, else
# SKIP LOCKED would pass over its rows for ever
_POSTGRES_CONNECT: dict[str, Any] = {
    "connect_timeout": 5,
    "application_name": "tokenmill",
    "keepalives_idle": 5,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "options": "-c default_transaction_read_only=on -c idle_in_transaction_session_timeout=30000"
    " -c lock_timeout=10000 -c statement_timeout=30000",
}


def _note_use(_connection: object, record: ConnectionPoolEntry) -> None:
    record.info[_USED_AT] = time.monotonic()


def _ping_idle(connection: Any, record: ConnectionPoolEntry, _fairy: object) -> None:
    """Asked of each connection at each use, it is a round trip; a server that went away meanwhile
    did so while none was in use, or who used it has heard."""
    used_at = record.info.get(_USED_AT)  # None: it has just been made
    if used_at is None or time.monotonic() - used_at < PING_AFTER_S:
        return
    try:
        connection.execute("SELECT 1")
        connection.rollback()
    except psycopg.Error:
        raise DisconnectionError from None


def _open_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    # the driver's own BEGIN is deferred: a transaction that reads first and writes later then fails
    # at once with BUSY, whatever the timeout. We begin by ourselves, see below
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
    if cursor.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")  # NORMAL may lose the last commits at power loss
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
