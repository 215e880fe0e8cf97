"""Which of a batch's tries have been answered since the last look, wherever they stand in it.

The service gives rows in the order of the file, and runs them in another. A look goes through all
of the batch from its first open try on, page by page; what is known already comes by again, so the
next one begins only a while after.
"""

import time
from typing import Any, Protocol

from bulk.state import OpenBatch, State

REST = 10  # times as long as the look took is it until the next

Line = dict[str, Any]


class Results(Protocol):
    def results(
        self, batch_id: str, num_seen: int, *, skip: bool = False
    ) -> tuple[list[Line], bool] | None: ...


class Look:
    """At one batch, over and over."""

    def __init__(self) -> None:
        self._place = 0  # of the batch, from which the look under way goes on
        self._took_s = 0.0
        self._next = 0.0  # monotonic
        self._last = False  # it began after the batch had ended

    def page(
        self, service: Results, state: State, batch: OpenBatch, *, ended: bool
    ) -> tuple[list[Line], bool] | None:
        """Lines that may be new, and whether there will be no more. None where the service keeps
        them no more."""
        assert batch.batch_id is not None
        if ended and not self._last:
            self._place, self._last, self._next = 0, True, 0.0
        began = time.monotonic()
        if began < self._next:
            return [], False
        first = state.first_asked(batch.number, self._place)
        page = ([], False) if first is None else service.results(batch.batch_id, first, skip=True)
        if page is None:
            return None
        lines, more = page
        now = time.monotonic()
        self._took_s += now - began
        if lines and more:
            self._place = lines[-1]["row"] + 1
            return lines, False
        self._next, self._place, self._took_s = now + REST * self._took_s, 0, 0.0
        return lines, self._last
