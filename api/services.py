"""What the routes stand on, wired once when the process starts."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError
from starlette.requests import Request

from api.acceptance import Acceptance
from api.body import BodyReader
from api.door import Door
from api.feed import Feed
from api.hints import Hints
from api.intake import Intake
from api.keyring import Keyring
from api.lease import Lease
from api.pool import Pool
from api.present import Presenter
from api.sql import Sql
from api.upload import Uploads
from api.waiters import Waiters
from jobs.file_store import FileStore
from jobs.keys import Principal
from jobs.settings import Settings
from jobs.tracing import Tracing

HINTS_GRACE_S = 1.0
TASKS_GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Belongs to the event loop's thread, except where a part says otherwise."""

    settings: Settings
    door: Door
    waiters: Waiters
    hints: Hints
    bodies: BodyReader
    sql: Sql
    lease: Lease
    presenter: Presenter
    acceptance: Acceptance
    intake: Intake
    keyring: Keyring
    cpu: Pool  # parsing and tokenizing
    disk: Pool  # reading and writing files
    files: FileStore
    uploads: Uploads
    redis: redis.asyncio.Redis  # for health only
    feed: Feed
    tracing: Tracing | None  # None: nobody asked for traces
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it, whether the call that asked for it goes on or not."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def close(self) -> None:
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=TASKS_GRACE_S)
        await self.lease.end()
        self.hints.stop(HINTS_GRACE_S)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        self.cpu.close()
        self.disk.close()
        self.sql.close()
        await self.feed.close()
        with suppress(RedisError, OSError):
            await self.redis.aclose()


def services_of(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


def tenant_of(request: Request) -> str:
    """Whose call this is, as `api.guard` has found out: every statement of a route names it."""
    return principal_of(request).tenant


def principal_of(request: Request) -> Principal:
    principal = request.scope["principal"]
    assert isinstance(principal, Principal)
    return principal
