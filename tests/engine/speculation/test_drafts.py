"""Drafts take a step's spare tokens and spare blocks, and nobody's place."""

import random

import pytest

from engine.sequence import FinishReason
from engine.step_plan import StepPlan
from tests.engine.scheduler_driver import EOS, Driver


def drafted(driver, num_drafts=3, token_id=7):
    plan = driver.schedule()
    return driver.scheduler.with_drafts(plan, [(token_id,) * num_drafts] * len(plan.scheduled))


def take(driver, plan, drawn):
    """Give every row that samples these tokens, and all others none."""
    sampled = [
        (list(drawn) if row.draft_ids else drawn[0]) if row.samples else None
        for row in plan.scheduled
    ]
    changed = driver.scheduler.update(plan, sampled, driver.now)
    driver.scheduler.check()
    return changed


def test_confirmed_drafts_count_as_computed_and_the_others_leave_no_trace():
    driver = Driver()
    [sequence] = driver.add(5)
    plan = drafted(driver)
    assert plan.num_tokens == 8
    assert plan.num_drafts == 3
    take(driver, plan, [7, 7, 9])
    assert sequence.generated_ids == [7, 7, 9]
    assert sequence.num_computed_tokens == 7
    assert sequence.num_uncomputed_tokens == 1


def test_a_row_that_does_not_sample_gets_none_and_nor_do_beams():
    driver = Driver(max_num_batched_tokens=4)
    driver.add(9)
    assert drafted(driver).num_drafts == 0
    driver = Driver()
    driver.add(3, options={"num_beams": 2})
    assert drafted(driver).num_drafts == 0


def test_no_more_tokens_are_guessed_than_may_be_generated():
    driver = Driver()
    [sequence] = driver.add(5, max_tokens=3)
    plan = drafted(driver, num_drafts=9)
    assert plan.num_drafts == 2
    take(driver, plan, [7, 7, 7])
    assert sequence.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_was_drawn_behind_the_end_is_dropped(place):
    driver = Driver()
    [sequence] = driver.add(5)
    plan = drafted(driver)
    drawn = [7, 7, 7, 7]
    drawn[place] = EOS
    take(driver, plan, drawn)
    assert sequence.generated_ids == drawn[: place + 1]
    assert sequence.finish_reason is FinishReason.STOP
    assert driver.scheduler.num_free_blocks == driver.scheduler.num_blocks


def test_they_have_only_what_the_step_has_to_spare():
    driver = Driver(max_num_batched_tokens=12)
    driver.add(5)
    driver.add(5)
    assert [len(row.draft_ids) for row in drafted(driver).scheduled] == [2, 0]


def test_they_never_take_a_block_that_a_running_sequence_may_want_next():
    driver = Driver(num_blocks=6, max_num_batched_tokens=64)
    driver.add(8, max_tokens=8)
    driver.add(8, max_tokens=8)
    plan = drafted(driver, num_drafts=4)
    assert plan.num_drafts == 0
    assert driver.scheduler.num_free_blocks == 2


def test_half_a_plan_has_no_drafts():
    driver = Driver()
    driver.add(5)
    half = drafted(driver).half()
    assert (half.num_tokens, half.num_drafts) == (2, 0)


@pytest.mark.parametrize("seed", range(8))
def test_the_books_balance_and_all_ends_whatever_is_guessed(seed):
    draw = random.Random(seed)
    driver = Driver(num_blocks=draw.choice((12, 30)), max_num_batched_tokens=draw.choice((9, 40)))
    sequences = []
    for _ in range(12):
        prompt = [5] * draw.randrange(1, 20)
        sequences += driver.add(prompt, max_tokens=draw.randrange(1, 16), n=draw.choice((1, 1, 3)))
    preempted = 0
    for _ in range(2000):
        if not driver.scheduler.unfinished:
            break
        plan = driver.schedule()
        guesses = [tuple(draw.choices((1, 2), k=draw.randrange(6))) for _ in plan.scheduled]
        plan = driver.scheduler.with_drafts(plan, guesses)
        sampled = []
        for row in plan.scheduled:
            kept = row.draft_ids[: draw.randrange(len(row.draft_ids) + 1)]
            tokens = [*kept, draw.choice((1, 2, 3, 4, EOS))]
            sampled.append((tokens if row.draft_ids else tokens[0]) if row.samples else None)
        driver.scheduler.update(plan, sampled, driver.now)
        driver.scheduler.check()
        preempted = driver.scheduler.num_preemptions
    assert all(sequence.finish_reason is not None for sequence in sequences)
    assert driver.scheduler.num_free_blocks == driver.scheduler.num_blocks
    assert preempted >= 0
    assert isinstance(plan, StepPlan)
