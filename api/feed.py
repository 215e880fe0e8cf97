"""What tokens say while they come, for whoever in this process streams their job.

One reader hears the tokens of all jobs (`jobs.streams`) and gives each listener those of its own. A
listener that is slow, or came late, or a Redis that was away: what is missing then is in the row.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator

import redis.asyncio
from redis.exceptions import RedisError

from jobs import streams
from jobs.settings import Settings
from jobs.streams import Run

logger = logging.getLogger(__name__)

MAX_WAITING_RUNS = 65_536  # of one listener that does not take them; the oldest are dropped


class Listener:
    """The runs of one job, in the order heard; `event` is set when there are new ones."""

    def __init__(self, event: asyncio.Event) -> None:
        self.event = event
        self.runs: deque[Run] = deque(maxlen=MAX_WAITING_RUNS)

    def take(self) -> list[Run]:
        runs = list(self.runs)
        self.runs.clear()
        return runs


class Feed:
    """Belongs to the event loop's thread."""

    def __init__(self, settings: Settings, client: "redis.asyncio.Redis") -> None:
        self._settings = settings
        self._redis = client
        self._listeners: dict[str, set[Listener]] = {}

    @contextlib.contextmanager
    def register(self, job_id: str, event: asyncio.Event) -> Iterator[Listener]:
        listener = Listener(event)
        self._listeners.setdefault(job_id, set()).add(listener)
        try:
            yield listener
        finally:
            listeners = self._listeners[job_id]
            listeners.remove(listener)
            if not listeners:
                del self._listeners[job_id]

    async def recall(self, listener: Listener, job_id: str) -> None:
        """Give a listener what was said since the last beat that may be in the job's row."""
        seconds = 2 * self._settings.beat_s + 1
        with contextlib.suppress(RedisError, OSError):
            for run in await streams.recent(self._redis, self._settings, seconds):
                if run.job_id == job_id:
                    listener.runs.append(run)
        listener.event.set()

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def run(self) -> None:
        """Hear, for ever."""
        async for runs in streams.listen(self._settings):
            for run in runs:
                for listener in self._listeners.get(run.job_id, ()):
                    listener.runs.append(run)
                    listener.event.set()


class Transcript:
    """The runs of one job put in order: each token once, none before those in front of it."""

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}  # tokens of each sample that were given out
        self._early: dict[int, dict[int, Run]] = {}  # what cannot be given out yet, by its start

    def add(self, runs: list[Run]) -> list[Run]:
        """What follows on what was given out before, of these and of earlier ones."""
        ready: list[Run] = []
        for run in runs:
            early = self._early.setdefault(run.sample, {})
            if run.start not in early or run.end > early[run.start].end:
                early[run.start] = run
        for sample in {run.sample for run in runs}:
            ready += self._in_order(sample)
        return ready

    @property
    def waits(self) -> bool:
        """Something is missing before what is here."""
        return any(self._early.values())

    @property
    def num_tokens(self) -> int:
        return sum(self.ends.values())

    def _in_order(self, sample: int) -> Iterator[Run]:
        early = self._early[sample]
        for start in sorted(early):
            end = self.ends.get(sample, 0)
            if start > end:
                return
            run = early.pop(start)
            if run.end > end:
                self.ends[sample] = run.end
                yield Run(run.job_id, sample, end, run.pieces[end - start :])
