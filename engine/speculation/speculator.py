"""Which rows of a plan get how many drafts, and what became of them."""

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from engine.drafts import max_num_drafts
from engine.scheduler import Scheduler
from engine.sequence import Sequence as Generation
from engine.speculation.gate import Gate
from engine.step_plan import ScheduledSequence, StepPlan
from engine.structured.pacing import ORDINARY_S


class Proposer(Protocol):
    """Guesses what comes next."""

    def propose(
        self, plan: StepPlan, counts: Sequence[int], pays: Callable[[int], bool]
    ) -> list[tuple[int, ...]]:
        """At most counts[i] tokens behind row i's known ones; none where so many do not pay."""


class Speculator:
    """Owns how many drafts each sequence gets: fewer after a wrong guess, more after right ones."""

    def __init__(
        self,
        proposer: Proposer,
        num_drafts: int,  # for a sequence in a step, at most
        clock: Callable[[], float],
    ) -> None:
        self.proposer = proposer
        self._num_drafts = num_drafts
        self._gate = Gate()
        self._counts: WeakKeyDictionary[Generation, int] = WeakKeyDictionary()
        self._clock = clock
        self._propose_s = 0.0  # for the step that is about to run

    def extended(self, plan: StepPlan, scheduler: Scheduler) -> StepPlan:
        """The plan with drafts, where they pay and there is room."""
        began = self._clock()
        counts = [self._count(row) for row in plan.scheduled]
        num_drawing = sum(row.samples for row in plan.scheduled)

        def pays(num_drafts: int) -> bool:
            return num_drafts > 0 and self._gate.pays(
                num_drawing=num_drawing, num_tokens=plan.num_tokens, num_drafts=num_drafts
            )

        if any(counts):
            drafts = self.proposer.propose(plan, counts, pays)
            drafts = [
                _in_form(row, draft_ids)
                for row, draft_ids in zip(plan.scheduled, drafts, strict=True)
            ]
            plan = scheduler.with_drafts(plan, drafts)
        self._propose_s = self._clock() - began
        return plan

    def ran(self, plan: StepPlan, tokens: Sequence[object], run_s: float) -> int:
        """Take in a step's result and its time; returns how many drafts were confirmed."""
        num_confirmed = 0
        for row, drawn in zip(plan.scheduled, tokens, strict=True):
            if row.draft_ids:
                confirmed = len(drawn) - 1 if isinstance(drawn, list) else 0
                num_confirmed += confirmed
                self._counts[row.sequence] = self._next_count(len(row.draft_ids), confirmed)
        if not plan.empty:
            self._gate.ran(
                num_tokens=plan.num_tokens,
                num_drafts=plan.num_drafts,
                num_confirmed=num_confirmed,
                run_s=run_s,
                propose_s=self._propose_s,
            )
        return num_confirmed

    def _count(self, row: ScheduledSequence) -> int:
        token_filter = row.sequence.token_filter
        if token_filter is not None and token_filter.cost_s > ORDINARY_S:
            return 0  # each draft takes another mask
        return min(max_num_drafts(row), self._counts.get(row.sequence, self._num_drafts))

    def _next_count(self, num_drafts: int, num_confirmed: int) -> int:
        if num_confirmed == num_drafts:
            return min(2 * num_drafts, self._num_drafts)
        return max(1, (num_drafts + num_confirmed) // 2)


def _in_form(row: ScheduledSequence, draft_ids: tuple[int, ...]) -> tuple[int, ...]:
    """As many of the drafts as the sequence's form allows."""
    token_filter = row.sequence.token_filter
    if token_filter is None or not draft_ids:
        return draft_ids
    return draft_ids[: token_filter.num_allowed(row.sequence.generated_ids, draft_ids)]
