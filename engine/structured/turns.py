"""Whose turn it is among forms that wait for a trial, and what has to happen by a time.

A form's cost is not known before it was tried, and a crowd of forms that cost much may stand before
one that costs little. So turns go by two orders, one after the other: the shortest text, for what
is cheap is short, and the longest wait, so that a long text has its turns too.
"""

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Thread-safe. `put` and `take` are called equally often."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of all that follows
        self._numbers = itertools.count()
        self._by_size: list[tuple[int, int, T]] = []
        self._by_age: deque[tuple[int, T]] = deque()
        self._waiting: set[int] = set()  # numbers of those who are in both, still
        self._oldest_next = False

    def put(self, item: T, size: int) -> None:
        with self._lock:
            number = next(self._numbers)
            heapq.heappush(self._by_size, (size, number, item))
            self._by_age.append((number, item))
            self._waiting.add(number)

    def take(self) -> T:
        with self._lock:
            oldest_next, self._oldest_next = self._oldest_next, not self._oldest_next
            while True:
                if oldest_next:
                    number, item = self._by_age.popleft()
                else:
                    _, number, item = heapq.heappop(self._by_size)
                if number in self._waiting:
                    self._waiting.remove(number)
                    return item


class Clock:
    """One thread that calls what is due. A call may be early; it must not raise, nor take long."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()  # of all that follows
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._thread: threading.Thread | None = None
        self._ended = False

    def at(self, when: float, call: Callable[[], None]) -> None:
        """`when` is by the monotonic clock."""
        with self._changed:
            if self._ended:
                return
            heapq.heappush(self._due, (when, next(self._numbers), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif self._due[0][2] is call:
                self._changed.notify()

    def end(self) -> None:
        """Nothing is called any more."""
        with self._changed:
            self._ended = True
            self._due.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ended and (not self._due or self._due[0][0] > time.monotonic()):
                    left_s = self._due[0][0] - time.monotonic() if self._due else None
                    self._changed.wait(left_s)
                if self._ended:
                    return
                _, _, call = heapq.heappop(self._due)
            call()
