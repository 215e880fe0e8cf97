"""A step that was begun and whose result has yet to be taken in."""

from collections.abc import Iterable

from engine.sequence import Sequence, SequenceState
from engine.step_plan import StepPlan
from engine.step_result import Launched, StepResult


class InFlight:
    """A plan on its way. Rows whose sequences ended, or lost their blocks, meanwhile say nothing.

    What such a row still writes goes to slots that are written anew before they are read: the
    device computes steps one after the other.
    """

    def __init__(self, plan: StepPlan, launched: Launched | None) -> None:
        self.plan = plan
        self.launched = launched  # None: there was no memory for it
        self._num_preemptions = [row.sequence.num_preemptions for row in plan.scheduled]
        self._dropped: set[Sequence] = set()

    def drop(self, sequences: Iterable[Sequence]) -> None:
        self._dropped |= set(sequences)

    @property
    def is_on_device(self) -> bool:
        """Whether the next step finds there what this one draws."""
        return self.launched is not None and self.launched.drawn is not None

    def draw(self) -> None:
        """Begin what the step may draw now that the one before it is taken in."""
        assert self.launched is not None
        live = self._live()
        drawn = self.launched.draw(live)
        if drawn is not None:
            self.launched = drawn
            self.plan = StepPlan(
                tuple(self.plan.scheduled[i] for i in live), self.plan.block_copies
            )
            self._num_preemptions = [self._num_preemptions[i] for i in live]

    def live_plan(self) -> StepPlan:
        rows = tuple(self.plan.scheduled[i] for i in self._live())
        return StepPlan(rows, self.plan.block_copies)

    def result(self) -> tuple[StepPlan, StepResult]:
        """Of the rows that still say something."""
        assert self.launched is not None
        found = self.launched.wait()
        live = self._live()
        scores = {place: found.scores[i] for place, i in enumerate(live) if i in found.scores}
        return self.live_plan(), StepResult([found.tokens[i] for i in live], scores)

    def _live(self) -> list[int]:
        return [
            i
            for i, (row, num_preemptions) in enumerate(
                zip(self.plan.scheduled, self._num_preemptions, strict=True)
            )
            if row.sequence.state is SequenceState.RUNNING
            and row.sequence.num_preemptions == num_preemptions
            and row.sequence not in self._dropped
        ]
