"""When requests end by the clock, if nothing has ended them before.

Told the time, reads no clock.
"""

from heapq import heapify, heappop, heappush

SPARE = 64  # entries of ended requests that are not worth tidying up


class Deadlines:
    """A heap with one entry for each request, and for each ended one that is still to be removed.

    Those are no more than the others: a deadline may be weeks away, and millions of requests end
    in that time.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []  # (deadline, arrival, request)
        self._arrivals: dict[str, int] = {}  # of requests that have not ended

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request_id: str, deadline: float, arrival: int) -> None:
        """`arrival` tells requests apart that had the same id one after another."""
        self._arrivals[request_id] = arrival
        heappush(self._heap, (deadline, arrival, request_id))

    def drop(self, request_id: str) -> None:
        """It has ended, with a deadline or without one."""
        self._arrivals.pop(request_id, None)
        if len(self._heap) > 2 * len(self._arrivals) + SPARE:
            self._heap = [entry for entry in self._heap if self._is_open(entry)]
            heapify(self._heap)

    def pop(self, now: float) -> str | None:
        """A request whose deadline has come, earliest first; None where there is no other."""
        while self._heap and self._heap[0][0] <= now:
            entry = heappop(self._heap)
            if self._is_open(entry):
                del self._arrivals[entry[2]]
                return entry[2]
        return None

    def _is_open(self, entry: tuple[float, int, str]) -> bool:
        _, arrival, request_id = entry
        return self._arrivals.get(request_id) == arrival
