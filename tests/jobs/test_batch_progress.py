"""When a batch will be done, said after a twentieth of it."""

import heapq
import random
from dataclasses import replace

import pytest

from jobs.batch_progress import Progress, RowsIn, estimate, limit_reached
from jobs.batch_record import BatchRecord, BatchState, StopReason
from jobs.lifecycle import JobState

SEATS = 16
BATCH = BatchRecord(
    id="b", tenant_id="t", endpoint="/v1/completions", input_file_id="f", metadata=None,
    priority=-5, output_ttl_s=None, state=BatchState.IN_PROGRESS, ending="completed", model="tiny",
    num_rows=0, created_at=0.0, expires_at=9e9, in_progress_at=0.0,
)  # fmt: skip


def summed(rows: list[tuple[int, int]], *, ended: bool) -> RowsIn:
    """Of rows (limit, tokens generated in the end)."""
    return RowsIn(
        num=len(rows),
        completion_tokens=sum(tokens for _, tokens in rows) if ended else 0,
        limits=sum(limit for limit, _ in rows),
        num_limited=sum(limit > 0 for limit, _ in rows),
    )


def run(rows: list[tuple[int, int]], share: float) -> tuple[float, float, float, float]:
    """A batch on an engine of SEATS seats, each row a token a step: the estimate after `share` of
    its tokens and how long the rest really takes, in steps."""
    ends: list[tuple[int, int]] = []  # step, row
    finished, started, now = {}, {}, 0
    for index, (_, tokens) in enumerate(rows):
        if len(ends) == SEATS:
            now, done = heapq.heappop(ends)
            finished[done] = now
        started[index] = now
        heapq.heappush(ends, (now + tokens, index))
    for step, index in ends:
        finished[index] = step
    total = max(finished.values())
    threshold = share * sum(tokens for _, tokens in rows)
    tokens = 0
    for index in sorted(finished, key=finished.__getitem__):
        tokens += rows[index][1]
        at = finished[index]
        if tokens >= threshold:
            break
    states = {
        JobState.SUCCEEDED: [i for i in finished if finished[i] <= at],
        JobState.RUNNING: [i for i in finished if started[i] <= at < finished[i]],
        JobState.QUEUED: [i for i in finished if started[i] > at],
    }
    found = {
        state: summed([rows[i] for i in these], ended=state == JobState.SUCCEEDED)
        for state, these in states.items()
    }
    running_s = sum(at - started[i] for i in states[JobState.RUNNING])
    eta = estimate(replace(BATCH, num_rows=len(rows)), found, float(at), SEATS, float(running_s))
    assert eta is not None
    return eta.s, total - at, eta.low_s, eta.high_s


@pytest.mark.parametrize("seed", range(10))
def test_after_a_twentieth_it_is_right_within_fifteen_percent(seed):
    """Mixed lengths, each as long as its limit, the long ones first as they are planned."""
    draw = random.Random(seed)
    limits = [draw.choice([16, 32, 64, 128, 256]) for _ in range(1000)]
    rows = sorted(((n, n) for n in limits), key=lambda row: -(row[0].bit_length() // 2))
    said, true, low, high = run(rows, 0.05)
    assert said == pytest.approx(true, rel=0.15)
    assert low <= true <= high


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_end_before_their_limit_are_expected_to_go_on_doing_so(seed):
    draw = random.Random(seed)
    rows = [(400, draw.randint(20, 120)) for _ in range(1000)]
    said, true, low, high = run(rows, 0.05)
    assert low <= true <= high
    said, true, _, _ = run(rows, 0.3)
    assert said == pytest.approx(true, rel=0.15)


def test_nothing_is_said_of_what_does_not_run_or_has_hardly_begun():
    few = {JobState.SUCCEEDED: RowsIn(num=9, completion_tokens=9)}
    some = {
        JobState.SUCCEEDED: RowsIn(num=10, completion_tokens=10),
        JobState.QUEUED: RowsIn(num=9),
    }
    assert estimate(BATCH, few, 9.0, SEATS, 0.0) is None
    assert estimate(replace(BATCH, num_rows=19), some, 9.0, SEATS, 0.0) is not None
    assert estimate(replace(BATCH, paused_at=1.0), some, 9.0, SEATS, 0.0) is None
    assert estimate(replace(BATCH, state=BatchState.FINALIZING), some, 9.0, SEATS, 0.0) is None


@pytest.mark.parametrize(
    ("num_failed", "num_ended", "reason"),
    [(19, 19, None), (10, 20, None), (11, 20, StopReason.ERROR_RATE), (100, 1000, None)],
)
def test_an_error_rate_is_of_twenty_rows_at_least(num_failed, num_ended, reason):
    rows = {
        JobState.FAILED: RowsIn(num=num_failed),
        JobState.SUCCEEDED: RowsIn(num=num_ended - num_failed),
    }
    assert limit_reached(replace(BATCH, max_error_rate=0.5), Progress(rows=rows)) == reason


def test_a_budget_counts_prompts_and_outputs():
    rows = {JobState.SUCCEEDED: RowsIn(num=1, prompt_tokens=60, completion_tokens=39)}
    assert limit_reached(replace(BATCH, token_budget=100), Progress(rows=rows)) is None
    reached = limit_reached(replace(BATCH, token_budget=99), Progress(rows=rows))
    assert reached == StopReason.TOKEN_BUDGET
