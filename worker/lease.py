"""A worker's sign of life: one UPDATE of its own row every few seconds, by the database's clock.

It beats through a step of any length that is no stall: the watchdog knows, and replaces an engine
that is stuck. Only one that cannot be ended keeps the beat back, and its jobs go to others. A beat
that comes late renews whatever nobody has taken meanwhile, by the fence. Its answer names the jobs
that are ours no more. While no beat gets through for as long as the lease, no message is taken from
Redis either: it could not be claimed. A hint over Redis that a job was cancelled brings the beat
forward, and the row decides as always.
"""

import logging
import math
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from jobs import claims, store
from jobs.database import Database, transient, trouble
from jobs.events import Subscription
from jobs.records import WorkerInfo
from worker.dispatcher import Dispatcher
from worker.engine_client import EngineClient
from worker.guard import start_thread

STOP_S = 5.0
HINT_WAIT_S = 1.0

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """The lease of one worker: opened, beaten, and ended when the worker has nothing left."""

    def __init__(
        self,
        database: Database,
        *,
        info: WorkerInfo,
        dispatcher: Dispatcher,
        engine: EngineClient,
        cancelled: Subscription,
        beat_s: float,
        lease_s: float,
        stalled: Callable[[], bool],  # the engine, which then is not worth a beat
    ) -> None:
        self._database = database
        self._info = info
        self._dispatcher = dispatcher
        self._engine = engine
        self._cancelled = cancelled
        self._beat_s = beat_s
        self._lease_s = lease_s
        self._stalled = stalled
        self._news = threading.Event()  # a hint came, or the worker stops
        self._stopping = threading.Event()
        self._stands_until = math.inf  # monotonic; not yet: the door is open once it is registered
        self._away = False  # the database, as far as the log knows
        self._thread: threading.Thread | None = None

    def start(self, poll: Callable[[], None]) -> None:
        """Open the lease; `poll` runs while the database is away, and may raise.

        Raises WrongSchema.
        """
        while not self._try(self._register):
            poll()
            time.sleep(0.5)
        self._thread = start_thread("lease", self._run)
        start_thread("cancel-hints", self._listen)

    def stop(self) -> None:
        """End the lease: what is still ours in SQL, if anything, is free for others at once."""
        self._stopping.set()
        self._news.set()
        if self._thread is None:
            return  # never opened
        self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._news.wait(self._beat_s)
            self._news.clear()
            if self._stalled():
                logger.warning("no beat: the engine is stuck")
            else:
                self._try(self._beat)
            # by this process's clock, from before the beat: SQL lets it stand a moment longer
            self._dispatcher.lease_stands(time.monotonic() < self._stands_until)
        if not self._away:  # here: whoever stops must not wait for a database that hangs
            self._try(self._unregister)

    def _listen(self) -> None:
        while not self._stopping.is_set():
            ids = self._cancelled.wait(HINT_WAIT_S)
            if ids and self._dispatcher.holds(ids):
                self._news.set()

    def _register(self) -> None:
        with self._database.begin() as connection:
            store.need_schema(connection)
            asked_at = time.monotonic()
            now = self._database.clock(connection)
            claims.register_worker(connection, self._info, now=now, lease_s=self._lease_s)
        self._stands_until = asked_at + self._lease_s

    def _unregister(self) -> None:
        with self._database.begin() as connection:
            now = self._database.clock(connection)
            claims.unregister_worker(connection, self._info.id, now=now)

    def _beat(self) -> None:
        asked_at = time.monotonic()
        holding = self._dispatcher.holding()
        stats = {
            **self._dispatcher.stats(),
            "engine_pid": self._engine.pid,
            "engine_restarts": self._engine.num_restarts,
            "engine_failing": self._engine.failing,
        }
        try:
            with self._database.begin() as connection:
                moment = self._database.moment(connection)
                beaten = claims.beat(
                    connection,
                    self._info.id,
                    now=moment.now,
                    lease_s=self._lease_s,
                    stats=stats,
                    checkpoints=holding.checkpoints,
                    first_tokens={held: moment.at(at) for held, at in holding.first_tokens.items()},
                    pieces={held: unstored.lines for held, unstored in holding.pieces.items()},
                    held=holding.held,
                )
        except claims.UnknownWorker:
            # asleep for so long that the row was swept away, and the jobs with it
            logger.warning("lease was gone: registered again")
            self._register()
            beaten = claims.Beaten(lost=frozenset(holding.held), stored=frozenset())
        self._stands_until = asked_at + self._lease_s
        self._dispatcher.beaten(holding, beaten.lost, beaten.stored)

    def _try(self, action: Callable[[], None]) -> bool:
        """False when the database is away, which is logged once."""
        try:
            action()
        except SQLAlchemyError as error:
            if not transient(error):
                raise
            if not self._away:
                logger.warning("no beat: database away: %s", trouble(error))
            self._away = True
            return False
        self._away = False
        return True
