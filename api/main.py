"""The API's process: uvicorn around `api.app`, until SIGINT or SIGTERM."""

import asyncio
import logging
import signal
import socket
import threading

import uvicorn
from starlette.applications import Starlette

from api.app import create_app, num_database_connections
from api.connections import Gate, LoopTrouble, raise_descriptor_limit
from api.services import Services
from jobs import logs
from jobs.settings import Settings

logger = logging.getLogger(__name__)

GRACE_S = 5  # for replies under way; long-polls and streams are ended at once
MAX_CONNECTIONS_WAITING = 2048  # for us to accept them
# in one turn of the loop: what asyncio calls the backlog, and as often it fails without descriptors
ACCEPTS_AT_ONCE = 16
# longer than clients and proxies keep an idle connection (OpenAI's client 5 s, nginx 60 s): who
# closes first must not be us, or a call on its way is lost
KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """Ends the waiting of its clients before it waits for its clients to end."""

    def __init__(self, app: Starlette, settings: Settings) -> None:
        self.app = app
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            loop="asyncio",
            # any maker of protocols does
            http=Gate(settings, num_database_connections=num_database_connections(settings)),  # type: ignore[arg-type]
            ws="none",
            backlog=ACCEPTS_AT_ONCE,
            log_config=None,
            access_log=False,
            server_header=False,
            # else nothing here trusts where a client says it comes from
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=settings.trusted_proxies,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(LoopTrouble())
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                with listening.dup() as same:
                    same.listen(MAX_CONNECTIONS_WAITING)
                host, port = listening.getsockname()[:2]
                logger.info("API listening: host=%s port=%s", host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        services = getattr(self.app.state, "services", None)
        if isinstance(services, Services):
            services.waiters.close()
        await super().shutdown(sockets)


def run(settings: Settings, listening: socket.socket | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then return: on a socket of our own, or one that is given.

    Raises door.UnreadableModel, or SystemExit if the start fails otherwise.
    """
    logs.set_up(settings)
    raise_descriptor_limit()
    server = Server(create_app(settings), settings)
    if threading.current_thread() is threading.main_thread():
        # uvicorn stops on these, then raises them again for whoever handled them before: that
        # would end the process as killed by a signal, where it has ended in good order
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, _ignore)
    server.run(None if listening is None else [listening])
    if not server.started:
        raise SystemExit(1)


def _ignore(signal_number: int, frame: object) -> None:
    return
