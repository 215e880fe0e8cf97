"""SQL is the backlog, Redis a short runway: ids of the best queued jobs, a bounded number a model.

Which are best, `jobs.order` says; on the runway ids keep that order, so that a job waits there for
no more than its bound of others. Jobs in the background (priority below 0) have a runway of their
own beside it, which workers take from last.

A message is a job's id and nothing else, or in the background a chunk of up to CHUNK_ROWS ids: it
costs about what one id does. Publishing marks the row first: a message that is lost afterwards
leaves a row marked but queued, found by `sweep.republish`. Two processes that refill at once put up
to twice the bound on the runway; a message too many is dropped at its claim.

RunwayDown
"""

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import kombu.exceptions
import redis
from celery import Celery
from kombu.transport.redis import Channel

from jobs import store, sweep
from jobs.celery_app import (
    BACKGROUND_STEP,
    CHUNK_ROWS,
    CHUNK_TASK,
    RUN_TASK,
    queue_for,
    quick_connection,
)
from jobs.database import Database
from jobs.redis_client import connect
from jobs.settings import Settings

logger = logging.getLogger(__name__)

NO_TRACES: Mapping[str, str] = {}


class RunwayDown(Exception):
    """Redis is away or refuses: jobs stay queued in SQL, the next refill publishes them."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One of a model's two runways."""

    model: str
    background: bool

    @property
    def steps(self) -> list[int]:
        """kombu's priorities of its messages: each is a list of its own in Redis."""
        return [step for step in Channel.priority_steps if self.holds(step)]

    def holds(self, step: int) -> bool:
        return (step == BACKGROUND_STEP) == self.background


class Runway:
    """Publishes ids of queued jobs. Thread-safe; gives up on Redis within a few seconds."""

    def __init__(self, settings: Settings, app: Celery) -> None:
        self._settings = settings
        self._app = app
        self._redis = connect(settings.redis_url)
        self._lock = threading.Lock()  # one refill at a time: two would both see the same room
        self._connection: Any = None  # kombu's, made when first needed
        self._num_taken: Counter[Lane] = Counter()  # for its turns in the order
        self._lanes = [
            Lane(model.name, background)
            for model in settings.models
            for background in (False, True)
        ]

    def lengths(self) -> dict[Lane, int]:
        """Messages that wait. Raises RunwayDown."""
        with self._redis_errors(), self._redis.pipeline(transaction=False) as pipeline:
            for lane in self._lanes:
                for key in _keys(self._settings.key_prefix, lane):
                    pipeline.llen(key)
            lengths = iter(pipeline.execute())
        return {lane: sum(next(lengths) for _ in lane.steps) for lane in self._lanes}

    def bound(self, lane: Lane) -> int:
        """Messages that may wait there: of chunks as many as have four times the ids."""
        runway = self._settings.runway
        return -(-4 * runway // CHUNK_ROWS) if lane.background else runway

    def refill(self, database: Database) -> int:
        """Bring each runway up to its bound, best jobs first; how many jobs were published.

        Raises RunwayDown, and what the database raises.
        """
        return sum(self.refill_lanes(database).values())

    def refill_lanes(self, database: Database) -> dict[Lane, int]:
        """The same; of each runway how many."""
        num_published: dict[Lane, int] = {}
        with self._lock:
            for lane, length in self.lengths().items():
                if room := max(0, self.bound(lane) - length):
                    messages = self._take(database, lane, room, length)
                    self._publish(lane, messages, self._trace_parents(database, messages))
                    num_published[lane] = sum(map(len, messages))
                    self._num_taken[lane] += num_published[lane]
        return num_published

    def runs_short(self, num_published: dict[Lane, int]) -> bool:
        """A runway was at least half empty, and there were jobs for it."""
        return any(
            2 * num >= self.bound(lane) * (CHUNK_ROWS if lane.background else 1)
            for lane, num in num_published.items()
        )

    def close(self) -> None:
        self._redis.close()
        self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _take(self, database: Database, lane: Lane, room: int, length: int) -> list[list[str]]:
        """Jobs for so many messages more; the ids of each message."""
        each = CHUNK_ROWS if lane.background else 1
        limit = room * each
        with database.begin() as connection:
            now = database.clock(connection)
            ids = sweep.republish(
                connection,
                lane.model,
                limit=limit,
                now=now,
                older_than_s=self._settings.republish_s,
                # of a chunk nobody knows here how many ids it has: as many as it may
                num_messages=length * each if length <= self.bound(lane) // 8 else None,
                background=lane.background,
            )
            if ids:
                logger.warning("model %s had messages lost: republished=%d", lane.model, len(ids))
            ids += sweep.publishable(
                connection,
                lane.model,
                limit=limit - len(ids),
                now=now,
                num_before=self._num_taken[lane],
                background=lane.background,
            )
        return [ids[start : start + each] for start in range(0, len(ids), each)]

    def _trace_parents(self, database: Database, messages: Sequence[list[str]]) -> dict[str, str]:
        """Of those whose calls are traced: for who looks at messages. A worker asks the row."""
        ids = [message[0] for message in messages if len(message) == 1]
        if not self._settings.otlp_endpoint or not ids:
            return {}
        with database.read() as connection:
            return store.trace_parents(connection, ids)

    def _publish(
        self,
        lane: Lane,
        messages: Sequence[list[str]],
        trace_parents: Mapping[str, str] = NO_TRACES,
    ) -> None:
        if not messages:
            return
        with self._redis_errors():
            if self._connection is None:
                self._connection = quick_connection(self._app)
            with self._app.amqp.Producer(self._connection, auto_declare=False) as producer:
                for ids in messages:
                    alone = len(ids) == 1
                    parent = trace_parents.get(ids[0]) if alone else None
                    self._app.send_task(
                        RUN_TASK if alone else CHUNK_TASK,
                        args=ids if alone else [ids],
                        task_id=ids[0] if alone else f"chunk_{secrets.token_hex(8)}",
                        argsrepr="",  # the ids are there already
                        queue=queue_for(lane.model),
                        headers=None if parent is None else {"traceparent": parent},
                        priority=BACKGROUND_STEP if lane.background else 0,
                        producer=producer,
                        retry=False,
                    )

    @contextmanager
    def _redis_errors(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, kombu.exceptions.KombuError, OSError) as error:
            self._disconnect()
            raise RunwayDown(f"Redis cannot be used: {error}") from error

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.release()
            self._connection = None


def _keys(prefix: str, lane: Lane) -> list[str]:
    """The lists behind a runway; that of priority 0 has no suffix."""
    queue = prefix + queue_for(lane.model)
    return [f"{queue}{Channel.sep}{step}" if step else queue for step in lane.steps]
