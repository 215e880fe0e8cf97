"""A request from `add` to the finish reasons of its samples."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling_params import ParameterError
from engine.sequence import FinishReason, SequenceState
from tests.engine.scheduler_driver import EOS, Driver


def test_an_end_of_sequence_id_stops_and_is_kept():
    driver = Driver()
    (sequence,) = driver.add(4)
    driver.step(5)
    plan = driver.schedule()
    assert driver.update(plan, EOS) == [sequence]
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.generated_ids == [5, EOS]


def test_ignore_eos_goes_on_to_max_tokens():
    driver = Driver()
    (sequence,) = driver.add(4, max_tokens=3, options={"ignore_eos": True})
    while driver.scheduler.unfinished:
        driver.step(EOS)
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.generated_ids == [EOS] * 3


def test_a_stop_token_id_stops_even_when_eos_is_ignored():
    driver = Driver()
    options = {"ignore_eos": True, "stop_token_ids": (9,)}
    (sequence,) = driver.add(4, options=options)
    driver.step(EOS)
    driver.step(9)
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.generated_ids == [EOS, 9]


def test_a_stop_on_the_last_token_allowed_is_a_stop():
    driver = Driver()
    (sequence,) = driver.add(4, max_tokens=1)
    driver.step(EOS)
    assert sequence.finish_reason is FinishReason.STOP


def test_min_tokens_come_before_a_stop():
    driver = Driver()
    (sequence,) = driver.add(4, options={"min_tokens": 2})
    driver.step(EOS)
    driver.step(EOS)
    assert sequence.finish_reason is None
    driver.step(EOS)
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.num_generated_tokens == 3


def test_a_deadline_ends_every_sample_and_is_told_as_such():
    driver = Driver(max_num_seqs=2)
    samples = driver.add(4, n=3, max_tokens=50, deadline=3.5)
    (other,) = driver.add(4, max_tokens=50)
    for _ in range(3):
        driver.step()
    assert not any(sample.finish_reason for sample in samples)
    plan = driver.schedule()
    assert [row.sequence for row in plan.scheduled] == [other]
    assert set(driver.update(plan)) == {*samples, other}
    assert {sample.finish_reason for sample in samples} == {FinishReason.DEADLINE}
    assert other.finish_reason is None


def test_a_deadline_in_the_queue_ends_what_never_ran():
    driver = Driver(max_num_seqs=1)
    driver.add(4, max_tokens=50)
    (late,) = driver.add(4, deadline=2.0)
    driver.step()
    plan = driver.schedule()
    assert late in driver.update(plan)
    assert late.finish_reason is FinishReason.DEADLINE
    assert late.num_generated_tokens == 0


def test_a_deadline_of_an_ended_request_does_not_touch_a_later_one_of_its_name():
    driver = Driver()
    driver.add(4, request_id="again", deadline=5.0, max_tokens=1)
    driver.step()
    (later,) = driver.add(4, request_id="again", max_tokens=20)
    for _ in range(8):
        driver.step()
    assert later.finish_reason is None


def test_abort_frees_blocks_at_once_and_nothing_more_is_told():
    driver = Driver()
    samples = driver.add(8, n=3)
    driver.step()
    driver.step()
    assert driver.scheduler.abort(samples[0].request_id) == samples
    assert {sample.finish_reason for sample in samples} == {FinishReason.ABORT}
    assert driver.scheduler.num_free_blocks == driver.scheduler.num_blocks
    assert not driver.scheduler.unfinished
    assert driver.scheduler.abort(samples[0].request_id) == []
    assert driver.scheduler.abort("never seen") == []


def test_abort_while_a_step_runs_passes_its_row_over():
    driver = Driver()
    (gone,), (stays,) = driver.add(8), driver.add(8)
    plan = driver.schedule()
    driver.scheduler.abort(gone.request_id)
    assert driver.update(plan) == [stays]
    assert gone.generated_ids == []


def test_finish_from_above_frees_blocks_and_keeps_the_reason():
    driver = Driver()
    (sequence,) = driver.add(8)
    driver.step()
    driver.scheduler.finish(sequence, FinishReason.STOP)
    driver.scheduler.check()
    assert sequence.finish_reason is FinishReason.STOP
    assert driver.scheduler.num_free_blocks == driver.scheduler.num_blocks
    assert driver.schedule().empty


def test_a_stop_string_in_the_last_token_takes_the_place_of_length():
    driver = Driver()
    (sequence,) = driver.add(4, max_tokens=1)
    driver.step()
    assert sequence.finish_reason is FinishReason.LENGTH
    driver.scheduler.finish(sequence, FinishReason.STOP)
    assert sequence.finish_reason is FinishReason.STOP


def test_what_a_failed_row_computed_reaches_nobody():
    driver = Driver(max_num_batched_tokens=8)
    prompt = list(range(1, 13))
    (bad,) = driver.add(prompt)
    driver.step()  # its first chunk is sealed before anyone knows
    plan = driver.schedule()
    driver.scheduler.finish(bad, FinishReason.ERROR, error="not a number")
    driver.scheduler.update(plan, [None], driver.now)
    assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, "not a number")
    (good,) = driver.add(prompt)
    driver.step()
    assert good.num_cached_tokens == 0


def test_samples_fork_the_prompt_once_it_is_computed():
    driver = Driver()
    samples = driver.add(10, n=3, max_tokens=4)
    assert driver.step() == {samples[0]: 10}
    plan = driver.schedule()
    assert [row.num_scheduled_tokens for row in plan.scheduled] == [1, 1, 1]
    tables = [sample.block_table for sample in samples]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert len(plan.block_copies) == 2, "the last holder of the half-filled block writes in place"
    driver.update(plan)
    driver.drain()
    assert [sample.num_generated_tokens for sample in samples] == [4, 4, 4]


def test_samples_fork_though_the_first_ends_with_its_first_token():
    driver = Driver()
    samples = driver.add(10, n=2, max_tokens=1)
    driver.step()
    assert samples[0].finish_reason is FinishReason.LENGTH
    assert driver.step() == {samples[1]: 1}


def test_samples_without_a_seat_wait_and_find_the_prompt_in_the_cache():
    driver = Driver(max_num_seqs=1)
    samples = driver.add(10, n=2, max_tokens=2)
    driver.step()
    driver.step()
    assert driver.step() == {samples[1]: 2}
    assert samples[1].num_cached_tokens == 8


def test_samples_wait_for_the_whole_prompt():
    driver = Driver(max_num_batched_tokens=4)
    samples = driver.add(10, n=2)
    for _ in range(3):
        assert list(driver.step()) == [samples[0]]
    assert list(driver.step()) == list(samples)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.STOP])
def test_samples_go_on_when_the_first_ends_before_its_prompt(reason):
    driver = Driver(max_num_batched_tokens=4)
    samples = driver.add(10, n=3)
    driver.step()
    driver.scheduler.finish(samples[0], reason)
    driver.scheduler.check()
    driver.drain()
    assert [sample.num_generated_tokens for sample in samples] == [0, 8, 8]


def test_one_sample_may_end_while_it_waits_for_the_prompt():
    driver = Driver(max_num_batched_tokens=4)
    samples = driver.add(10, n=3)
    driver.step()
    driver.scheduler.finish(samples[1], FinishReason.STOP)
    driver.scheduler.check()
    driver.drain()
    assert [sample.num_generated_tokens for sample in samples] == [8, 0, 8]


def test_generation_resumes_behind_the_tokens_it_already_has():
    driver = Driver()
    (sequence,) = driver.add(6, max_tokens=5, generated=[[51, 52, 53]])
    assert driver.step(54) == {sequence: 9}
    driver.step(55)
    assert sequence.generated_ids == [51, 52, 53, 54, 55]
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.num_prompt_tokens == 6


def test_each_sample_resumes_behind_its_own_tokens():
    driver = Driver()
    samples = driver.add(8, n=3, max_tokens=4, generated=[[51], [], [71, 72]])
    driver.step(99)
    assert driver.step(99) == {samples[0]: 1, samples[1]: 1, samples[2]: 2}
    driver.drain()
    assert [sample.generated_ids[0] for sample in samples] == [51, 99, 71]
    assert [sample.num_generated_tokens for sample in samples] == [4, 4, 4]


def test_what_was_already_complete_ends_at_once_and_is_told_by_the_next_update():
    driver = Driver()
    samples = driver.add(8, n=3, max_tokens=2, generated=[[51, 52], [EOS], []])
    assert samples[0].finish_reason is FinishReason.LENGTH
    assert samples[1].finish_reason is FinishReason.STOP
    assert samples[2].state is SequenceState.WAITING
    plan = driver.schedule()
    assert [row.sequence for row in plan.scheduled] == [samples[2]]
    assert set(driver.update(plan)) == set(samples)
    (alone,) = driver.add(8, max_tokens=1, generated=[[51]])
    assert driver.scheduler.unfinished
    plan = driver.schedule()
    assert plan.empty or alone not in [row.sequence for row in plan.scheduled]
    assert alone in driver.update(plan)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": 4, "request_id": "taken"}, "request_id"),
        ({"prompt": 4, "n": 2, "generated": [[1]]}, "generated"),
        ({"prompt": 4, "max_tokens": 2, "generated": [[1, 2, 3]]}, "generated"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_changes_nothing(request_, param):
    driver = Driver()
    driver.add(4, request_id="taken")
    promised = driver.scheduler.promised_tokens
    with pytest.raises(ParameterError) as refused:
        driver.add(request_.pop("prompt"), **request_)
    assert refused.value.param == param
    assert driver.scheduler.promised_tokens == promised
    driver.scheduler.check()


def test_promised_tokens_are_what_unfinished_sequences_may_still_take():
    driver = Driver()
    driver.add(6, max_tokens=8, n=2)  # 14 tokens: 4 blocks each
    assert driver.scheduler.promised_tokens == 32
    driver.step()  # both hold the same 2 blocks, and the first to write copies the half-filled one
    assert driver.scheduler.promised_tokens == 32 - 3 * 4
    driver.step()
    assert driver.scheduler.promised_tokens == 32 - 4 * 4
    driver.drain()
    assert driver.scheduler.promised_tokens == 0


@settings(max_examples=60, deadline=None, database=None)
@given(
    num_blocks=st.integers(8, 24),
    requests=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 3), st.booleans()),
        min_size=4,
        max_size=30,
    ),
)
def test_who_is_taken_in_by_what_is_neither_held_nor_promised_is_never_preempted(
    num_blocks, requests
):
    driver = Driver(num_blocks=num_blocks, max_num_seqs=64)
    scheduler = driver.scheduler
    backlog = [r for r in requests if -(-(r[0] + r[1]) // 4) * r[2] <= num_blocks]
    while backlog or scheduler.unfinished:
        while backlog:
            num_prompt_tokens, max_tokens, n, shares = backlog[-1]
            needed = -(-(num_prompt_tokens + max_tokens) // 4) * n
            if needed * 4 > scheduler.num_free_blocks * 4 - scheduler.promised_tokens:
                break
            backlog.pop()
            prompt = list(range(1, 1 + num_prompt_tokens)) if shares else num_prompt_tokens
            driver.add(prompt, max_tokens=max_tokens, n=n)
        assert scheduler.num_free_blocks * 4 >= scheduler.promised_tokens
        driver.step()
    assert scheduler.num_preemptions == 0
