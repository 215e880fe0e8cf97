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

UNKNOWN = -1  # in place of a token's id


def may_stay_unknown(row: ScheduledSequence) -> bool:
    """Whether the next step can be planned without what this row draws or scores.

    Not that of a beam, which goes on in another place, nor behind drafts, of which nobody knows how
    many count; nor while known tokens are scored, and perhaps nothing else.
    """
    sequence = row.sequence
    return not (
        sequence.params.num_beams > 1
        or row.draft_ids
        or sequence.num_unscored_tokens
        or sequence.ending is not None
    )


@contextmanager
def assumed(plan: StepPlan) -> Iterator[set[Sequence]]:
    """Inside it a plan's rows have run; what it gives is filled with those that lost their blocks.

    The sequence of a row that draws its last token has nothing left to compute.
    """
    rows = [
        (row, row.samples, row.sequence.num_preemptions, row.sequence.num_scored_tokens)
        for row in plan.scheduled
        if row.sequence.state is SequenceState.RUNNING
    ]
    for row, samples, _, _ in rows:
        sequence = row.sequence
        assert sequence.token_ids[-1] != UNKNOWN, sequence
        sequence.num_computed_tokens += row.num_scheduled_tokens
        if samples:
            sequence.token_ids.append(UNKNOWN)
            sequence.is_complete = sequence.num_generated_tokens >= sequence.params.max_tokens
        sequence.mark_scored()
    lost: set[Sequence] = set()
    try:
        yield lost
    finally:
        for row, samples, num_preemptions, num_scored_tokens in rows:
            sequence = row.sequence
            sequence.num_scored_tokens = num_scored_tokens
            if samples:
                assert sequence.token_ids.pop() == UNKNOWN, sequence
                sequence.is_complete = False
            if sequence.num_preemptions != num_preemptions:
                lost.add(sequence)
            elif sequence.state is SequenceState.RUNNING:
                sequence.num_computed_tokens -= row.num_scheduled_tokens
