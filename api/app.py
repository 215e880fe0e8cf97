"""The HTTP application: wires what the routes stand on, and the routes.

Knows jobs and the door check; knows nothing of workers and engines, and never loads torch.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.applications import Starlette

from api import errors
from api.acceptance import Acceptance
from api.body import BodyReader
from api.door import Door
from api.feed import Feed
from api.guard import Guard
from api.hints import Hints
from api.intake import Intake
from api.keyring import Keyring
from api.lease import Lease
from api.middleware import Edge
from api.pool import Pool
from api.present import Presenter
from api.routes import (
    admin,
    batch_rows,
    batches,
    completions,
    dead,
    document,
    events,
    files,
    health,
    jobs,
    metrics,
    models,
    responses,
    stored,
    submit,
    webhooks,
)
from api.services import Services
from api.sql import Sql
from api.traces import Traced
from api.upload import Uploads
from api.waiters import Waiters
from jobs.celery_app import make_app
from jobs.database import Database
from jobs.file_store import FileStore
from jobs.redis_client import connect_async
from jobs.settings import Settings
from jobs.tracing import open_tracing

logger = logging.getLogger(__name__)

ROUTES = (
    submit,
    jobs,
    events,
    completions,
    stored,
    responses,
    files,
    batches,
    batch_rows,
    models,
    health,
    metrics,
    admin,
    dead,
    webhooks,
)

RESTART_S = 1.0
CPU_THREADS = 2  # more only take turns at the interpreter's lock
MAX_CPU_WAITING = 256
CPU_TIMEOUT_S = 30.0
DISK_THREADS = 2
MAX_DISK_WAITING = 256
DISK_TIMEOUT_S = 30.0
MAX_SQL_WAITING = 4096
SQL_TIMEOUT_S = 20.0  # the database's own limits, of about 15 s, come first
CHECK_THREADS = 1  # of readiness, and of the lease
MAX_CHECKS_WAITING = 64
CHECK_TIMEOUT_S = 3.0
HINT_THREADS = 1  # see api.hints


def create_app(settings: Settings) -> Starlette:
    """The application. Loads the tokenizers. Raises door.UnreadableModel."""
    services = _wire(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        services.hints.start()
        tasks = [
            asyncio.create_task(keep_running("listen", lambda: services.waiters.listen(settings))),
            asyncio.create_task(keep_running("feed", services.feed.run)),
            asyncio.create_task(keep_running("lease", services.lease.run)),
            asyncio.create_task(
                keep_running("reread", lambda: services.waiters.reread(services.sql))
            ),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await services.close()

    modules = (*ROUTES, document) if settings.openapi else ROUTES
    routes = [route for module in modules for route in module.router.routes]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.services = services
    app.add_middleware(Guard, services=services)
    app.add_middleware(Edge)
    if services.tracing is not None:
        app.add_middleware(Traced, tracing=services.tracing)
    errors.install(app)
    return app


async def keep_running(name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do what never ends; begin again where it does, and say why.

    A task that nobody awaits would end without a word, and what it did would be missed much later.
    """
    while True:
        task = asyncio.create_task(work())
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        error = None if task.cancelled() else task.exception()
        logger.error("task ended: name=%s", name, exc_info=error)
        await asyncio.sleep(RESTART_S)


def num_database_connections(settings: Settings) -> int:
    """Most that this process opens: nobody here waits for another's."""
    return sum(_statement_threads(settings)) + CHECK_THREADS + HINT_THREADS


def _statement_threads(settings: Settings) -> tuple[int, int]:
    """For reads and for writes. A writer may wait long for its turn, and a long list takes long to
    read: neither may take the other's threads."""
    reads = max(1, settings.database_pool // 2)
    return reads, max(1, settings.database_pool - reads)


def _wire(settings: Settings) -> Services:
    database = Database(settings.database_url, pool_size=num_database_connections(settings))
    reads, writes = _statement_threads(settings)
    store = FileStore(settings.files_dir)
    disk = Pool(
        "the disk", threads=DISK_THREADS, max_waiting=MAX_DISK_WAITING, timeout_s=DISK_TIMEOUT_S
    )
    sql = Sql(
        database,
        reads=_statements("reads", reads),
        writes=_statements("writes", writes),
        checks=Pool(
            "the database",
            threads=CHECK_THREADS,
            max_waiting=MAX_CHECKS_WAITING,
            timeout_s=CHECK_TIMEOUT_S,
        ),
    )
    presenter = Presenter()
    door = Door.open(settings)
    cpu = Pool(
        "the door check",
        threads=CPU_THREADS,
        max_waiting=MAX_CPU_WAITING,
        timeout_s=CPU_TIMEOUT_S,
    )
    return Services(
        settings=settings,
        door=door,
        waiters=Waiters(settings.max_waiters, presenter.seconds_for_next),
        hints=Hints(settings, database, make_app(settings)),
        bodies=BodyReader(settings.max_body_bytes, budget_bytes=settings.body_memory_bytes),
        sql=sql,
        lease=Lease(sql, settings),
        presenter=presenter,
        acceptance=Acceptance(sql, presenter, ttl_s=settings.idempotency_ttl_s),
        intake=Intake(cpu),
        keyring=Keyring(sql, max_failed_per_minute=settings.max_failed_keys_per_minute),
        disk=disk,
        files=store,
        uploads=Uploads(store, disk, max_bytes=settings.max_file_bytes),
        redis=connect_async(settings.redis_url),
        tracing=open_tracing(settings, "tokenmill-api"),
        feed=Feed(settings, connect_async(settings.redis_url, decode=False)),
        cpu=cpu,
    )


def _statements(name: str, threads: int) -> Pool:
    return Pool(
        f"the database's {name}",
        threads=threads,
        max_waiting=MAX_SQL_WAITING,
        timeout_s=SQL_TIMEOUT_S,
    )
