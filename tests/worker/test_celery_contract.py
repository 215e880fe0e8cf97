"""Each thing inside Celery and kombu that EnginePool stands on, held on its own.

A real Celery consumer runs in a thread, on a real Redis, with a pool that records what is done to
it. When a new release fails here, worker/pool.py is to be read again before the pins are moved.
"""

import os
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis
from billiard.einfo import ExceptionInfo
from celery import Celery, signals
from celery.concurrency.base import BasePool
from celery.exceptions import Ignore, Retry
from celery.worker import state
from celery.worker.worker import WorkController
from kombu.asynchronous import Hub, set_event_loop

from jobs.celery_app import RUN_TASK, make_app, queue_for
from jobs.settings import ModelEntry, Settings

QUEUE = queue_for("m")
TIMEOUT_S = 30.0


@dataclass(eq=False)
class Applied:
    """What a pool got for one message, and what Celery did to it later."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    terminated: list[bool] = field(default_factory=list)  # was it revoked by then?

    @property
    def task_id(self) -> str:
        return self.args[1]

    def terminate(self, signal=None) -> None:
        self.terminated.append(self.task_id in state.revoked)

    def accept(self) -> None:
        self.options["accept_callback"](os.getpid(), time.monotonic())

    def end(self, error: Exception | None = None) -> None:
        self.options["callback"]((error is not None, error and info_of(error), 0.1))


class RecordingPool(BasePool):
    signal_safe = False
    body_can_be_buffer = True
    task_join_will_block = False
    capacity: ClassVar[int] = 2

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.events: list[str] = []
        self.applied: list[Applied] = []
        self.hubs: list[Hub] = []

    @property
    def num_processes(self) -> int:
        return type(self).capacity

    def on_start(self) -> None:
        self.events.append("start")

    def register_with_event_loop(self, loop) -> None:
        self.events.append("register")
        self.hubs.append(loop)
        loop.call_repeatedly(0.05, lambda: None)

    def on_apply(self, target, args, kwargs, **options) -> Applied:
        applied = Applied(args, options)
        self.applied.append(applied)
        return applied

    def terminate_job(self, pid, signal=None) -> None:
        self.events.append(f"terminate_job {pid == os.getpid()}")

    def on_stop(self) -> None:
        self.events.append("stop")
        for applied in self.applied:
            applied.accept()
        self.hubs[-1].run_once()


def live_timers(hub: Hub) -> int:
    return sum(not scheduled.entry.canceled for scheduled in hub.timer.queue)


def info_of(error: Exception) -> ExceptionInfo:
    try:
        raise error
    except (Ignore, Retry, RuntimeError):
        return ExceptionInfo()


class Bench:
    """A Celery worker in a thread."""

    def __init__(self, redis_url: str) -> None:
        RecordingPool.capacity = 2
        settings = Settings(redis_url=redis_url, models=(ModelEntry(name="m", path="m"),))
        self.app: Celery = make_app(settings)
        self.app.conf.worker_pool = RecordingPool
        self.redis = redis.Redis.from_url(redis_url)
        self.worker: Any = WorkController(
            app=self.app,
            concurrency=100,
            queues=[QUEUE],
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )
        self._thread = threading.Thread(target=self.worker.start)
        self._thread.start()
        self.until(lambda: "register" in self.pool.events)

    @property
    def pool(self) -> RecordingPool:
        return self.worker.pool

    def send(self, num_messages: int = 1, **options) -> list[str]:
        ids = [f"job_{number}" for number in range(num_messages)]
        for job_id in ids:
            self.app.send_task(RUN_TASK, args=[job_id], task_id=job_id, queue=QUEUE, **options)
        return ids

    def take(self, num_messages: int = 1) -> list[Applied]:
        self.until(lambda: len(self.pool.applied) >= num_messages)
        return self.pool.applied

    def waiting(self) -> int:
        return self.redis.llen(f"tokenmill:{QUEUE}")

    def unacknowledged(self) -> int:
        return self.redis.hlen("tokenmill:unacked")

    def in_loop(self, call: Callable[[], Any]) -> None:
        """Run it on the worker's thread, as the pool does."""
        done = threading.Event()
        self.pool.hubs[-1].call_soon(lambda: (call(), done.set()))
        assert done.wait(TIMEOUT_S)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self._thread.is_alive(), "the worker ended"
            assert time.monotonic() < deadline, "did not happen"
            time.sleep(0.01)

    def stop(self) -> None:
        state.should_stop = 0
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.stop()
        state.should_stop = None
        state.reset_state()
        set_event_loop(None)
        self.redis.close()
        self.app.close()


@pytest.fixture
def bench(valkey_url) -> Iterator[Bench]:
    bench = Bench(valkey_url)
    yield bench
    bench.close()


def test_the_pins_are_what_is_tested_here():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    pins = dict(line.split("==") for line in project["project"]["dependencies"] if "==" in line)
    assert set(pins) == {"celery", "kombu", "billiard", "redis"}
    assert {name: version(name) for name in pins} == pins


def test_a_pool_is_asked_how_many_it_can_take_before_every_message(bench):
    bench.send(6)
    bench.take(2)
    time.sleep(0.3)
    assert len(bench.pool.applied) == 2
    assert bench.waiting() == 4
    RecordingPool.capacity = 5
    bench.in_loop(lambda: None)  # a wake is all it needs
    bench.take(5)
    assert bench.waiting() == 1
    bench.in_loop(bench.pool.applied[0].end)
    bench.take(6)


def test_a_message_tells_its_task_its_id_its_arguments_and_its_limits(bench):
    bench.send(1, kwargs={"a": 1}, time_limit=9, soft_time_limit=8)
    [applied] = bench.take()
    name, task_id, request = applied.args[:3]
    assert (name, task_id) == (RUN_TASK, "job_0")
    assert (request["args"], request["kwargs"]) == (["job_0"], {"a": 1})
    assert applied.options["timeout"] == 9
    assert applied.options["soft_timeout"] == 8
    assert applied.options["correlation_id"] == "job_0"
    assert set(applied.options) >= {"callback", "accept_callback", "timeout_callback"}


def test_the_callbacks_are_methods_of_a_request_that_can_be_rejected(bench):
    link = bench.app.signature("some.task")
    bench.send(1, link=link, link_error=link)
    [applied] = bench.take()
    request = applied.options["accept_callback"].__self__
    assert request is applied.options["callback"].__self__
    assert request is applied.options["timeout_callback"].__self__
    embed = request._payload[2]
    assert [each["task"] for each in embed["callbacks"] + embed["errbacks"]] == ["some.task"] * 2
    embed.clear()
    assert (request.errbacks, request.chord, request._context.errbacks) == (None, None, None)
    bench.in_loop(lambda: request.reject(requeue=False))
    bench.until(lambda: bench.unacknowledged() == bench.waiting() == 0)


def test_a_message_is_acknowledged_when_it_is_accepted_not_before(bench):
    bench.send()
    [applied] = bench.take()
    assert bench.unacknowledged() == 1
    bench.in_loop(applied.accept)
    bench.until(lambda: bench.unacknowledged() == 0)
    assert len(state.active_requests) == 1


@pytest.mark.parametrize(
    "error", [None, Ignore(), Retry("later"), RuntimeError("failed")], ids=lambda e: repr(e)
)
def test_an_end_of_any_kind_frees_the_place(bench, error):
    bench.send()
    [applied] = bench.take()
    bench.in_loop(applied.accept)
    bench.in_loop(lambda: applied.end(error))
    assert len(state.reserved_requests) == len(state.active_requests) == 0


def test_ignore_acknowledges_a_message_that_was_never_accepted(bench):
    bench.send()
    [applied] = bench.take()
    bench.in_loop(lambda: applied.end(Ignore()))
    bench.until(lambda: bench.unacknowledged() == 0)


def test_a_hard_limit_ends_the_request_and_a_soft_one_does_not(bench):
    bench.send()
    [applied] = bench.take()
    bench.in_loop(applied.accept)
    bench.in_loop(lambda: applied.options["timeout_callback"](True, 1.0))
    assert len(state.active_requests) == 1
    bench.in_loop(lambda: applied.options["timeout_callback"](False, 2.0))
    assert len(state.active_requests) == 0


def test_a_revoke_with_terminate_calls_what_on_apply_returned(bench):
    bench.send()
    [applied] = bench.take()
    bench.in_loop(applied.accept)
    bench.app.control.revoke("job_0", terminate=True)
    bench.until(lambda: applied.terminated == [True])
    assert "terminate_job True" in bench.pool.events


def test_a_revoke_before_acceptance_terminates_at_once_and_again_when_accepted(bench):
    bench.send()
    [applied] = bench.take()
    bench.app.control.revoke("job_0", terminate=True)
    bench.until(lambda: applied.terminated == [True])
    bench.in_loop(applied.accept)
    assert applied.terminated == [True, True]
    bench.until(lambda: bench.unacknowledged() == 0)


def test_a_revoked_message_is_acknowledged_and_signalled_without_reaching_the_pool(bench):
    revoked = []

    def on_revoked(request=None, terminated=False, **_):
        revoked.append((request.task, request.id, terminated))

    signals.task_revoked.connect(on_revoked)
    bench.app.control.revoke("job_0")
    bench.until(lambda: "job_0" in state.revoked)
    bench.send()
    bench.until(lambda: revoked == [(RUN_TASK, "job_0", False)])
    bench.until(lambda: bench.unacknowledged() == bench.waiting() == 0)
    assert bench.pool.applied == []


def test_a_cold_stop_terminates_what_is_active_without_revoking_it(bench):
    bench.send()
    [applied] = bench.take()
    bench.in_loop(applied.accept)
    bench.in_loop(bench.worker.consumer.cancel_active_requests)
    assert applied.terminated == [False]


def test_a_warm_stop_closes_the_door_first_and_lets_the_pool_acknowledge(bench):
    bench.send(2)
    bench.take(2)
    bench.stop()
    assert bench.pool.events[-1] == "stop"
    assert bench.unacknowledged() == 0
    bench.send(1)
    assert bench.waiting() == 1


@pytest.mark.filterwarnings("ignore::celery.exceptions.CPendingDeprecationWarning")
def test_a_reconnection_registers_the_pool_again_and_brings_back_what_was_not_accepted(bench):
    bench.send(2)
    first, second = bench.take(2)
    bench.in_loop(first.accept)
    bench.until(lambda: bench.unacknowledged() == 1)
    RecordingPool.capacity = 3  # else it does not listen, and hears of nothing
    bench.in_loop(lambda: None)
    num_timers = live_timers(bench.pool.hubs[0])
    bench.redis.client_kill_filter(_type="normal", skipme=True)
    bench.until(lambda: bench.pool.events.count("register") == 2)
    bench.until(lambda: live_timers(bench.pool.hubs[1]) == num_timers)
    # what was not accepted was put back by the closing connection: it comes a second time
    again = bench.take(3)[2]
    assert (again.task_id, len(state.reserved_requests)) == (second.task_id, 2)
    bench.in_loop(second.accept)  # an acknowledgement over a connection that is gone: no error
    for applied in (first, second, again):
        bench.in_loop(applied.end)
    assert len(state.reserved_requests) == 0


def test_the_hub_runs_what_another_thread_gives_it_without_waiting_for_its_poll():
    hub = Hub()
    reader, writer = os.pipe()
    hub.add_reader(reader, lambda: None)  # without a descriptor it sleeps 0.1 s and polls nothing
    hub.run_once()
    hub.call_repeatedly(10.0, lambda: None)
    called = threading.Event()
    threading.Timer(0.2, hub.call_soon, [called.set]).start()
    began = time.monotonic()
    while not called.is_set():
        hub.run_once()
    assert time.monotonic() - began < 5.0
    hub.close()
    os.close(reader)
    os.close(writer)


def test_what_is_given_to_a_hub_together_may_run_in_any_order():
    """Why the pool keeps a queue of its own and gives the hub only the news of it."""
    assert isinstance(Hub()._ready, set)
