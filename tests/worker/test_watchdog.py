"""When an engine is stuck, and what is done about it."""

import threading
import time

import pytest

from worker import watchdog
from worker.watchdog import Progress, Watchdog


def look(progress: Progress, now: float, *, steps: int, busy: bool = True, restarts: int = 0):
    progress.look(restarts=restarts, steps=steps, busy=busy, now=now)
    return progress.stalled


def test_an_engine_that_steps_is_not_stuck_however_long_its_steps_last():
    progress = Progress(stall_s=60)
    for now in range(1000):
        assert not look(progress, now, steps=now // 59)


def test_an_engine_with_work_is_stuck_at_the_stall_limit_and_not_before():
    progress = Progress(stall_s=60)
    for now in range(100):
        assert look(progress, now, steps=7) == (now >= 60)


def test_where_steps_take_long_one_may_take_ten_times_as_long():
    progress = Progress(stall_s=60)
    now = 0
    for step in range(5):
        for _ in range(20):  # each of 20 s
            assert not look(progress, now, steps=step)
            now += 1
    began = now - 1  # seen first when the last step began
    while not look(progress, now, steps=4):
        now += 1
    assert 180 <= now - began <= 221


def test_many_quick_steps_between_two_looks_allow_no_more_than_the_limit():
    progress = Progress(stall_s=60)
    for now in range(100):
        assert not look(progress, now, steps=50 * now)
    for now in range(100, 200):
        assert look(progress, now, steps=50 * 99) == (now >= 159)


def test_an_idle_engine_is_never_stuck():
    progress = Progress(stall_s=60)
    for now in range(0, 1000):
        assert not look(progress, now, steps=7, busy=False)


def test_work_after_a_long_rest_has_the_whole_time():
    progress = Progress(stall_s=60)
    for now in range(500):
        look(progress, now, steps=7, busy=False)
    for now in range(500, 600):
        assert look(progress, now, steps=7) == (now >= 559)


def test_a_new_process_that_counts_from_nothing_is_progress():
    progress = Progress(stall_s=60)
    for now in range(50):
        look(progress, now, steps=1)
    for now in range(50, 110):
        assert not look(progress, now, steps=1, restarts=1)


@pytest.mark.parametrize("gap_s", [61, 10_000])
def test_time_in_which_nobody_looked_says_nothing_of_the_engine(gap_s):
    """The worker slept or got no processor: reports of many steps may wait to be read."""
    progress = Progress(stall_s=60)
    look(progress, 0, steps=7)
    assert not look(progress, gap_s, steps=7)
    for now in range(gap_s + 1, gap_s + 100):
        assert look(progress, now, steps=7) == (now >= gap_s + 59)


class Engine:
    num_restarts = 0
    num_steps = 7

    def __init__(self) -> None:
        self.killed = threading.Event()

    def kill(self) -> None:
        self.killed.set()


class Dispatcher:
    engine_busy = True
    num_checks = 0

    def check_time(self) -> None:
        self.num_checks += 1


def test_a_stuck_engine_is_killed_and_nothing_else_waits_for_it(monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 0.01)
    engine, dispatcher = Engine(), Dispatcher()
    dog = Watchdog(dispatcher=dispatcher, engine=engine, stall_s=0.2)
    dog.start()
    assert not dog.stalled
    assert engine.killed.wait(30)
    assert dog.stalled
    engine.num_restarts, before = 1, dispatcher.num_checks
    deadline = time.monotonic() + 30
    while dog.stalled or dispatcher.num_checks == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    dog.stop()
