"""How many connections there may be at once, and what those beyond are told.

Every connection takes a descriptor, and so do the database, Redis and every file: a server that has
none left answers nobody, its own health checks included.
"""

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from api.errors import Unavailable
from api.http import Parser, Protocol
from jobs.settings import Settings

logger = logging.getLogger(__name__)

MAX_REFUSED = 64  # connections that are being told to come back; others are closed without a word
REFUSED_S = 1.0  # to read it. Closed at once on what it sends, a client often would not see it
MAX_NOT_WAITING = 4096  # connections beside those that wait for a job
# Redis, logs, the event loop; then what a database takes: SQLite's file, its log, a temporary file
RESERVED_DESCRIPTORS = 64
DESCRIPTORS_PER_DATABASE_CONNECTION = 3
LOG_EVERY_S = 10.0


def raise_descriptor_limit() -> None:
    """As many as this process may give itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Gate:
    """Makes the protocol of each connection. Belongs to the event loop's thread."""

    def __init__(self, settings: Settings, *, num_database_connections: int) -> None:
        self.max_connections = settings.max_waiters + MAX_NOT_WAITING
        self.reserved = (
            RESERVED_DESCRIPTORS
            + MAX_REFUSED
            + DESCRIPTORS_PER_DATABASE_CONNECTION * num_database_connections
        )
        self.num_refused = 0  # and not closed yet
        self._seldom = Seldom()

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        return Arriving(lambda: self._choose(config, server_state, app_state, _loop))

    def _choose(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None,
    ) -> asyncio.Protocol:
        limit = self.limit()
        if len(server_state.connections) < limit:
            return Protocol(config, server_state, app_state, loop)
        if self._seldom.due():
            logger.warning("connection refused: %d are open", limit)
        return Refusing(self)

    def limit(self) -> int:
        """Connections that may be open now: the operator may change a process's limit meanwhile."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == resource.RLIM_INFINITY:
            return self.max_connections
        return max(1, min(self.max_connections, descriptors - self.reserved))


class Arriving(asyncio.Protocol):
    """A connection that nobody has counted yet: many are accepted in one turn of the loop, and each
    must see those before it."""

    def __init__(self, choose: Callable[[], asyncio.Protocol]) -> None:
        self.choose = choose

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        protocol = self.choose()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


class Refusing(asyncio.Protocol):
    """Tells a client to come back later, whatever it asks for."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.gate.num_refused += 1
        if self.gate.num_refused > MAX_REFUSED:
            transport.abort()
            return
        error = Unavailable("too many connections are open", code="overloaded")
        transport.write(Parser().reply(error))
        transport.write_eof()
        asyncio.get_running_loop().call_later(REFUSED_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gate.num_refused -= 1


class Seldom:
    """Whether a line that may be due a thousand times a second is to be logged."""

    def __init__(self) -> None:
        self._next = 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOG_EVERY_S
        return True


class LoopTrouble:
    """What asyncio reports: as ever, but one line where it cannot accept for want of descriptors.

    It tries a socket again and again then, with a trace for each.
    """

    def __init__(self) -> None:
        self._seldom = Seldom()

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not str(context.get("message", "")).startswith("socket.accept() out of system"):
            loop.default_exception_handler(context)
        elif self._seldom.due():
            logger.error("no connection accepted: error=%s", context.get("exception"))
