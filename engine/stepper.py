"""How steps follow each other: in turn, or the next made beside one that runs.

On a GPU the processor makes step k + 1 while step k is computed. What k draws stays on the device,
where k + 1 finds it; it is copied back once, and what has ended is found out one step late: the row
that k + 1 has of it then says nothing. What k + 1 may draw is made of the tokens of k (a form, a
penalty) while the device computes its logits: such rows hold up none of the others. Where a plan
itself hangs on the step before (beams, drafts, samples that fork) that is taken in first.

An error in a step is not caught here, but for a lack of device memory.
"""

import gc
from collections.abc import Callable

import torch

from engine.assumed import assumed, may_stay_unknown
from engine.in_flight import InFlight
from engine.model_runner import OverlappingRunner, Runner
from engine.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence
from engine.speculation.speculator import Speculator
from engine.step_plan import StepPlan
from engine.step_result import StepResult
from engine.structured.pacing import Pacer
from engine.totals import Totals

TakeIn = Callable[[StepPlan, StepResult], None]


class Stepper:
    """Owns what is on its way; sequences are the scheduler's."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        totals: Totals,
        clock: Callable[[], float],
        *,
        speculator: Speculator | None,
        has_waiting: Callable[[Sequence], bool],  # whether a request's samples wait
        on_start: Callable[[StepPlan, float], None],
    ) -> None:
        self.speculator = speculator
        self.failed: list[Sequence] = []  # for lack of memory, not yet told of
        self._runner = runner
        self._scheduler = scheduler
        self._totals = totals
        self._clock = clock
        self._pacer = Pacer()
        self._has_waiting = has_waiting
        self._on_start = on_start
        self._in_flight: InFlight | None = None
        self._drew_at = 0.0  # when the last step's draws began

    def step(self, now: float, take_in: TakeIn) -> None:
        """Run a step; `take_in` is given what was run, and what it brought."""
        runner = self._runner
        # drafts are guessed from what is known
        if isinstance(runner, OverlappingRunner) and runner.overlaps and self.speculator is None:
            self._step_beside(runner, now, take_in)
            return
        plan = self._pacer.admitted(self._scheduler.schedule(now), now)
        if self.speculator is not None:
            plan = self.speculator.extended(plan, self._scheduler)
        take_in(*self._run(plan, now))

    def _step_beside(self, runner: OverlappingRunner, now: float, take_in: TakeIn) -> None:
        """Begin a step, then take in the one before, which the device computed meanwhile."""
        before, self._in_flight = self._in_flight, None
        if before is not None and self._may_be_assumed(before):
            with assumed(before.live_plan()) as lost:
                begun = self._begun(runner, before, now)
            begun.drop(lost)
            take_in(*self._awaited(before))
        else:
            if before is not None:
                take_in(*self._awaited(before))
            begun = self._begun(runner, None, now)
            if self._scheduler.untold:  # whose step has been taken in already
                take_in(StepPlan((), ()), StepResult([], {}))
        self._draw(begun, began_at=now if before is None else self._drew_at)
        if begun.launched is None:  # its sequences may have ended since
            take_in(*self._run_in_less_memory(begun.live_plan()))
        elif begun.plan.scheduled:
            self._in_flight = begun
        elif before is None:
            take_in(begun.plan, StepResult([], {}))

    def _may_be_assumed(self, step: InFlight) -> bool:
        # other samples of a prompt fork from where its first one ends
        return step.is_on_device and all(
            may_stay_unknown(row) and not self._has_waiting(row.sequence)
            for row in step.live_plan().scheduled
        )

    def _begun(self, runner: OverlappingRunner, before: InFlight | None, now: float) -> InFlight:
        plan = self._pacer.admitted(self._scheduler.schedule(now), now)
        self._count(plan, now)
        started = self._clock()
        try:
            launched = runner.launch(plan, None if before is None else before.launched)
        except torch.OutOfMemoryError:
            launched = None  # what the traceback holds is freed only once we are out of here
        self._totals.run_s += self._clock() - started
        return InFlight(plan, launched)

    def _draw(self, begun: InFlight, *, began_at: float) -> None:
        """Begin what had to wait for the step before. Masks are made here, beside a step."""
        plan, started = begun.plan, self._clock()
        if begun.launched is not None:
            try:
                begun.draw()
            except torch.OutOfMemoryError:
                begun.launched = None
        self._drew_at = self._clock()
        self._totals.run_s += self._drew_at - started
        self._pacer.ran(plan, self._drew_at, self._drew_at - began_at)

    def _awaited(self, step: InFlight) -> tuple[StepPlan, StepResult]:
        started = self._clock()
        result = step.result()
        self._totals.run_s += self._clock() - started
        return result

    def _count(self, plan: StepPlan, now: float) -> None:
        if not plan.empty:
            self._on_start(plan, now)
            num_used_blocks = self._scheduler.num_blocks - self._scheduler.num_free_blocks
            self._totals.count(plan, num_used_blocks)

    def _run(self, plan: StepPlan, now: float) -> tuple[StepPlan, StepResult]:
        """Run the plan, or what of it the device's memory takes; returns what was run."""
        if plan.empty:
            return plan, StepResult([], {})
        self._count(plan, now)
        started = self._clock()
        try:
            result = self._runner.run(plan)
        except torch.OutOfMemoryError:
            result = None  # what the traceback holds is freed only once we are out of here
        ended = self._clock()
        self._totals.run_s += ended - started
        self._pacer.ran(plan, ended, ended - started)
        if result is None:
            return self._run_in_less_memory(plan)
        if self.speculator is not None:
            num_confirmed = self.speculator.ran(plan, result.tokens, ended - started)
            self._totals.confirmed_tokens += num_confirmed
        return plan, result

    def _run_in_less_memory(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        """Run half the plan; if even that is too much, fail the largest sequence instead.

        What is left out stays uncomputed and is scheduled again. The plan's block copies have to
        be made in any case: block tables point at the destinations already.
        """
        _free_memory()
        half = plan.half()
        try:
            return half, self._runner.run(half)
        except torch.OutOfMemoryError:
            if plan.empty:
                raise  # there is no memory even to copy blocks, and nobody to blame
        _free_memory()
        largest = max((row.sequence for row in plan.scheduled), key=lambda s: s.num_tokens)
        self._scheduler.finish(
            largest,
            FinishReason.ERROR,
            error=f"resource_exhausted: no memory for a step with {largest.num_tokens} tokens",
        )
        self.failed.append(largest)
        copies = StepPlan((), plan.block_copies)
        return copies, self._runner.run(copies)


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
