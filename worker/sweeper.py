"""The sweeper: returns what dead workers held, ends what is late, keeps the runway filled.

Any process may run it, and any number of them: each pass is a few statements that decide by
themselves, so two sweepers do the work of one. Nothing here is remembered from pass to pass but
what the log has been told; a sweeper that dies is replaced by starting another.
"""

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from jobs import store, sweep, waiting
from jobs.celery_app import make_app
from jobs.database import Database, transient, trouble
from jobs.events import Channel, Publisher
from jobs.lifecycle import TERMINAL
from jobs.runway import Runway, RunwayDown
from jobs.settings import Settings
from worker.batch_keeper import BatchKeeper
from worker.courier import Courier

PURGE_EVERY_S = 60.0
REFILLS = 10  # of a runway that was half empty, beside each pass

logger = logging.getLogger(__name__)


def run(settings: Settings, stop: threading.Event) -> None:
    """Sweep every `sweep_s` seconds until `stop` is set. Raises WrongSchema."""
    with Sweeper(settings) as sweeper:
        sweeper.sweep()  # a database of another version ends it before anything else begins
        with Courier(settings), BatchKeeper(settings):
            while not stop.wait(settings.sweep_s):
                sweeper.sweep()
                # workers that are quicker than that would wait for ids half of the time
                for _ in range(REFILLS):
                    if not sweeper.runs_short or stop.wait(settings.sweep_s / REFILLS):
                        break
                    sweeper.refill()


class Sweeper:
    """One pass after another. Survives the database and Redis being away."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._database = Database(settings.database_url, pool_size=1)
        self._runway = Runway(settings, make_app(settings))
        self._publisher = Publisher(settings)
        self._away: set[str] = set()  # of "database" and "redis", as the log knows it
        self._purge_due = 0.0
        # by the monotonic clock: API processes could extend their leases from then on
        self._reaches_since = self._last_reached = float("-inf")
        self._schema_known = False
        self.runs_short = False  # a runway was at least half empty, and there were ids for it

    def sweep(self) -> None:
        """One pass. What cannot be done now is left to the next."""
        self._do(self._rescue, self._refill)

    def refill(self) -> None:
        """The runway alone."""
        self._do(self._refill)

    def _refill(self) -> None:
        num_published = self._runway.refill_lanes(self._database)
        self.runs_short = self._runway.runs_short(num_published)
        self._reached("redis")

    def _do(self, *parts: Callable[[], None]) -> None:
        self.runs_short = False
        try:
            for part in parts:
                part()
                self._reached("database")
        except RunwayDown as error:
            self._missed("redis", str(error))
        except SQLAlchemyError as error:
            if not transient(error):
                raise
            self._missed("database", trouble(error))

    def close(self) -> None:
        self._runway.close()
        self._publisher.close()
        self._database.dispose()

    def __enter__(self) -> "Sweeper":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rescue(self) -> None:
        with self._database.begin() as connection:
            if not self._schema_known:
                store.need_schema(connection)
                self._schema_known = True
            now = self._database.clock(connection)
            reaped = sweep.reap(connection, now)
            expired = sweep.expire(connection, now)
            unwaited = waiting.cancel_unwaited(connection, now) if self._is_steady() else []
            if time.monotonic() >= self._purge_due:
                sweep.purge(connection, now=now, idempotency_ttl_s=self._settings.idempotency_ttl_s)
                waiting.purge(connection, now)
                self._purge_due = time.monotonic() + PURGE_EVERY_S
        for job in reaped:
            logger.warning("job %s taken from a silent worker: state=%s", job.id, job.state)
        if expired:
            logger.info("%d jobs expired", len(expired))
        for job_id in unwaited:
            logger.warning("job %s cancelled: the API process whose caller waited is gone", job_id)
        ended = [job.id for job in reaped if job.state in TERMINAL] + expired + unwaited
        self._publisher.publish(Channel.ENDED, ended)
        self._publisher.publish(Channel.CANCELLED, unwaited)

    def _is_steady(self) -> bool:
        """Whether the database has answered for a while: before, a process that lives may not have
        been able to say so."""
        now = time.monotonic()
        if now - self._last_reached > self._settings.beat_s + self._settings.sweep_s:
            self._reaches_since = now
        self._last_reached = now
        return now - self._reaches_since >= self._settings.lease_s / 2

    def _missed(self, server: str, why: str) -> None:
        if server not in self._away:
            logger.warning("%s away (%s), trying on", server, why)
        self._away.add(server)

    def _reached(self, server: str) -> None:
        if server in self._away:
            logger.warning("%s back", server)
        self._away.discard(server)
