"""SQL is the backlog, Redis a short runway: ids of the best queued jobs, a bounded number a model.

Which are best, `jobs.order` says; on the runway ids keep that order, so that a job waits there for
no more than its bound of others.

A message is a job's id and nothing else. Publishing marks the row first: a message that is lost
afterwards leaves a row marked but queued, found by `sweep.republish`. Two processes that refill at
once put up to twice the bound on the runway; a message too many is dropped at its claim.

RunwayDown
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import kombu.exceptions
import redis
from celery import Celery
from kombu.transport.redis import Channel

from jobs import sweep
from jobs.celery_app import RUN_TASK, queue_for, quick_connection
from jobs.database import Database
from jobs.redis_client import connect
from jobs.settings import Settings

logger = logging.getLogger(__name__)


class RunwayDown(Exception):
    """Redis is away or refuses: jobs stay queued in SQL, the next refill publishes them."""


class Runway:
    """Publishes ids of queued jobs. Thread-safe; gives up on Redis within a few seconds."""

    def __init__(self, settings: Settings, app: Celery) -> None:
        self._settings = settings
        self._app = app
        self._redis = connect(settings.redis_url)
        self._lock = threading.Lock()  # one refill at a time: two would both see the same room
        self._connection: Any = None  # kombu's, made when first needed
        self._num_taken: Counter[str] = Counter()  # of each model, for its turns in the order

    def lengths(self) -> dict[str, int]:
        """Messages waiting for each model, of every Redis priority. Raises RunwayDown."""
        names = [model.name for model in self._settings.models]
        with self._redis_errors(), self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                for key in _keys(self._settings.key_prefix, queue_for(name)):
                    pipeline.llen(key)
            lengths = pipeline.execute()
        steps = len(Channel.priority_steps)
        return {name: sum(lengths[i * steps : (i + 1) * steps]) for i, name in enumerate(names)}

    def refill(self, database: Database) -> int:
        """Bring each model's runway up to its bound, best jobs first; how many were published.

        Raises RunwayDown, and what the database raises.
        """
        with self._lock:
            num_published = 0
            for model, length in self.lengths().items():
                if room := max(0, self._settings.runway - length):
                    ids = self._take(database, model, room, length)
                    self._num_taken[model] += len(ids)
                    self._publish(model, ids)
                    num_published += len(ids)
            return num_published

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

    def _take(self, database: Database, model: str, room: int, length: int) -> list[str]:
        with database.begin() as connection:
            now = database.clock(connection)
            ids = sweep.republish(
                connection,
                model,
                limit=room,
                now=now,
                older_than_s=self._settings.republish_s,
                num_messages=length if length <= self._settings.runway // 8 else None,
            )
            if ids:
                logger.warning("model %s had messages lost: republished=%d", model, len(ids))
            before = self._num_taken[model]
            return ids + sweep.publishable(
                connection, model, limit=room - len(ids), now=now, num_before=before
            )

    def _publish(self, model: str, ids: Sequence[str]) -> None:
        if not ids:
            return
        with self._redis_errors():
            if self._connection is None:
                self._connection = quick_connection(self._app)
            with self._app.amqp.Producer(self._connection, auto_declare=False) as producer:
                for job_id in ids:
                    self._app.send_task(
                        RUN_TASK,
                        args=[job_id],
                        task_id=job_id,
                        argsrepr="",  # the id is there twice already
                        queue=queue_for(model),
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


def _keys(prefix: str, queue: str) -> list[str]:
    """The lists behind a queue, one for each of kombu's priority steps; the first has no suffix."""
    return [
        f"{prefix}{queue}{Channel.sep}{step}" if step else f"{prefix}{queue}"
        for step in Channel.priority_steps
    ]
