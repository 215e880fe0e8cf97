"""A Celery task message in the worker's hands, until Celery has been told how it ended.

All of Celery's state belongs to its event loop's thread, so every callback is handed to that loop.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from billiard.einfo import ExceptionInfo
from celery.exceptions import Ignore, Retry


class Ending(Enum):
    """How Celery is to see the end of a message."""

    SUCCEEDED = auto()
    FAILED = auto()
    HANDED_BACK = auto()  # the job goes on elsewhere: a retry, in Celery's words
    DROPPED = auto()  # somebody else's job, or cancelled


class JobFailed(Exception):
    """What monitors such as Flower show of a job that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CeleryCallbacks:
    """What Celery gives to a pool with each task. Internal, but unchanged since Celery 4."""

    accept: Callable[[int, float], Any]  # (pid, monotonic time): the message is acknowledged
    end: Callable[[tuple[bool, Any, float]], Any]  # (failed, value, runtime)
    time_out: Callable[[bool, float], Any]  # (soft, seconds)


class Delivery:
    """One message. Celery's Request keeps a weak reference to it and calls `terminate`."""

    def __init__(
        self,
        job_id: str,
        callbacks: CeleryCallbacks,
        *,
        soft_limit_s: float | None,
        hard_limit_s: float | None,
        in_hub: Callable[[Callable[[], Any]], None],  # run it on the event loop's thread
        on_terminate: Callable[["Delivery"], None],
        background: bool = False,  # nobody waits for it; the row, once read, knows better
    ) -> None:
        self.background = background
        self.job_id = job_id
        self.soft_limit_s = soft_limit_s
        self.hard_limit_s = hard_limit_s
        self.accepted_at: float | None = None  # monotonic; the limits' clock starts here
        self._callbacks = callbacks
        self._in_hub = in_hub
        self._on_terminate = on_terminate
        self._told = False

    def terminate(self, signal: int | None = None) -> None:
        """Celery's word for a revoke of a running task, and for a cold stop."""
        self._on_terminate(self)

    def accept(self) -> None:
        """The row is ours: Celery acknowledges the message."""
        accepted_at = self.accepted_at = time.monotonic()
        self._in_hub(lambda: self._callbacks.accept(os.getpid(), accepted_at))

    def time_out(self, *, soft: bool) -> None:
        """Celery logs a soft limit; a hard one ends the task for it."""
        limit_s = self.soft_limit_s if soft else self.hard_limit_s
        assert limit_s is not None
        if not soft:
            self._told = True
        self._in_hub(lambda: self._callbacks.time_out(soft, limit_s))

    def end(self, ending: Ending, message: str = "") -> None:
        """Tell Celery, once. A message never accepted is acknowledged by this."""
        if self._told:
            return
        self._told = True
        runtime = 0.0 if self.accepted_at is None else time.monotonic() - self.accepted_at
        failed = ending is not Ending.SUCCEEDED
        result = (failed, _exception_info(ending, message) if failed else None, runtime)
        self._in_hub(lambda: self._callbacks.end(result))


def _exception_info(ending: Ending, message: str) -> ExceptionInfo:
    """An exception as Celery wants it: raised, with its traceback."""
    error: Exception
    if ending is Ending.FAILED:
        error = JobFailed(message)
    elif ending is Ending.HANDED_BACK:
        error = Retry(message or "handed back")
    else:
        error = Ignore()
    try:
        raise error
    except (JobFailed, Retry, Ignore):
        return ExceptionInfo()
