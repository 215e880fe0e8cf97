"""How often a row with an expensive mask takes part in a step, so that its neighbours keep theirs.

A mask that takes no longer than usual costs its row nothing, however many such rows there are. On
those that take longer a step may spend a tenth of its own time. What goes beyond is taken in turns,
one row at a time, and followed by a rest of ten times as long: whatever grammars do, the other rows
keep four fifths of their speed. A row that sits out a step is scheduled again in the next; what it
generates does not depend on it.
"""

from weakref import WeakKeyDictionary

from engine.sequence import Sequence
from engine.step_plan import StepPlan

SHARE = 0.1
ORDINARY_S = 0.0002  # of a mask; measured: 0.03 to 0.1 ms where nothing is unusual
FIRST_BUDGET_S = 0.002  # before any step was timed


class Pacer:
    """Owns no row; told of each plan before and after it ran."""

    def __init__(self) -> None:
        self._budget_s = FIRST_BUDGET_S
        self._rest_until = 0.0
        self._num_turns = 0
        self._last_turn: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def admitted(self, plan: StepPlan, now: float) -> StepPlan:
        """The plan without the rows that rest; the whole of it when all would."""
        resting = set(self._expensive(plan))
        if not resting or len(resting) == len(plan.scheduled):
            return plan
        if now >= self._rest_until:
            turn = min(resting, key=lambda sequence: self._last_turn.get(sequence, -1))
            self._num_turns += 1
            self._last_turn[turn] = self._num_turns
            resting.remove(turn)
        rows = tuple(row for row in plan.scheduled if row.sequence not in resting)
        return StepPlan(rows, plan.block_copies)

    def ran(self, plan: StepPlan, now: float, run_s: float) -> None:
        """Take the cost of the masks that a plan's rows have had, out of all its time."""
        masks_s = sum(cost_s for cost_s, _ in _costs(plan))
        self._budget_s = SHARE * max(0.0, run_s - masks_s)
        if masks_s > self._budget_s:
            self._rest_until = now + (masks_s - self._budget_s) / SHARE

    def _expensive(self, plan: StepPlan) -> list[Sequence]:
        """Those for whom the step's budget is not enough, by what each mask last took."""
        spent_s, expensive = 0.0, []
        for cost_s, sequence in sorted(_costs(plan), key=lambda pair: pair[0]):
            if spent_s + cost_s > self._budget_s:
                expensive.append(sequence)
            spent_s += cost_s
        return expensive


def _costs(plan: StepPlan) -> list[tuple[float, Sequence]]:
    """Of the masks that take longer than usual."""
    return [
        (row.sequence.token_filter.cost_s, row.sequence)
        for row in plan.scheduled
        if row.samples
        and row.sequence.token_filter is not None
        and row.sequence.token_filter.cost_s > ORDINARY_S
    ]
