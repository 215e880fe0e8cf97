"""Whether the engine gets on with its work: one that is stuck is replaced, a busy one never.

A step may last as long as it likes, up to the stall limit. The time counts only while this thread
is there to look: a process that slept, or got no processor, has not seen the engine stand still.
"""

import logging
import threading
import time

from worker.dispatcher import Dispatcher
from worker.engine_client import EngineClient
from worker.guard import start_thread

TICK_S = 0.2  # how late a time limit may be noticed
MOST_S = 1.0  # what one look adds to a stall: where more has passed, nobody was looking

logger = logging.getLogger(__name__)


class Progress:
    """How long the engine has stood still with work to do, by its steps and a clock given."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._seen: tuple[int, int] | None = None  # (process, steps) when last looked
        self._looked_at: float | None = None
        self._still_s = 0.0

    def look(self, *, restarts: int, steps: int, busy: bool, now: float) -> None:
        since_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if not busy or (restarts, steps) != self._seen:
            self._seen = (restarts, steps)
            self._still_s = 0.0
        else:
            self._still_s += min(since_s, MOST_S)

    @property
    def stalled(self) -> bool:
        return self._still_s >= self._stall_s


class Watchdog:
    """Looks at the engine and at the time limits of jobs, on a thread that waits for nobody."""

    def __init__(self, *, dispatcher: Dispatcher, engine: EngineClient, stall_s: float) -> None:
        self._dispatcher = dispatcher
        self._engine = engine
        self._stall_s = stall_s
        self._progress = Progress(stall_s)
        self._stopping = threading.Event()

    def start(self) -> None:
        start_thread("watchdog", self._run)

    def stop(self) -> None:
        self._stopping.set()

    @property
    def stalled(self) -> bool:
        """The engine is stuck, and not yet replaced."""
        return self._progress.stalled

    def _run(self) -> None:
        while not self._stopping.wait(TICK_S):
            self._dispatcher.check_time()
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        was_stalled = self.stalled
        self._progress.look(
            restarts=self._engine.num_restarts,
            steps=self._engine.num_steps,
            busy=self._dispatcher.engine_busy,
            now=now,
        )
        if self.stalled:
            if not was_stalled:
                logger.error("engine stalled for %g s, replaced", self._stall_s)
            self._engine.kill()
