"""The two orders of turns, and the clock behind the answers."""

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from engine.structured.turns import Clock, Turns


def test_the_shortest_and_the_oldest_take_turns():
    turns = Turns[str]()
    for item, size in (("old", 90), ("older than most", 80), ("short", 1), ("shorter", 0)):
        turns.put(item, size)
    assert [turns.take() for _ in range(4)] == ["shorter", "old", "short", "older than most"]


@given(st.lists(st.integers(0, 3)), st.data())
def test_each_is_taken_once(sizes, data):
    turns = Turns[int]()
    taken = []
    for item, size in enumerate(sizes):
        turns.put(item, size)
        if data.draw(st.booleans()):
            taken.append(turns.take())
    taken += [turns.take() for _ in range(len(sizes) - len(taken))]
    assert sorted(taken) == list(range(len(sizes)))


def test_a_crowd_of_short_ones_does_not_hold_up_the_oldest():
    turns = Turns[str]()
    turns.put("long", 1000)
    for number in range(100):
        turns.put(f"short {number}", 1)
    assert "long" in [turns.take() for _ in range(2)]


def test_the_clock_calls_in_the_order_of_time():
    clock, called, all_called = Clock("test"), [], threading.Event()
    now = time.monotonic()
    clock.at(now + 0.06, all_called.set)
    clock.at(now + 0.04, lambda: called.append(2))
    clock.at(now + 0.02, lambda: called.append(1))
    clock.at(now - 1.0, lambda: called.append(0))
    assert all_called.wait(10)
    assert called == [0, 1, 2]
    clock.end()


def test_after_its_end_the_clock_calls_nothing():
    clock, called = Clock("test"), threading.Event()
    clock.at(time.monotonic() + 0.05, called.set)
    clock.end()
    clock.at(time.monotonic(), called.set)
    assert not called.wait(0.2)
