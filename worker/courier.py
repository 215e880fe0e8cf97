"""Delivers webhooks: a thread beside the sweeper, any number of them.

A delivery goes to an address that was checked, over a connection made to that very address: a name
that leads elsewhere the next time it is asked (DNS rebinding) leads nowhere. No redirect is
followed, no proxy of the environment is used, and of a reply only its status is read.
"""

import logging
import socket
import ssl
import threading
import time
import typing
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime

import httpcore
from standardwebhooks import Webhook

from jobs import webhooks
from jobs.addresses import is_public
from jobs.database import Database, transient, trouble
from jobs.settings import Settings
from jobs.webhooks import Due

THREADS = 8
PURGE_EVERY_S = 600.0
STOP_S = 5.0
AGAIN_S = 5.0  # after a round that failed

Tried = tuple[int | None, str | None]  # the reply's status, and why it is no success

logger = logging.getLogger(__name__)


class NotAllowed(Exception):
    """A host that has no public address."""


class Courier:
    """Makes events of what has ended, and takes them where they are to go."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._database = Database(settings.database_url, pool_size=2)
        self._stop = threading.Event()
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="webhook")
        self._thread: threading.Thread | None = None
        self._purge_due = 0.0
        self._away = False

    def __enter__(self) -> "Courier":
        # a daemon: a receiver that hangs must not keep the process from ending
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._database.dispose()

    def _run(self) -> None:
        pause_s = self._settings.sweep_s
        while not self._stop.wait(pause_s):
            pause_s = self._settings.sweep_s
            try:
                self.round()
                self._away = False
            except Exception as error:  # the edge of this thread: recorded, and begun again
                if not transient(error):
                    logger.exception("webhooks failed")
                elif not self._away:
                    logger.warning("webhooks wait: %s", trouble(error))
                self._away = True
                pause_s = max(pause_s, AGAIN_S)

    def round(self) -> int:
        """Everything that is due, until nothing is in hands; how many deliveries were tried."""
        in_hands: dict[Future[Tried], Due] = {}
        num_tried = 0
        while not self._stop.is_set():
            for due in self._take(in_hands.values()):
                in_hands[self._executor.submit(self._try, due)] = due
            if not in_hands:
                break
            ended = wait(in_hands, self._settings.sweep_s, FIRST_COMPLETED).done
            for future in ended:
                self._settle(in_hands.pop(future), *future.result())
            num_tried += len(ended)
        return num_tried

    def _take(self, in_hands: Collection[Due]) -> list[Due]:
        with self._database.begin() as connection:
            now = self._database.clock(connection)
            webhooks.announce(connection, now)
            if time.monotonic() >= self._purge_due:
                webhooks.purge(connection, now)
                self._purge_due = time.monotonic() + PURGE_EVERY_S
            return webhooks.take_due(
                connection,
                now,
                room=THREADS - len(in_hands),
                in_hands=Counter(each.delivery.tenant_id for each in in_hands),
            )

    def _settle(self, due: Due, status_code: int | None, error: str | None) -> None:
        with self._database.begin() as connection:
            webhooks.settle(
                connection,
                due.delivery,
                status_code=status_code,
                error=error,
                now=self._database.clock(connection),
            )
        logger.info(
            "webhook %s tried: event=%s type=%s try=%d status=%s error=%s",
            due.delivery.id,
            due.delivery.event_id,
            due.delivery.event_type,
            due.delivery.num_tries,
            status_code,
            error,
        )

    def _try(self, due: Due) -> Tried:
        return deliver(
            due,
            timeout_s=self._settings.webhook_timeout_s,
            private=self._settings.webhook_private_addresses,
        )


def deliver(due: Due, *, timeout_s: float, private: bool) -> Tried:
    """Send it once: the reply's status, and why that is no success, None if it is one."""
    sent_at = datetime.now(UTC)
    payload = due.delivery.payload
    headers = {
        "content-type": "application/json",
        "user-agent": "tokenmill",
        "webhook-id": due.delivery.event_id,
        "webhook-timestamp": str(int(sent_at.timestamp())),
        "webhook-signature": Webhook(due.secret).sign(due.delivery.event_id, sent_at, payload),
    }
    backend = CheckedBackend(deadline=time.monotonic() + timeout_s, private=private)
    timeout = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
    try:
        with (
            httpcore.ConnectionPool(
                network_backend=backend, ssl_context=ssl.create_default_context()
            ) as pool,
            pool.stream(
                "POST",
                due.url,
                headers=list(headers.items()),
                content=payload.encode(),
                extensions={"timeout": timeout},
            ) as reply,
        ):
            status = reply.status
    except NotAllowed:
        return None, "its host has no address that may be connected to"
    except (httpcore.TimeoutException, TimeoutError):
        return None, f"no reply within {timeout_s:g} s"
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError, ValueError) as error:
        return None, f"no reply ({type(error).__name__})"
    return status, None if 200 <= status < 300 else f"status {status}"


class CheckedBackend(httpcore.NetworkBackend):
    """Connects to public addresses only (or to any, if `private`), and not beyond its deadline."""

    def __init__(self, *, deadline: float, private: bool) -> None:
        self._backend = httpcore.SyncBackend()
        self._deadline = deadline
        self._private = private

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[typing.Any] | None = None,
    ) -> httpcore.NetworkStream:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in found]
        for address in addresses:
            if self._private or is_public(address):
                stream = self._backend.connect_tcp(address, port, _left(self._deadline))
                return _Timed(stream, self._deadline)
        raise NotAllowed


class _Timed(httpcore.NetworkStream):
    """A stream that ends at a deadline, however slowly the other side drips."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, _left(self._deadline))
        return _Timed(stream, self._deadline)

    def get_extra_info(self, info: str) -> typing.Any:
        return self._stream.get_extra_info(info)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore.TimeoutException
    return left
