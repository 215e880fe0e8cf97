"""How fast a dataset goes, and when it may be done: an interval, as sure as the pace was even."""

from collections import deque
from itertools import pairwise

WINDOW = 240  # marks that are looked at
PARTS = 8  # of the window, whose paces are compared


class Pace:
    """Of this process: what was done before it began says nothing of now."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=WINDOW)

    def mark(self, now: float, done: int, tokens: int) -> None:
        """At most one mark a second is kept."""
        if not self._marks or now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, done, tokens))

    def tokens_per_s(self) -> float | None:
        if len(self._marks) < 2:
            return None
        first, last = self._marks[0], self._marks[-1]
        return (last[2] - first[2]) / (last[0] - first[0])

    def left_s(self, num_left: int) -> tuple[float, float] | None:
        """Least and most seconds; None until there is something to go by."""
        marks = list(self._marks)
        if len(marks) < PARTS + 1 or marks[-1][1] == marks[0][1]:
            return None
        step = (len(marks) - 1) / PARTS
        ends = [marks[round(i * step)] for i in range(PARTS + 1)]
        paces = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(ends)]
        pace = (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])
        spread = sum((each - pace) ** 2 for each in paces) / (PARTS - 1)
        error = 2 * (spread / PARTS) ** 0.5
        return num_left / (pace + error), num_left / max(pace - error, pace / 10)
