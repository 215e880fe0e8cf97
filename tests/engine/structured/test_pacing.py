"""Rows with expensive masks take turns; the others run in every step."""

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step_plan import ScheduledSequence, StepPlan
from engine.structured.pacing import ORDINARY_S, Pacer

STEP_S = 0.030


class Filter:
    def __init__(self, cost_s):
        self.cost_s = cost_s

    def mask(self, generated_ids):
        raise NotImplementedError


def rows(*costs_s):
    sequences = [
        Sequence(
            seq_id=i,
            request_id=str(i),
            sample_index=0,
            token_ids=[1, 2],
            num_prompt_tokens=1,
            params=SamplingParams(max_tokens=9),
            seed=0,
            num_computed_tokens=1,
            token_filter=None if cost_s is None else Filter(cost_s),
        )
        for i, cost_s in enumerate(costs_s)
    ]
    return StepPlan(tuple(ScheduledSequence(each, 1) for each in sequences), ((3, 4),))


def drive(plan, num_steps):
    """How often each row ran, and the time of all steps."""
    pacer, now = Pacer(), 0.0
    counts = [0] * len(plan.scheduled)
    for _ in range(num_steps):
        admitted = pacer.admitted(plan, now)
        assert admitted.block_copies == plan.block_copies
        filters = [row.sequence.token_filter for row in admitted.scheduled]
        run_s = STEP_S + sum(each.cost_s for each in filters if each is not None)
        now += run_s
        pacer.ran(admitted, now, run_s)
        for row in admitted.scheduled:
            counts[row.sequence.seq_id] += 1
    return counts, now


def test_cheap_masks_rest_nobody():
    counts, _ = drive(rows(None, 0.0001, 0.0005, 0.001, None), 50)
    assert counts == [50] * 5


def test_however_many_ordinary_masks_rest_nobody():
    """A hundred rows with JSON are no reason to hold them up for the sake of one without."""
    counts, _ = drive(rows(None, *[ORDINARY_S] * 100), 50)
    assert counts == [50] * 101


def test_neighbours_keep_four_fifths_of_their_speed():
    for costs in ([0.1], [0.02] * 8, [0.003] * 20, [ORDINARY_S * 1.1] * 40, [0.5, 0.001, 0.02]):
        counts, total_s = drive(rows(None, None, *costs), 2000)
        assert counts[:2] == [2000, 2000]
        assert total_s <= 2000 * STEP_S * 1.25, costs


def test_every_expensive_row_gets_its_turns():
    counts, _ = drive(rows(None, 0.02, 0.02, 0.05, 0.0001), 3000)
    assert counts[0] == counts[4] == 3000
    assert min(counts[1:4]) > 50
    assert max(counts[1:4]) - min(counts[1:4]) <= 2


def test_rows_among_their_like_do_not_rest():
    counts, _ = drive(rows(0.02, 0.1), 20)
    assert counts == [20, 20]


def test_a_row_that_only_computes_its_prompt_does_not_rest():
    plan = rows(None, 0.5)
    plan.scheduled[1].sequence.token_ids += [3, 4]
    counts, _ = drive(plan, 10)
    assert counts == [10, 10]
