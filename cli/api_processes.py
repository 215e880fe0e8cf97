"""Several API processes behind one port: a socket that all of them accept from.

They share nothing else but the database and Redis, as processes on several machines would.
"""

import logging
import signal
import socket
import threading
from collections.abc import Mapping

from cli.service import API_GRACE_S
from cli.supervisor import Child, Supervisor
from jobs import logs
from jobs.settings import Settings

logger = logging.getLogger(__name__)

BACKLOG = 2048
WATCH_PAUSE_S = 0.5


class _Process(Child):
    def __init__(self, number: int, environ: Mapping[str, str], listening: socket.socket) -> None:
        super().__init__(f"api-{number}", ("api",), environ, grace_s=API_GRACE_S, log_folder=None)
        self._listening = listening

    def start(self) -> None:
        descriptor = self._listening.fileno()
        self._spawn("--listen-fd", str(descriptor), keep_open=(descriptor,))


def run_several(environ: Mapping[str, str], settings: Settings, number: int) -> None:
    """Until SIGINT or SIGTERM; one that ends is started again."""
    logs.set_up(settings)
    stop = threading.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: stop.set())
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    address = (settings.host, settings.port)
    with socket.create_server(address, family=family, backlog=BACKLOG) as listening:
        logger.info("API listening: host=%s port=%s processes=%d", *address, number)
        parts = [_Process(each, environ, listening) for each in range(number)]
        with Supervisor(parts) as supervisor:
            while not stop.wait(WATCH_PAUSE_S):
                supervisor.watch()
