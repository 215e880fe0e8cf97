"""How much one rendering of a chat template may do: its time, and the size of what it makes.

A single operation cannot be interrupted. So no value may be larger than a bound, operations that
can make much of little are judged before they run (engine.template_guards), and the clock is read
between them. Knows no template.

    TemplateLimitError      too slow or too large
"""

import threading
import time
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from itertools import islice
from typing import Any

from jinja2 import TemplateError

RENDER_LIMIT_S = 5.0  # of one rendering; a long chat takes milliseconds
MAX_SIZE = 16 << 20  # of one value: its characters, and ITEM_SIZE for each item
MAX_MADE = 256 << 20  # of all values that one rendering makes
ITEM_SIZE = 32
MAX_ITEMS = MAX_SIZE // ITEM_SIZE
MAX_HEIGHT = 100  # of lists in lists
MAX_REPEATED = 1 << 20  # items or characters of a value made by multiplication
MAX_INT_BITS = 4096
MAX_DIGITS = 1000  # of a number read from text

CONTAINERS = (list, tuple, dict, KeysView, ValuesView, ItemsView)


class TemplateLimitError(TemplateError):
    """A rendering that took too long, or a value that grew too large."""


def check_size(what: str, size: int, limit: int = MAX_SIZE) -> None:
    if size > limit:
        shown = str(size) if size.bit_length() < 300 else f"2 ** {size.bit_length()}"
        raise TemplateLimitError(f"{what}: {shown} is over the limit of {limit}")


class Budget(threading.local):
    """Of each thread's rendering."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._ends_at = time.monotonic() + RENDER_LIMIT_S
        self._made = 0
        # size and height of each container seen, which is kept so that its id stays its own
        self._measured: dict[int, tuple[Any, int, int]] = {}

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """What the block does counts as one rendering."""
        self._start()
        try:
            yield
        finally:
            self._measured = {}

    def tick(self) -> None:
        if time.monotonic() > self._ends_at:
            raise TemplateLimitError(f"rendering took more than {RENDER_LIMIT_S:g} seconds")

    def made(self, value: Any) -> Any:
        """The value, just made, if there is room for it."""
        self.tick()
        if isinstance(value, str):
            size = len(value)
        elif not isinstance(value, CONTAINERS):
            return value
        elif id(value) in self._measured:
            return value  # it was there before
        else:
            size = ITEM_SIZE * len(value)
            self.measure(value)
        check_size("a value's size", size)
        self._made += size
        check_size("all that the rendering made", self._made, MAX_MADE)
        return value

    def size(self, value: Any) -> int:
        return len(value) if isinstance(value, str) else self.measure(value)[0]

    def measure(self, value: Any) -> tuple[int, int]:
        """Size and height of a value with all that it holds, each as often as it holds it."""
        if isinstance(value, str):
            return len(value), 0
        if isinstance(value, int):
            check_size("bits of a number", value.bit_length(), 4 * MAX_INT_BITS)
            return value.bit_length() // 3, 0
        if not isinstance(value, CONTAINERS):
            return 0, 0
        known = self._measured.get(id(value))
        if known is not None:
            return known[1], known[2]
        size = ITEM_SIZE * len(value)
        height = 0
        children = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        for child in children:
            child_size, child_height = self.measure(child)
            size += child_size
            height = max(height, child_height)
            check_size("a value's size", size)
        check_size("lists in lists", height + 1, MAX_HEIGHT)
        self._measured[id(value)] = value, size, height + 1
        return size, height + 1

    def items(self, value: Any) -> Any:
        """A value to walk through at once: an iterator as a list, which it must have room for."""
        if isinstance(value, Iterator):
            value = self.made(list(islice(value, MAX_ITEMS + 1)))
        if hasattr(value, "__len__"):
            check_size("items", len(value), MAX_ITEMS)
        return value
