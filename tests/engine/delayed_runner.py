"""A device that computes a step only when its result is waited for, as late as any could.

What a step reads of its sequences it has to take along when it is launched; tokens not known by
then it finds where the step before has left them, as on a GPU. What rows with penalties may draw it
is told when the step before has been read, and not before.
"""

import copy

import torch

from engine.assumed import UNKNOWN
from engine.step_plan import ScheduledSequence, StepPlan
from engine.step_result import StepResult
from tests.engine.scripted_runner import ScriptedRunner


class DelayedStep:
    drawn = ()  # on the device

    def __init__(self, runner, plan, before):
        self._runner, self._before = runner, before
        self._given = plan
        self._looks_back = any(
            row.samples and row.sequence.params.penalizes for row in plan.scheduled
        )
        self.has_drawn = False
        self._plan = StepPlan(
            tuple(
                ScheduledSequence(frozen(r.sequence), r.num_scheduled_tokens)
                for r in plan.scheduled
            ),
            plan.block_copies,
        )
        self.tokens = {}  # by seq_id
        self.done = False

    def draw(self, live):
        assert not self.has_drawn
        self.has_drawn = True
        if not self._looks_back:
            return None
        assert self._before is None or self._before.done, "it is not known what to penalize"
        for i in live:
            given, taken = self._given.scheduled[i].sequence, self._plan.scheduled[i].sequence
            assert UNKNOWN not in given.token_ids
            assert len(given.token_ids) == len(taken.token_ids)
        self._live = list(live)
        return self

    def wait(self):
        assert not self.done
        assert self.has_drawn
        self.done = True
        for row in self._plan.scheduled:
            ids = row.sequence.token_ids
            if ids[-1] == UNKNOWN:
                assert self._before.done, "steps are computed in order"
                ids[-1] = self._before.tokens[row.sequence.seq_id]
            assert UNKNOWN not in ids
        result = ScriptedRunner.run(self._runner, self._plan)
        for row, token in zip(self._plan.scheduled, result.tokens, strict=True):
            self.tokens[row.sequence.seq_id] = token if isinstance(token, int) else 0
        self._before = None
        if not self._looks_back:
            return result
        return StepResult([result.tokens[i] for i in self._live], {})


def frozen(sequence):
    taken = copy.copy(sequence)
    taken.token_ids, taken.block_table = [*sequence.token_ids], [*sequence.block_table]
    return taken


class DelayedRunner(ScriptedRunner):
    """`fail` says of each step's tokens whether there is no memory for it."""

    overlaps = True

    def __init__(self, *args, fail=lambda num_tokens: False, **settings):
        super().__init__(*args, **settings)
        self.num_overlapped = 0
        self.fail = fail
        self._last = None

    def run(self, plan):
        assert self._last is None or self._last.done, "a step is run beside another"
        if self.fail(plan.num_tokens):
            raise torch.OutOfMemoryError("out of memory")
        return super().run(plan)

    def launch(self, plan, before):
        if plan.empty and not plan.block_copies:
            return Nothing()
        if self.fail(plan.num_tokens):
            raise torch.OutOfMemoryError("out of memory")
        running = self._last is not None and not self._last.done
        assert not running or self._last.has_drawn, "what the last step draws is not on its way"
        self.num_overlapped += running
        self._last = DelayedStep(self, plan, before)
        return self._last


class Nothing:
    done, tokens, drawn = True, {}, None

    def draw(self, live):
        return None

    def wait(self):
        return StepResult([], {})
