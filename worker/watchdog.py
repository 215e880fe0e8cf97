"""Whether the engine gets on with its work: one that is stuck is replaced, a busy one never.

A step may last as long as it likes, up to the stall limit, or ten times as long as its like where
that is more. The time counts only while this thread is there to look: a process that slept, or got
no processor, has not seen the engine stand still.
"""

import logging
import statistics
import threading
import time
from collections import deque

from worker.dispatcher import Dispatcher
from worker.engine_client import EngineClient
from worker.guard import start_thread

TICK_S = 0.2  # how late a time limit may be noticed
MANY_STEPS = 10  # how many like the last ones a step may last
NUM_LIKE = 64  # these last ones
MOST_S = 1.0  # what one look adds to a stall: where more has passed, nobody was looking

logger = logging.getLogger(__name__)


class Progress:
    """How long the engine has stood still with work to do, by its steps and a clock given."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._seen: tuple[int, int] | None = None  # (process, steps) when last looked
        self._looked_at: float | None = None
        self._still_s = 0.0
        self._step_s: deque[float] = deque(maxlen=NUM_LIKE)  # the last steps' times, as seen here

    def look(self, *, restarts: int, steps: int, busy: bool, now: float) -> None:
        since_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if busy and (restarts, steps) == self._seen:
            self._still_s += min(since_s, MOST_S)
            return
        if busy and self._seen is not None and self._seen[0] == restarts:
            num_steps = max(1, steps - self._seen[1])
            self._step_s.append((self._still_s + min(since_s, MOST_S)) / num_steps)
        self._seen = (restarts, steps)
        self._still_s = 0.0

    @property
    def limit_s(self) -> float:
        """How long the step under way may last."""
        usual_s = statistics.median(self._step_s) if self._step_s else 0.0
        return max(self._stall_s, MANY_STEPS * usual_s)

    @property
    def stalled(self) -> bool:
        return self._still_s >= self.limit_s


class Watchdog:
    """Looks at the engine and at the time limits of jobs, on a thread that waits for nobody."""

    def __init__(self, *, dispatcher: Dispatcher, engine: EngineClient, stall_s: float) -> None:
        self._dispatcher = dispatcher
        self._engine = engine
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
                logger.error("engine stalled for %g s, replaced", self._progress.limit_s)
            self._engine.kill()
