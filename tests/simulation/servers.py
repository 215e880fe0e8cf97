"""The servers of a simulated deployment: one SQLite in memory, one Redis made of lists.

Statements are the product's own, on a real SQLite. What the network and crashes do to them happens
here: a transaction fails before it begins, its commit is lost, or is in though nobody hears of it;
a process dies in its midst or right behind it; a message is lost, doubled, late.
"""

import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import StaticPool

from jobs.database import Database
from jobs.models import Base
from jobs.runway import Lane, Runway, RunwayDown

VISIBILITY_S = 2.0  # after which an unacknowledged message comes back


def say_nothing() -> None:
    """Of what workers log: thousands of deployments fail as they are meant to."""
    for name in ("worker", "jobs"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


class Killed(BaseException):
    """The process whose action this was has been killed in the midst of it."""


def connection_lost() -> OperationalError:
    return OperationalError("", {}, sqlite3.OperationalError(), connection_invalidated=True)


def open_memory() -> Connection:
    """A migrated SQLite in memory; one for all simulations of a process."""
    engine = create_engine("sqlite://", poolclass=StaticPool)

    @event.listens_for(engine, "connect")
    def _(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        driver.execute("BEGIN IMMEDIATE")

    with engine.begin() as connection:
        Base.metadata.create_all(connection)
    return engine.connect()


class SimDatabase(Database):
    """One process's way to the database."""

    def __init__(self, world: Any, process: Any) -> None:
        self.sqlite = True
        self.asked_at = 0.0  # when the clock was last read, in true time
        self._world = world
        self._process = process

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        self._world.before_transaction(self._process)
        connection: Connection = self._world.connection
        transaction = connection.begin()
        try:
            yield connection
            fate = self._world.fate_of_commit()
            if fate == "lost":
                raise connection_lost()
            if fate == "killed before":
                raise Killed
        except BaseException:
            transaction.rollback()
            raise
        transaction.commit()
        self._world.committed(self._process)
        if fate == "in doubt":
            raise connection_lost()
        if fate == "killed behind":
            raise Killed

    @contextmanager
    def read(self) -> Iterator[Connection]:
        self._world.before_transaction(self._process)
        transaction = self._world.connection.begin()
        try:
            yield self._world.connection
        finally:
            transaction.rollback()

    def clock(self, connection: Connection) -> float:
        self.asked_at = self._world.now
        return float(self._world.now)

    def dispose(self) -> None:
        """There is nothing to close."""


class Messages:
    """A queue in Redis: what waits, and what has been taken and not been acknowledged."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.down = False
        # of the foreground and of the background: each message's ids
        self.lanes: dict[bool, list[list[str]]] = {False: [], True: []}
        self.unacknowledged: dict[int, tuple[bool, list[str], float]] = {}
        self._next_tag = 0

    @property
    def waiting(self) -> list[list[str]]:
        return self.lanes[False] + self.lanes[True]

    def publish(self, background: bool, ids: list[str]) -> None:
        """Raises RunwayDown, with the message in or not."""
        if self.down:
            raise RunwayDown("down")
        chance = self._world.chance
        if chance(0.05):
            return  # into a connection that is dead already
        self.lanes[background] += [ids] * (2 if chance(0.05) else 1)
        if chance(0.05):
            raise RunwayDown("the reply was lost")

    def there(self, background: bool) -> bool:
        """Whether one could be taken; those that nobody acknowledged are back by then."""
        if self.down:
            return False
        for tag, (lane, ids, taken_at) in list(self.unacknowledged.items()):
            if self._world.now > taken_at + VISIBILITY_S:
                del self.unacknowledged[tag]
                self.lanes[lane].append(ids)
        return bool(self.lanes[False]) or (background and bool(self.lanes[True]))

    def take(self, background: bool) -> tuple[int, list[str]] | None:
        """The next message and its tag, of the background's last, if those are wanted; kombu may
        lose it between two commands."""
        if not self.there(background):
            return None
        lane = not self.lanes[False]
        late = len(self.lanes[lane]) > 1 and self._world.chance(0.1)
        ids = self.lanes[lane].pop(1 if late else 0)
        if self._world.chance(0.03):
            return None
        self._next_tag += 1
        self.unacknowledged[self._next_tag] = (lane, ids, self._world.now)
        return self._next_tag, ids

    def acknowledge(self, tag: int) -> None:
        if not self.down:
            self.unacknowledged.pop(tag, None)

    def flush(self) -> None:
        self.lanes = {False: [], True: []}
        self.unacknowledged.clear()


class SimRunway(Runway):
    """The product's refill, on a queue that is not Redis."""

    def __init__(self, settings: Any, messages: Messages) -> None:
        super().__init__(settings, app=None)  # type: ignore[arg-type]
        self._messages = messages

    def lengths(self) -> dict[Lane, int]:
        if self._messages.down:
            raise RunwayDown("down")
        return {lane: len(self._messages.lanes[lane.background]) for lane in self._lanes}

    def _publish(
        self, lane: Lane, messages: Sequence[list[str]], trace_parents: object = None
    ) -> None:
        for ids in messages:
            self._messages.publish(lane.background, ids)


class Silence:
    """In place of a publisher of hints: every hint is lost."""

    def __init__(self, *_: object) -> None:
        pass

    def publish(self, *_: object) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to close."""
