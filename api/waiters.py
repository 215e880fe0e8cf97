"""Who waits for which job's end, and what wakes them.

A waiter is registered before the job's row is read, so an end between the two is not missed. It is
woken by the end itself, published after the commit and heard by one Redis subscription for the
whole process. Redis may be away and its messages may be lost, so one statement a second also asks
which of the jobs waited for have ended.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from sqlalchemy import Connection

from api.errors import Overloaded, Unavailable
from api.sql import Sql
from jobs import events, store
from jobs.settings import Settings

REREAD_S = 1.0


class Waiters:
    """Belongs to the event loop's thread."""

    def __init__(self, max_waiters: int, until_next_s: Callable[[], float] = lambda: 1.0) -> None:
        """`until_next_s`: about how long until a job ends, and so makes room for a waiter."""
        self.max_waiters = max_waiters
        self._until_next_s = until_next_s
        self.num_waiters = 0
        self.closing = False
        self._events: dict[str, set[asyncio.Event]] = {}

    @contextlib.contextmanager
    def register(self, job_id: str, event: asyncio.Event | None = None) -> Iterator[asyncio.Event]:
        """An event set at the job's end, in doubt, and at shutdown. Raises Overloaded."""
        self.check_room()
        event = event or asyncio.Event()
        if self.closing:
            event.set()
        self._events.setdefault(job_id, set()).add(event)
        self.num_waiters += 1
        try:
            yield event
        finally:
            self.num_waiters -= 1
            events = self._events[job_id]
            events.remove(event)
            if not events:
                del self._events[job_id]

    def check_room(self) -> None:
        if self.num_waiters >= self.max_waiters:
            raise Overloaded(
                f"more than {self.max_waiters} clients wait",
                code="overloaded",
                retry_after_s=self._until_next_s(),
            )

    def wake(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            for event in self._events.get(job_id, ()):
                event.set()

    def wake_all(self) -> None:
        self.wake(list(self._events))

    def close(self) -> None:
        """Let everyone answer with what the row says now; nobody waits any more."""
        self.closing = True
        self.wake_all()

    async def sleep(self, event: asyncio.Event, seconds: float) -> None:
        """Until the event, or for so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await event.wait()
        if not self.closing:
            event.clear()

    async def listen(self, settings: Settings) -> None:
        """Wake by what Redis says, for ever."""
        async for job_ids in events.listen(settings, events.Channel.ENDED):
            if job_ids:
                self.wake(job_ids)
            else:
                self.wake_all()  # newly connected: something may have been missed

    async def reread(self, sql: Sql) -> None:
        """Wake by what the rows say, for ever."""
        while True:
            await asyncio.sleep(REREAD_S)
            if self._events:
                with contextlib.suppress(Overloaded, Unavailable):
                    self.wake(await sql.read(partial(_ended, list(self._events))))


def _ended(job_ids: list[str], connection: Connection, now: float) -> set[str]:
    return store.ended(connection, job_ids)
