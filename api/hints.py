"""What is told to Redis after a commit, in a thread of its own: new work, and cancelled jobs.

All of it are hints. The rows are committed before; the sweeper publishes what was not published and
a worker's next beat finds what was cancelled. So when Redis is away a hint is dropped, and no reply
waits for one.
"""

import logging
import threading
from collections import deque

from celery import Celery
from kombu.exceptions import KombuError
from redis.exceptions import RedisError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from jobs.database import Database, trouble
from jobs.events import Channel, Publisher
from jobs.runway import Runway, RunwayDown
from jobs.settings import Settings

logger = logging.getLogger(__name__)

MAX_CANCELLED = 1024  # hints that may wait; the oldest are dropped
PAUSE_S = 1.0  # without hints after one failed


class Hints:
    """`submitted` and `cancelled` may be called from any thread and return at once."""

    def __init__(self, settings: Settings, database: Database, celery_app: Celery) -> None:
        self._database = database
        self._celery_app = celery_app
        self._runway = Runway(settings, celery_app)
        self._publisher = Publisher(settings)
        self._refill_due = threading.Event()
        self._cancelled: deque[str] = deque(maxlen=MAX_CANCELLED)
        self._due = threading.Event()
        self._stop = threading.Event()
        # a daemon: a publish that hangs on a dead Redis must not keep the process alive
        self._thread = threading.Thread(target=self._run, name="api-hints", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stop.set()
        self._due.set()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._publisher.close()
            self._runway.close()

    def submitted(self) -> None:
        self._refill_due.set()
        self._due.set()

    def cancelled(self, job_ids: list[str]) -> None:
        self._cancelled.extend(job_ids)
        self._due.set()

    def _run(self) -> None:
        while True:
            self._due.wait()
            if self._stop.is_set():
                return
            self._due.clear()
            try:
                self._tell()
            except (RunwayDown, RedisError, KombuError, OSError) as error:
                logger.warning("hints dropped: error=%s", error)
                self._stop.wait(PAUSE_S)
            except (DBAPIError, PoolTimeoutError) as error:
                logger.warning("runway not refilled: %s", trouble(error))
                self._stop.wait(PAUSE_S)

    def _tell(self) -> None:
        if job_ids := [self._cancelled.popleft() for _ in range(len(self._cancelled))]:
            self._publisher.publish(Channel.ENDED, job_ids)
            self._publisher.publish(Channel.CANCELLED, job_ids)
            self._celery_app.control.revoke(job_ids, terminate=True)
        if self._refill_due.is_set():
            self._refill_due.clear()  # before the refill: rows committed during it set it again
            self._runway.refill(self._database)
