"""Who is computed in a step, and at whose cost."""

import pytest

from engine.capacity import CapacityError
from engine.sequence import FinishReason, SequenceState
from tests.engine.scheduler_driver import Driver


def test_a_prompt_is_computed_then_one_token_a_step():
    driver = Driver()
    (sequence,) = driver.add(10, max_tokens=3)
    assert driver.step(5) == {sequence: 10}
    assert driver.step(6) == {sequence: 1}
    assert driver.step(7) == {sequence: 1}
    assert sequence.generated_ids == [5, 6, 7]
    assert sequence.finish_reason is FinishReason.LENGTH
    assert driver.scheduler.num_free_blocks == driver.scheduler.num_blocks
    assert not driver.scheduler.unfinished


def test_only_the_row_that_catches_up_samples():
    driver = Driver(max_num_batched_tokens=6)
    driver.add(10)
    first, second = driver.schedule(), None
    assert [row.samples for row in first.scheduled] == [False]
    driver.update(first)
    second = driver.schedule()
    assert [row.samples for row in second.scheduled] == [True]
    assert second.num_tokens == 4


def test_a_long_prompt_is_computed_in_chunks_beside_decodes():
    driver = Driver(max_num_batched_tokens=8)
    (short,) = driver.add(4)
    driver.step()
    (long,) = driver.add(20)
    assert driver.step() == {short: 1, long: 7}
    assert driver.step() == {short: 1, long: 7}
    assert driver.step() == {short: 1, long: 6}
    assert driver.step() == {short: 1, long: 1}


def test_a_prompt_ahead_leaves_every_decode_behind_a_token():
    driver = Driver(max_num_batched_tokens=8)
    (decoding,) = driver.add(4)
    driver.step()
    (urgent,) = driver.add(20, priority=1)
    for _ in range(2):
        assert driver.step() == {urgent: 7, decoding: 1}


def test_no_step_exceeds_its_budget_of_tokens_or_sequences():
    driver = Driver(max_num_batched_tokens=10, max_num_seqs=3)
    for _ in range(6):
        driver.add(7)
    while driver.scheduler.unfinished:
        plan = driver.schedule()
        assert plan.num_tokens <= 10
        assert 0 < len(plan.scheduled) <= 3
        driver.update(plan)


def test_more_sequences_than_tokens_in_a_step_still_all_move():
    driver = Driver(max_num_batched_tokens=2, max_num_seqs=8)
    for _ in range(4):
        driver.add(1, max_tokens=4)
    assert len(driver.step()) == 2
    assert driver.drain() < 20


def test_nobody_is_let_in_for_whom_no_token_is_left():
    """So that prompts with the same beginning find it computed when their turn comes."""
    driver = Driver(max_num_batched_tokens=16)
    prompt = list(range(1, 17))
    (first,) = driver.add(prompt)
    (second,) = driver.add(prompt)
    assert driver.step() == {first: 16}
    assert driver.step() == {first: 1, second: 4}
    assert second.num_cached_tokens == 12


def test_sequences_are_let_in_in_order_of_arrival():
    driver = Driver(max_num_seqs=2)
    (first,), (second,), (third,) = driver.add(3), driver.add(3), driver.add(3)
    assert list(driver.step()) == [first, second]
    driver.drain()
    assert third.finish_reason is FinishReason.LENGTH


def test_a_small_prompt_does_not_pass_a_large_one():
    driver = Driver(num_blocks=8)
    driver.add(16)
    driver.step()
    (large,) = driver.add(20)
    (small,) = driver.add(2)
    driver.step()
    assert large.state is SequenceState.WAITING
    assert small.state is SequenceState.WAITING
    driver.drain()


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers():
    driver = Driver(num_blocks=5, max_model_len=100)
    with pytest.raises(CapacityError, match="21 tokens, the KV cache holds 20") as refused:
        driver.add(13, max_tokens=8)
    assert (refused.value.needed, refused.value.available) == (21, 20)
    assert refused.value.param == "max_tokens"
    with pytest.raises(CapacityError) as refused:
        driver.add(20, max_tokens=1)
    assert refused.value.param == "prompt"
    assert not driver.scheduler.unfinished
    driver.add(12, max_tokens=8)
    driver.drain()


def test_the_models_own_limit_is_a_limit_too():
    driver = Driver(max_model_len=16)
    with pytest.raises(CapacityError, match="17 tokens, the model takes 16"):
        driver.add(9, max_tokens=8)


def test_running_out_of_blocks_preempts_the_newest():
    driver = Driver(num_blocks=6)
    (old,), (new,) = driver.add(8, max_tokens=16), driver.add(7, max_tokens=16)
    while not new.num_preemptions:
        driver.step()
    assert new.state is SequenceState.WAITING
    assert new.num_computed_tokens == 0
    assert new.num_generated_tokens > 0, "what it knows stays"
    assert old.num_preemptions == 0
    known = list(new.token_ids)
    driver.drain()
    assert new.token_ids[: len(known)] == known
    assert new.num_generated_tokens == old.num_generated_tokens == 16
    assert driver.scheduler.num_preemptions == new.num_preemptions


def test_a_preempted_sequence_finds_what_was_not_evicted():
    driver = Driver(num_blocks=8)
    (victim,) = driver.add(8, max_tokens=8)
    driver.step()
    (urgent,) = driver.add(24, max_tokens=1, priority=1)
    assert driver.step() == {urgent: 24}
    assert victim.num_preemptions == 1
    assert urgent.finish_reason is FinishReason.LENGTH
    assert driver.step() == {victim: 1}, "its full blocks were still there"
    assert victim.num_cached_tokens == 0, "recorded when it was first let in"


def test_of_several_the_lowest_priority_is_preempted_first():
    driver = Driver(num_blocks=8)
    (low,) = driver.add(8, max_tokens=16, priority=-1)
    (high,) = driver.add(8, max_tokens=16)
    while not driver.scheduler.num_preemptions:
        driver.step()
    assert low.num_preemptions == 1
    assert high.num_preemptions == 0
    driver.drain()


def test_a_sequence_that_alone_fills_the_pool_finishes():
    driver = Driver(num_blocks=2, block_size=1, max_num_batched_tokens=1)
    (sequence,) = driver.add(1, max_tokens=1)
    driver.drain()
    assert sequence.num_generated_tokens == 1
    driver = Driver(num_blocks=3)
    requests = [driver.add(4, max_tokens=8) for _ in range(5)]
    driver.drain()
    assert all(sequence.num_generated_tokens == 8 for (sequence,) in requests)


def test_the_first_in_rank_is_never_preempted():
    driver = Driver(num_blocks=10, max_num_seqs=4)
    requests = [driver.add(6, max_tokens=30)[0] for _ in range(4)]
    while driver.scheduler.unfinished:
        first = next(s for s in requests if s.state is not SequenceState.FINISHED)
        assert first in driver.step()
    assert driver.scheduler.num_preemptions > 0


def test_an_urgent_sequence_overtakes_those_that_wait():
    driver = Driver(max_num_seqs=1)
    (running,) = driver.add(4, max_tokens=2, priority=5)
    driver.step()
    (waiting,), (urgent,) = driver.add(4), driver.add(4, priority=5)
    driver.step()
    assert running.finish_reason is not None
    assert list(driver.step()) == [urgent]
    assert waiting.state is SequenceState.WAITING


def test_an_urgent_sequence_takes_the_newest_seat_of_less_priority():
    driver = Driver(max_num_seqs=2)
    (old,), (new,) = driver.add(4), driver.add(4)
    driver.step()
    (urgent,) = driver.add(4, priority=1)
    assert list(driver.step()) == [urgent, old]
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)


def test_an_urgent_prompt_comes_before_another_prompts_chunks():
    driver = Driver(max_num_batched_tokens=8)
    (slow,) = driver.add(30)
    driver.step()
    (urgent,) = driver.add(6, priority=1)
    assert driver.step() == {urgent: 6, slow: 2}


def test_an_urgent_sequence_preempts_no_more_than_it_needs():
    driver = Driver(num_blocks=12)
    sequences = [driver.add(9, max_tokens=3)[0] for _ in range(3)]
    driver.step()
    (urgent,) = driver.add(16, max_tokens=4, priority=1)
    assert urgent in driver.step()
    assert [s.num_preemptions for s in sequences] == [0, 0, 1]


def test_nobody_is_preempted_for_a_sequence_that_would_not_fit_even_so():
    driver = Driver(num_blocks=8)
    (first,) = driver.add(16, max_tokens=4, priority=1)
    (second,) = driver.add(8, max_tokens=4)
    driver.step()
    (urgent,) = driver.add(16, priority=1)
    driver.step()
    assert urgent.state is SequenceState.WAITING
    assert first.num_preemptions == second.num_preemptions == 0


def test_equal_priority_preempts_nobody_for_a_seat():
    driver = Driver(max_num_seqs=1)
    (running,) = driver.add(4, priority=1)
    driver.step()
    driver.add(4, priority=1)
    driver.step()
    assert running.num_preemptions == 0


def test_a_block_is_left_for_everyone_who_runs():
    driver = Driver(num_blocks=4, max_num_seqs=8)
    (first,) = driver.add(4, max_tokens=8)
    driver.step()
    (second,) = driver.add(12, max_tokens=4)
    driver.step()
    assert second.state is SequenceState.WAITING, "it would have been preempted in the next step"
    assert first.num_preemptions == 0
    driver.drain()
    assert driver.scheduler.num_preemptions == 0


def test_cached_tokens_are_those_found_at_first_admission():
    driver = Driver()
    prompt = list(range(1, 15))
    (first,) = driver.add(prompt)
    driver.drain()
    (second,) = driver.add([*prompt[:9], 99, 98])
    assert driver.step() == {second: 3}
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 8


def test_another_salt_finds_nothing():
    driver = Driver()
    prompt = list(range(1, 15))
    driver.add(prompt, cache_salt=b"one")
    driver.drain()
    (second,) = driver.add(prompt, cache_salt=b"two")
    assert driver.step() == {second: 14}


def test_without_prefix_caching_everything_is_computed():
    driver = Driver(enable_prefix_caching=False)
    prompt = list(range(1, 15))
    driver.add(prompt)
    driver.drain()
    (second,) = driver.add(prompt)
    assert driver.step() == {second: 14}


def test_what_a_step_left_out_is_scheduled_again():
    driver = Driver()
    (first,), (second,) = driver.add(6), driver.add(6)
    plan = driver.schedule()
    half = type(plan)(plan.scheduled[:1], plan.block_copies)
    assert driver.update(half) == [first]
    assert driver.step() == {first: 1, second: 6}


def test_a_row_that_gave_no_token_must_be_ended_before_the_next_step():
    driver = Driver()
    (sequence,) = driver.add(6)
    plan = driver.schedule()
    driver.scheduler.update(plan, [None], driver.now)
    with pytest.raises(AssertionError, match="nothing to compute"):
        driver.schedule()
    driver.scheduler.finish(sequence, FinishReason.ERROR)
    assert driver.schedule().empty


def test_a_token_for_a_row_that_does_not_sample_is_a_fault():
    driver = Driver(max_num_batched_tokens=4)
    driver.add(6)
    with pytest.raises(AssertionError, match="did not ask"):
        driver.scheduler.update(driver.schedule(), [7], driver.now)


def test_short_prompts_pass_long_ones_that_have_the_steps_to_themselves():
    driver = Driver(num_blocks=256, max_num_batched_tokens=32)
    (long,), (other_long,) = driver.add(200), driver.add(100)
    assert driver.step() == {long: 32}
    (first,), (second,) = driver.add(10), driver.add(6)
    assert driver.step() == {long: 16, first: 10, second: 6}
    assert (first.num_generated_tokens, second.num_generated_tokens) == (1, 1)
    assert driver.step() == {long: 30, first: 1, second: 1}
    assert other_long.state is SequenceState.WAITING, "long ones go one after the other"
    driver.drain()


def test_a_short_prompt_leaves_the_blocks_that_a_long_one_waits_with():
    driver = Driver(num_blocks=40, max_num_batched_tokens=32)  # of 4 tokens
    (long,), (other_long,) = driver.add(80), driver.add(60)
    assert driver.step() == {long: 32}  # holds 20 blocks, will take 2 more; the other needs 15
    (small,), (too_much,) = driver.add(4), driver.add(16)
    assert driver.step() == {long: 28, small: 4}
    assert too_much.state is SequenceState.WAITING
    driver.drain()
    assert other_long.num_preemptions == 0


def test_a_stream_of_short_prompts_takes_at_most_half_of_each_step():
    driver = Driver(num_blocks=256, max_num_batched_tokens=32, max_num_seqs=16)
    (long,) = driver.add(200)
    steps = 0
    while long.num_generated_tokens == 0:
        for _ in range(3):
            driver.add(12, max_tokens=1)
        wanted = long.num_uncomputed_tokens
        assert driver.step()[long] >= min(16, wanted)
        steps += 1
    assert steps <= 200 // 16 + 1
