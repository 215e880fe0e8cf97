"""A step that is still running, taken as done, so that the next one can be made meanwhile.

Its rows count as computed, and each token they draw as known, but not which it is: UNKNOWN stands
for it. All of that is withdrawn before the step's result is taken in; only the next step's plan has
seen it. What that plan cannot rest on is dropped from it: a row whose sequence lost its blocks.

Imports no torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.sequence import Sequence, SequenceState
from engine.step_plan import ScheduledSequence, StepPlan
from engine.token_rules import NO_RULES

UNKNOWN = -1  # in place of a token's id


def may_stay_unknown(row: ScheduledSequence) -> bool:
    """Whether the next step can be made without what this row draws or scores."""
    sequence = row.sequence
    params = sequence.params
    return not (
        sequence.token_filter is not None
        or sequence.token_rules is not NO_RULES
        or params.penalizes
        or params.num_beams > 1
        or params.allowed_token_ids
        or sequence.num_scored_tokens is not None
        or row.draft_ids
    )


@contextmanager
def assumed(plan: StepPlan) -> Iterator[set[Sequence]]:
    """Inside it a plan's rows have run; what it gives is filled with those that lost their blocks.

    The sequence of a row that draws its last token has nothing left to compute.
    """
    rows = [
        (row, row.samples, row.sequence.num_preemptions)
        for row in plan.scheduled
        if row.sequence.state is SequenceState.RUNNING
    ]
    for row, samples, _ in rows:
        sequence = row.sequence
        assert sequence.token_ids[-1] != UNKNOWN, sequence
        sequence.num_computed_tokens += row.num_scheduled_tokens
        if samples:
            sequence.token_ids.append(UNKNOWN)
            sequence.is_complete = sequence.num_generated_tokens >= sequence.params.max_tokens
    lost: set[Sequence] = set()
    try:
        yield lost
    finally:
        for row, samples, num_preemptions in rows:
            sequence = row.sequence
            if samples:
                assert sequence.token_ids.pop() == UNKNOWN, sequence
                sequence.is_complete = False
            if sequence.num_preemptions != num_preemptions:
                lost.add(sequence)
            elif sequence.state is SequenceState.RUNNING:
                sequence.num_computed_tokens -= row.num_scheduled_tokens
