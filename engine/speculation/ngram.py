"""Guesses from the sequence's own text: what followed when its last tokens stood there before.

Source: Saxena 2023 (prompt lookup decoding).
"""

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from engine.sequence import Sequence as Generation
from engine.step_plan import StepPlan

SIZES = (4, 2)  # of what is looked up: a longer one is believed before a shorter


class NgramIndex:
    """Where each run of a few tokens of one sequence last stood: two numbers for each token."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # run of tokens -> the place behind it
        self._num_seen = 0

    def continuation(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """At most `count` tokens, the ones behind the last place like the end of these."""
        # the run at the very end is not taken in: it would be found in its own place
        for end in range(max(1, self._num_seen), len(token_ids)):
            for size in SIZES:
                if size <= end:
                    self._ends[tuple(token_ids[end - size : end])] = end
        self._num_seen = len(token_ids)
        for size in SIZES:
            place = self._ends.get(tuple(token_ids[-size:]))
            if place is not None and size <= len(token_ids):
                found = tuple(token_ids[place : place + count])
                # near its end a text that repeats itself goes on from its own beginning
                while len(found) < count:
                    found += found[: count - len(found)]
                return found
        return ()


class NgramProposer:
    """An index of each sequence that runs."""

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[Generation, NgramIndex] = WeakKeyDictionary()

    def propose(
        self, plan: StepPlan, counts: Sequence[int], pays: Callable[[int], bool]
    ) -> list[tuple[int, ...]]:
        drafts = [
            self._index(row.sequence).continuation(row.sequence.token_ids, count) if count else ()
            for row, count in zip(plan.scheduled, counts, strict=True)
        ]
        return drafts if pays(sum(map(len, drafts))) else [()] * len(drafts)

    def _index(self, sequence: Generation) -> NgramIndex:
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex()
        return index
