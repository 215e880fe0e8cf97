"""This process's lease: whoever waits here is waited for only as long as it stands.

Jobs that end with their callers name the process. Should it be killed, the sweeper cancels them
when the lease has run out, see `jobs.waiting`.
"""

import asyncio
import contextlib
import secrets
import time
from functools import partial

from sqlalchemy import Connection

from api.errors import Overloaded, Unavailable
from api.sql import Sql
from jobs import waiting
from jobs.settings import Settings


class Lease:
    """Belongs to the event loop's thread."""

    def __init__(self, sql: Sql, settings: Settings) -> None:
        self._sql = sql
        self._lease_s, self._beat_s = settings.lease_s, settings.beat_s
        self._id = f"api_{secrets.token_hex(16)}"
        self._stands_until = float("-inf")  # by the monotonic clock

    @property
    def name(self) -> str | None:
        """For a job that is to end with its caller. None where the lease may not stand just now:
        such a job would be ended before its caller leaves."""
        return self._id if time.monotonic() < self._stands_until else None

    async def run(self) -> None:
        """Extend it every beat, for ever."""
        while True:
            asked_at = time.monotonic()
            with contextlib.suppress(Overloaded, Unavailable):
                await self._sql.urgent(partial(_extend, self._id, self._lease_s))
                # the next beat may be late, and a job takes a while to be written
                self._stands_until = asked_at + self._lease_s - self._beat_s
            await asyncio.sleep(self._beat_s)

    async def end(self) -> None:
        """What could not be cancelled here is left to the sweeper."""
        self._stands_until = float("-inf")
        with contextlib.suppress(Overloaded, Unavailable):
            await self._sql.urgent(partial(_end, self._id))


def _extend(process_id: str, lease_s: float, connection: Connection, now: float) -> None:
    waiting.extend(connection, process_id, now=now, lease_s=lease_s)


def _end(process_id: str, connection: Connection, now: float) -> None:
    waiting.end(connection, process_id)
