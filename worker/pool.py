"""EnginePool: a Celery pool whose one worker is an inference engine.

Celery keeps what it is good at: the broker connection, revokes, time limits, events, Flower, warm
and cold stops. The pool tells it how many messages to take (as many as the KV cache can hold),
when to acknowledge one (its claim is in SQL) and how it ended (its result is). The task's own
function is never called.

Which of Celery's internals this stands on, and since when each is as it is: `BasePool`'s hooks and
the keywords of `on_apply` (2.x), the callbacks' arguments (4.x), the request dict in `args[2]`
(4.0), the request whose methods the callbacks are (4.0), `worker_disable_prefetch` asking
`num_processes` before every BRPOP (5.6), the hub's waker (kombu 5.7).
tests/worker/test_celery_contract.py holds each of them.
"""

import functools
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from celery import signals
from celery.concurrency.base import BasePool, apply_target
from celery.exceptions import WorkerShutdown
from celery.worker import state

from jobs.celery_app import CHUNK_TASK, GENERATE_TASK, RUN_TASK, job_id_of
from jobs.settings import ModelEntry, Settings
from worker.chunk import Chunk
from worker.delivery import CeleryCallbacks, Delivery, Ending
from worker.generation import Refusal
from worker.guard import start_thread
from worker.headers import refusal_of, trace_parent_in
from worker.parts import Parts, StartError
from worker.progress import Progress
from worker.sent_job import SentJob, read_sent_job
from worker.transport import Transport

EXIT_START_FAILED = 78  # sysexits.h: configuration error
TURN_S = 0.1
FLUSH_S = 1.0  # behind the grace, for the last transaction
EXIT_S = 1.9  # behind the grace, until a process that gets no answer ends all the same
MAX_CHUNK = 1024  # ids in one message, whoever sent it

_JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what may be asked of SQL

logger = logging.getLogger(__name__)


class EnginePool(BasePool):
    """Feeds one engine. `pool_for` binds it to a deployment's settings and a model."""

    settings: ClassVar[Settings]
    model: ClassVar[ModelEntry]
    progress: ClassVar[Progress]

    signal_safe = False
    body_can_be_buffer = True
    task_join_will_block = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts: Parts | None = None
        self._hub: Any = None
        self._for_hub: deque[Callable[[], Any]] = deque()
        self._others = ThreadPoolExecutor(1, thread_name_prefix="other-tasks")
        self._broker_errors: tuple[type[BaseException], ...] = ()
        self._num_stop_signals = 0
        self._stopping = False
        self._told = threading.Event()  # SQL has heard of all that was in hand

    # -- start

    def on_start(self) -> None:
        """Load the model, open the lease. A worker that cannot says why and ends."""
        # its remote control warns at every revoke that there is no result backend to tell
        logging.getLogger("celery.worker.control").addFilter(_worth_telling)
        self._does_debug = False  # Celery would log every task's arguments, prompts among them
        # strong: celery's signals forget a bound method of which nobody else keeps a reference
        signals.worker_shutting_down.connect(self._on_stop_signal, weak=False)
        signals.task_revoked.connect(self._on_revoked, weak=False)
        try:
            parts = Parts(
                self.settings,
                self.model,
                worker_id=f"{socket.gethostname()[:24]}-{os.getpid()}-{uuid.uuid4().hex[:12]}",
                max_jobs=self.limit,
                wake=self._wake,
                progress=self.progress,
            )
        except StartError as error:
            raise self._start_failed(error) from error
        try:
            parts.start(state.maybe_shutdown)
        except BaseException as error:
            parts.stop()
            if isinstance(error, StartError):
                raise self._start_failed(error) from error
            raise
        self._parts = parts
        Transport.takes_background = parts.dispatcher.takes_background

    def _start_failed(self, error: StartError) -> WorkerShutdown:
        """Celery's way to end a worker with an exit code, without a trace nobody needs."""
        logger.critical("worker cannot start: %s", error)
        self.progress.failed(str(error))
        return WorkerShutdown(EXIT_START_FAILED)

    def register_with_event_loop(self, loop: Any) -> None:
        """Called again after every reconnection; what came up meanwhile is waiting."""
        self._hub = loop
        broker = self.app.connection_for_read()
        self._broker_errors = (*broker.connection_errors, *broker.channel_errors)
        loop.call_soon(self._run_for_hub)

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()  # type: ignore[misc]
        if self._parts is not None:
            info |= {"model": self.model.name, **self._parts.dispatcher.stats()}
        return info

    # -- work

    @property
    def num_processes(self) -> int:
        """Celery takes a message while it has fewer reserved than this: so many, plus the free."""
        if self._parts is None:
            return 0
        # not our own count of messages: a reconnect makes Celery forget some that we still hold
        return len(state.reserved_requests) + self._parts.dispatcher.places()

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        callback: Callable[..., Any],
        accept_callback: Callable[..., Any],
        timeout_callback: Callable[..., Any] | None = None,
        soft_timeout: float | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> Any:
        """Take a message. Returns what Celery will call `terminate` on."""
        assert self._parts is not None
        task_name, task_id, request = args[:3]
        if task_name not in (RUN_TASK, CHUNK_TASK, GENERATE_TASK):
            return self._others.submit(
                apply_target,
                *(target, args, kwargs),
                callback=self._in_hub(self._contained(callback)),
                accept_callback=self._in_hub(self._contained(accept_callback)),
            )
        embed = _embed(accept_callback)
        refusal = refusal_of(request, embed)
        if isinstance(embed, dict):
            embed.clear()  # Celery would call tasks that a message names when its own has failed
        callbacks = CeleryCallbacks(
            accept=self._contained(accept_callback),
            end=self._contained(callback),
            time_out=self._contained(timeout_callback or _nothing),
        )
        wiring: dict[str, Any] = {
            "soft_limit_s": _limit_s(soft_timeout),
            "hard_limit_s": _limit_s(timeout),
            "in_hub": self._call_in_hub,
            "on_terminate": functools.partial(self._terminate, task_id),
        }
        if task_name == CHUNK_TASK and (job_ids := _job_ids(request.get("args"))):
            chunk = Chunk(job_ids, callbacks, **wiring)
            for delivery in chunk.deliveries:
                self._parts.dispatcher.receive_id(delivery)
            return chunk
        job_id = _job_id(task_name, task_id, request.get("args"))
        delivery = Delivery(job_id, callbacks, **wiring)
        if not _JOB_ID.fullmatch(delivery.job_id):
            logger.warning("message without a job's id dropped: %s", _shown(task_id))
            delivery.end(Ending.DROPPED)
            return delivery
        if task_name == RUN_TASK:
            self._parts.dispatcher.receive_id(delivery)
        else:
            sent = self._sent(delivery.job_id, request["kwargs"], refusal, trace_parent_in(request))
            self._parts.dispatcher.receive_job(delivery, sent)
        return delivery

    def _sent(
        self,
        job_id: str,
        kwargs: object,
        refusal: Refusal | None = None,
        trace_parent: str | None = None,
    ) -> SentJob:
        return read_sent_job(
            job_id,
            kwargs,
            refusal=refusal,
            trace_parent=trace_parent,
            max_attempts=self.settings.max_attempts,
            max_bytes=self.settings.max_job_bytes,
            served=frozenset(model.name for model in self.settings.models),
        )

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """The pid is this very process; the delivery's own `terminate` follows."""

    def _terminate(self, task_id: str, delivery: Delivery) -> None:
        if self._parts is not None:
            self._parts.dispatcher.terminate(delivery, revoked=task_id in state.revoked)

    def _on_revoked(self, request: Any = None, terminated: bool = False, **_: Any) -> None:
        """A message that was revoked before it came here is acknowledged by Celery: end its row."""
        if self._parts is None or terminated or request is None:
            return
        if request.task == CHUNK_TASK:
            for job_id in _job_ids(request.args):
                self._parts.dispatcher.cancel(job_id)
        if request.task in (RUN_TASK, GENERATE_TASK):
            job_id = _job_id(request.task, request.id, request.args)
            if _JOB_ID.fullmatch(job_id):
                whole = request.task == GENERATE_TASK
                sent = self._sent(job_id, request.kwargs) if whole else None
                self._parts.dispatcher.cancel(job_id, sent)

    # -- Celery's thread

    def _contained(self, callback: Callable[..., Any]) -> Callable[..., None]:
        """A callback of Celery's that costs nobody but its own message when it raises."""

        def call(*args: Any) -> None:
            try:
                callback(*args)
            except self._broker_errors:
                raise
            except Exception as error:  # noqa: BLE001 (whatever it is, it is this message's)
                request = getattr(callback, "__self__", None)
                logger.warning(
                    "message rejected, Celery cannot work with it: task=%s fault=%s",
                    *(_shown(getattr(request, "id", None)), type(error).__name__),
                )
                if request is not None:
                    request.reject(requeue=False)  # unless it has been acknowledged

        return call

    def _call_in_hub(self, call: Callable[[], Any]) -> None:
        """Run it on the event loop, in the order asked; while there is no connection, later."""
        self._for_hub.append(call)
        if self._hub is not None:
            self._hub.call_soon(self._run_for_hub)

    def _in_hub(self, call: Callable[..., Any]) -> Callable[..., None]:
        return lambda *args: self._call_in_hub(functools.partial(call, *args))

    def _run_for_hub(self) -> None:
        while self._for_hub:
            self._for_hub.popleft()()

    def _wake(self) -> None:
        if self._hub is not None:
            self._hub.call_soon(_nothing)

    # -- stop

    def _on_stop_signal(self, how: str = "Warm", **_: Any) -> None:
        """In a signal handler. The second signal, or a cold one, ends the grace."""
        self._num_stop_signals += 1

    def on_stop(self) -> None:
        """Finish what fits in the grace time, hand back the rest, and tell Celery of each.

        A cold stop calls this inside its signal handler, perhaps in the middle of a warm one.
        """
        parts = self._parts
        if parts is None or self._stopping:
            return
        self._stopping = True
        deadline = time.monotonic() + self.settings.drain_grace_s
        start_thread("exit", functools.partial(self._see_to_the_exit, deadline))
        if self._hub is not None:
            self._hub.call_repeatedly(TURN_S, _nothing)  # that no turn waits for news
        parts.dispatcher.begin_drain()
        logger.info("draining: %d jobs in hand", parts.dispatcher.num_in_hands)
        while parts.dispatcher.num_in_hands and not self._hurried and time.monotonic() < deadline:
            self._turn_hub()
        logger.info("handing back %d jobs", parts.dispatcher.num_in_hands)
        parts.dispatcher.hand_back_all()
        flushed = parts.ledger.flush()
        deadline = time.monotonic() + FLUSH_S
        while time.monotonic() < deadline and not (
            flushed.is_set() and not parts.dispatcher.num_in_hands
        ):
            self._turn_hub()
        if flushed.is_set():
            self._told.set()  # what is left to do takes no time, but on a busy machine
        parts.stop()
        for _ in range(2):  # what the last answers asked for, and the acknowledgements of that
            self._turn_hub()
        self._others.shutdown(cancel_futures=True)
        logger.info("stopped")

    on_terminate = on_stop

    def _see_to_the_exit(self, grace_until: float) -> None:
        """End the process in time though the database or Redis does not answer: jobs that could not
        be handed back are left to the lease."""
        while not self._told.wait(TURN_S / 2):
            if self._hurried:
                grace_until = min(grace_until, time.monotonic())
            if time.monotonic() > grace_until + EXIT_S:
                logger.warning("stopped without an answer: what is in hand is left to the lease")
                logging.shutdown()
                os._exit(0)

    @property
    def _hurried(self) -> bool:
        return self._num_stop_signals > 1 or bool(state.should_terminate)

    def _turn_hub(self) -> None:
        """One turn of the event loop: callbacks, acknowledgements, remote control."""
        try:
            if self._hub is None:
                time.sleep(TURN_S)
            else:
                self._hub.run_once()
            self._run_for_hub()
        except self._broker_errors as error:
            # without Redis there is nothing to acknowledge to; the rows are what counts
            logger.warning("broker lost while stopping: %s", type(error).__name__)
            self._hub = None


def pool_for(settings: Settings, model: ModelEntry, progress: Progress) -> type[EnginePool]:
    """The pool of a deployment's model, in the form Celery wants: a class."""
    bound = {"settings": settings, "model": model, "progress": progress}
    return type("EnginePool", (EnginePool,), bound | {"__module__": EnginePool.__module__})


def _job_ids(args: object) -> list[str]:
    """The jobs of a chunk, those that may be asked of SQL."""
    named = args[0] if isinstance(args, list | tuple) and args else None
    if not isinstance(named, list) or len(named) > MAX_CHUNK:
        return []
    ids = [each for each in named if isinstance(each, str) and _JOB_ID.fullmatch(each)]
    return list(dict.fromkeys(ids))


def _job_id(task_name: str, task_id: object, args: object) -> str:
    """The job a message is about; "" when it does not say. Anyone may write to Redis."""
    if task_name == CHUNK_TASK:
        return ""
    named = task_id
    if task_name == RUN_TASK and isinstance(args, list | tuple) and args:
        named = args[0]
    if not isinstance(named, str):
        return ""
    return named if task_name == RUN_TASK else job_id_of(named)


def _embed(callback: Callable[..., Any]) -> object:
    """The third part of a message's payload: what is to be called when its task ends."""
    payload = getattr(callback, "__self__")._payload  # noqa: B009 (of a bound method, untyped)
    return payload[2] if isinstance(payload, list | tuple) else payload


def _limit_s(limit: object) -> float | None:
    """A time limit as a client sent it; what is no number of seconds limits nothing."""
    if type(limit) not in (int, float):
        return None
    assert isinstance(limit, int | float)
    return float(limit) if limit > 0 else None


def _shown(task_id: object) -> str:
    return repr(task_id)[:80]


def _worth_telling(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Failed to mark task")


def _nothing(*_: Any) -> None:
    """A callback that does nothing."""
