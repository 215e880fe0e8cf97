"""A message of many jobs' ids: one message for Celery, a delivery of its own for each job.

Celery hears of it as a whole: it is acknowledged once each of its jobs is claimed or somebody
else's, and ends when the last of them does.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from worker.delivery import CeleryCallbacks, Delivery


class Chunk:
    """Celery's Request keeps a weak reference to it; its deliveries keep it."""

    def __init__(
        self,
        job_ids: Sequence[str],
        callbacks: CeleryCallbacks,
        *,
        in_hub: Callable[[Callable[[], Any]], None],
        on_terminate: Callable[[Delivery], None],
        soft_limit_s: float | None = None,  # of each job
        hard_limit_s: float | None = None,
    ) -> None:
        self._callbacks = callbacks
        self._began_at = time.monotonic()
        self._undecided = set(range(len(job_ids)))
        self._open = set(range(len(job_ids)))
        self.deliveries = [
            Delivery(
                job_id,
                self._callbacks_of(index),
                soft_limit_s=soft_limit_s,
                hard_limit_s=hard_limit_s,
                in_hub=in_hub,
                on_terminate=on_terminate,
                background=True,
            )
            for index, job_id in enumerate(dict.fromkeys(job_ids))
        ]
        assert len(self.deliveries) == len(job_ids), "a chunk names each job once"

    def terminate(self, signal: int | None = None) -> None:
        """As for a single message: all of its jobs are cancelled, or handed back."""
        for delivery in self.deliveries:
            delivery.terminate(signal)

    # -- on the event loop's thread, as everything of Celery's

    def _callbacks_of(self, index: int) -> CeleryCallbacks:
        return CeleryCallbacks(
            accept=lambda pid, at: self._decided(index),
            end=lambda result: self._ended(index),
            time_out=lambda soft, limit_s: self._ended(index) if not soft else None,
        )

    def _decided(self, index: int) -> None:
        if index in self._undecided:
            self._undecided.remove(index)
            if not self._undecided:
                self._callbacks.accept(os.getpid(), self._began_at)

    def _ended(self, index: int) -> None:
        self._decided(index)
        if index in self._open:
            self._open.remove(index)
            if not self._open:
                self._callbacks.end((False, None, time.monotonic() - self._began_at))
