"""A draft model's guesses, and its own blocks, whatever becomes of the sequences."""

import random
import secrets

import torch

from engine.sampler import NumericalError
from engine.sequence import FinishReason
from engine.speculation.draft_model import DraftModelProposer
from engine.step_plan import StepPlan
from tests.engine.scheduler_driver import EOS, LIMITS, Driver
from tests.engine.scripted_runner import ScriptedRunner, hashed_token

VOCAB_SIZE = 50
next_token = hashed_token(VOCAB_SIZE)


def often(sequence):
    """What the model draws, two times of three."""
    token_id = next_token(sequence)
    return token_id if (sequence.num_tokens * 7 + token_id) % 3 else (token_id + 1) % VOCAB_SIZE


class Guessed(Driver):
    """A scheduler whose steps have a draft model's guesses; what it draws is a function."""

    def __init__(self, draft=next_token, *, draft_blocks=64, max_num_tokens=32, **limits):
        super().__init__(**limits)
        self.runner = ScriptedRunner(draft, vocab_size=VOCAB_SIZE, num_blocks=draft_blocks)
        self.proposer = DraftModelProposer(
            self.runner, LIMITS["block_size"], max_num_tokens=max_num_tokens
        )
        self.num_drafts = self.num_confirmed = 0

    def guess(self, plan, counts, pays=bool) -> StepPlan:
        drafts = self.proposer.propose(plan, counts, pays)
        self.proposer.check()
        for draft_ids, count in zip(drafts, counts, strict=True):
            assert len(draft_ids) <= count
        return self.scheduler.with_drafts(plan, drafts)

    def drawn(self, row):
        """As many tokens as the row's drafts foresee, and one more."""
        tokens, sequence = [], row.sequence
        known = list(sequence.token_ids)
        for draft_id in (*row.draft_ids, None):
            tokens.append(next_token(sequence))
            sequence.token_ids.append(tokens[-1])
            if draft_id != tokens[-1]:
                break
        sequence.token_ids[:] = known
        self.num_drafts += len(row.draft_ids)
        self.num_confirmed += len(tokens) - 1
        return tokens if row.draft_ids else tokens[0]

    def take(self, plan):
        sampled = [self.drawn(row) if row.samples else None for row in plan.scheduled]
        self.scheduler.update(plan, sampled, self.now)
        self.scheduler.check()

    def step(self, count=3):
        plan = self.schedule()
        plan = self.guess(plan, [count * row.samples for row in plan.scheduled])
        self.take(plan)
        return plan


def test_a_draft_model_that_thinks_alike_is_always_confirmed():
    driver = Guessed()
    [sequence] = driver.add(9, max_tokens=12, options={"ignore_eos": True})
    assert driver.step().num_drafts == 3
    assert sequence.num_generated_tokens == 4
    driver.step()
    driver.step()
    assert driver.num_confirmed == driver.num_drafts == 9
    assert sequence.num_generated_tokens == 12
    # the prompt once, and then only what is new: of four known tokens the last
    rows = [row for plan in driver.runner.plans for row in plan.scheduled]
    assert [row.num_scheduled_tokens for row in rows] == [9, 1, 1, 2, 1, 1, 2, 1, 1]


def test_after_a_wrong_guess_only_what_was_guessed_wrong_is_computed_again():
    driver = Guessed(lambda s: (next_token(s) + (s.num_tokens == 10)) % VOCAB_SIZE)
    driver.add(9, max_tokens=20, options={"ignore_eos": True})
    assert driver.step(4).num_drafts == 4
    assert driver.num_confirmed == 1
    driver.runner.plans.clear()
    assert driver.step(4).num_drafts == 4
    assert [p.scheduled[0].num_scheduled_tokens for p in driver.runner.plans] == [1, 1, 1, 1]
    assert driver.num_confirmed == 5


def test_a_long_prompt_is_taken_in_by_steps_of_a_bounded_size_and_has_no_drafts_until_then():
    driver = Guessed(max_num_tokens=8, max_num_batched_tokens=64)
    driver.add(19, max_tokens=20, options={"ignore_eos": True})
    assert [driver.step(3).num_drafts for _ in range(4)] == [0, 0, 3, 3]
    assert [plan.num_tokens for plan in driver.runner.plans][:3] == [8, 8, 5]


def test_what_a_pool_has_no_blocks_for_gets_no_drafts_and_idle_shadows_give_way():
    driver = Guessed(draft_blocks=6, max_num_batched_tokens=64)
    for _ in range(2):
        driver.add(15, max_tokens=30, options={"ignore_eos": True})
    plan = driver.schedule()
    plan = driver.guess(plan, [3, 3])
    assert [len(row.draft_ids) for row in plan.scheduled] == [3, 0]
    driver.take(plan)
    plan = driver.guess(driver.schedule(), [0, 3])  # the first has a seat, but wants none
    assert [len(row.draft_ids) for row in plan.scheduled] == [0, 3]


def test_nothing_is_computed_where_drafts_do_not_pay():
    driver = Guessed()
    driver.add(9)
    plan = driver.guess(driver.schedule(), [3], pays=lambda num_drafts: False)
    assert plan.num_drafts == 0
    assert driver.runner.plans == []


def test_a_prompt_that_another_had_is_found_in_the_draft_model_s_own_prefix_cache():
    driver = Guessed()
    prompt = list(range(100, 117))
    driver.add(prompt, max_tokens=2, cache_salt=b"one")
    driver.step()
    for salt, num_tokens in ((b"one", 1), (b"another", 17)):
        driver.runner.plans.clear()
        driver.add(prompt, max_tokens=9, cache_salt=salt, request_id=salt.decode())
        driver.step()
        assert driver.runner.plans[0].scheduled[-1].num_scheduled_tokens == num_tokens


def test_who_writes_to_a_block_that_others_read_copies_it():
    driver = Guessed()
    driver.add(list(range(100, 108)), max_tokens=9)
    driver.guess(driver.schedule(), [3])
    driver.add(list(range(100, 109)), max_tokens=9)
    driver.guess(driver.schedule(), [0, 3])  # the first has not come on: it shares all its blocks
    driver.runner.plans.clear()
    driver.step()
    [copied, *_] = driver.runner.plans
    assert len(copied.block_copies) == 1
    assert [row.num_scheduled_tokens for row in copied.scheduled] == [1, 1]


def test_a_lack_of_memory_costs_the_drafts_and_nothing_else():
    def fail(sequence):
        if sequence.num_tokens == 14:
            raise torch.OutOfMemoryError
        return next_token(sequence)

    driver = Guessed(fail)
    [sequence] = driver.add(9, max_tokens=12, options={"ignore_eos": True})
    while driver.scheduler.unfinished:
        driver.step()
    assert sequence.finish_reason is FinishReason.LENGTH
    assert driver.num_drafts > 0


def test_a_guess_that_is_no_number_ends_the_drafts_and_leaves_nothing_in_the_cache():
    driver = Guessed(lambda s: next_token(s) if s.num_tokens < 11 else NumericalError("NaN"))
    driver.add(9, max_tokens=12, options={"ignore_eos": True})
    assert driver.step().num_drafts == 2
    driver.runner.plans.clear()
    driver.step()
    assert driver.runner.plans[0].num_tokens == 12  # all of it again


def test_the_books_balance_and_every_text_is_the_model_s_own():
    """Preempted, aborted, failed, forked, cut in chunks; the runner sees what each slot holds."""
    first = secrets.randbelow(2**32)
    drivers = [a_long_life(seed) for seed in range(first, first + 16)]
    num_confirmed = sum(driver.num_confirmed for driver in drivers)
    assert num_confirmed > 300
    assert sum(driver.num_drafts for driver in drivers) - num_confirmed > 100
    assert sum(driver.scheduler.num_preemptions for driver in drivers) > 10


def a_long_life(seed):
    draw = random.Random(seed)
    driver = Guessed(
        often,
        draft_blocks=draw.choice((8, 20, 64)),
        max_num_tokens=draw.choice((5, 32)),
        num_blocks=draw.choice((12, 30)),
        max_num_batched_tokens=draw.choice((9, 40)),
    )
    sequences = []
    for _ in range(900):
        if len(sequences) < 80 and draw.random() < 0.3:
            prompt = [(i * 5) % VOCAB_SIZE for i in range(draw.choice((0, 8, 13)))]
            prompt += draw.choices(range(VOCAB_SIZE), k=draw.randint(1, 9))
            n, salt = draw.choice((1, 1, 3)), draw.choice((b"", b"salt"))
            sequences += driver.add(prompt, max_tokens=draw.randint(1, 20), n=n, cache_salt=salt)
        plan = driver.schedule()
        counts = [draw.randint(0, 5) * row.samples for row in plan.scheduled]
        plan = driver.guess(plan, counts, pays=lambda num: num > 0 and draw.random() < 0.8)
        if plan.scheduled and draw.random() < 0.1:
            victim = draw.choice(plan.scheduled).sequence
            if draw.random() < 0.5:
                driver.scheduler.abort(victim.request_id)
            else:
                driver.scheduler.finish(victim, FinishReason.ERROR, error="planted")
        if draw.random() < 0.1:
            plan = plan.half()  # a lack of memory
        driver.take(plan)
    while driver.scheduler.unfinished:
        driver.step()
    assert len(sequences) >= 80, seed
    for sequence in sequences:
        tokens = list(sequence.token_ids)
        sequence.token_ids[sequence.num_prompt_tokens :] = []
        for token_id in tokens[sequence.num_prompt_tokens :]:
            assert token_id == next_token(sequence), seed
            sequence.token_ids.append(token_id)
            assert sequence.params.ignore_eos or token_id != EOS or sequence.token_ids == tokens
    driver.add(3)
    driver.step()  # what has ended holds no blocks
    assert driver.proposer._blocks.num_free_blocks >= driver.runner.num_blocks - 2, seed
    return driver
