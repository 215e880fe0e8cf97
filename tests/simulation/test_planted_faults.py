"""Faults that schedulers and prefix caches have had, planted one by one: the simulation sees each.

A fault that goes unseen here means the simulation has lost an eye.
"""

from bisect import insort

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine import block_manager, scheduler
from engine.beam_groups import BeamGroup
from engine.block_manager import BlockManager
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceState, rank
from engine.step_plan import StepPlan
from tests.simulation.machine import SchedulerMachine

MAX_EXAMPLES = 400


def write_to_shared_blocks(patch):
    real = BlockManager.prepare

    def prepare(self, sequence, num_tokens):
        counts = self._ref_counts
        self._ref_counts = [min(count, 1) for count in counts]  # as if nothing were shared
        copies = real(self, sequence, num_tokens)
        new = [max(count, one) for count, one in zip(counts, self._ref_counts, strict=True)]
        self._ref_counts = new
        return copies

    patch.setattr(BlockManager, "prepare", prepare)
    patch.setattr(BlockManager, "_seal", seal_without_asking(BlockManager._seal))


def seal_without_asking(seal):
    """The seal's own assertions set aside, so that a fault must be seen in what is read."""

    def unchecked(self, sequence, index):
        block = sequence.block_table[index]
        if self._ref_counts[block] == 1 and block not in self._seals:
            seal(self, sequence, index)

    return unchecked


def copy_nothing_on_write(patch):
    real = BlockManager.prepare

    def prepare(self, sequence, num_tokens):
        return None if real(self, sequence, num_tokens) is None else []

    patch.setattr(BlockManager, "prepare", prepare)


def leak_blocks_on_abort(patch):
    real = Scheduler._end_request

    def end_request(self, request_id, reason):
        for sequence in self._requests.get(request_id, ()):
            sequence.block_table.clear()
        return real(self, request_id, reason)

    patch.setattr(Scheduler, "_end_request", end_request)


def fork_without_counting(patch):
    def fork(self, parent, child):
        child.block_table.extend(parent.block_table[: self.num_blocks_for(child.num_tokens)])
        child.num_computed_tokens = child.num_tokens - 1

    patch.setattr(BlockManager, "fork", fork)


def seal_before_computed(patch):
    real = BlockManager.admit

    def admit(self, sequence):
        real(self, sequence)
        first = sequence.num_computed_tokens // self.block_size
        for index in range(first, sequence.num_tokens // self.block_size):
            self._seal(sequence, index)

    patch.setattr(BlockManager, "admit", admit)
    patch.setattr(BlockManager, "_seal", seal_without_asking(BlockManager._seal))


def seal_every_block_of_a_preempted_sequence(patch):
    real = Scheduler._preempt

    def preempt(self, sequence):
        for index in range(sequence.num_tokens // self._blocks.block_size):
            if index < len(sequence.block_table) and self._blocks._enable_prefix_caching:
                self._blocks._seal(sequence, index)
        real(self, sequence)

    patch.setattr(Scheduler, "_preempt", preempt)
    patch.setattr(BlockManager, "_seal", seal_without_asking(BlockManager._seal))


def evict_a_held_block(patch):
    def share(self, block):
        self._ref_counts[block] += 1

    patch.setattr(BlockManager, "_share", share)


def keep_an_evicted_block_in_the_cache(patch):
    def take(self):
        block = self._blank.pop() if self._blank else self._cached.popitem(last=False)[0]
        self._ref_counts[block] = 1
        return block

    patch.setattr(BlockManager, "_take", take)
    patch.setattr(BlockManager, "_seal", seal_without_asking(BlockManager._seal))


def share_between_tenants(patch):
    real = block_manager.block_key
    patch.setattr(
        block_manager,
        "block_key",
        lambda model_id, salt, *rest: real(model_id, b"", *rest),
    )
    forget_fields_of_the_seal(patch, salt=b"")


def find_a_block_after_another_prefix(patch):
    real = block_manager.block_key
    patch.setattr(
        block_manager,
        "block_key",
        lambda model_id, salt, adapter, previous_key, token_ids: real(
            model_id, salt, adapter, b"", token_ids
        ),
    )
    forget_fields_of_the_seal(patch, previous_key=b"")


def forget_fields_of_the_seal(patch, **fields):
    real = block_manager.Seal

    def seal(key, previous_key, salt, token_ids):
        given = {"key": key, "previous_key": previous_key, "salt": salt, "token_ids": token_ids}
        return real(**{**given, **fields})

    patch.setattr(block_manager, "Seal", seal)


def find_the_whole_prompt_in_the_cache(patch):
    real = BlockManager._find_prefix

    def find_prefix(self, sequence):
        sequence.token_ids.append(0)
        found = real(self, sequence)
        sequence.token_ids.pop()
        del sequence.block_keys[sequence.num_tokens // self.block_size :]
        return found

    patch.setattr(BlockManager, "_find_prefix", find_prefix)


def preempted_sequences_keep_their_computed_count(patch):
    real = BlockManager.free

    def free(self, sequence, **options):
        num_computed_tokens = sequence.num_computed_tokens
        real(self, sequence, **options)
        sequence.num_computed_tokens = num_computed_tokens

    patch.setattr(BlockManager, "free", free)


def let_the_newest_in_first(patch):
    def admit_waiting(self):
        while self._waiting and self._make_room(self._waiting[-1], 0):
            let_in(self, self._waiting[-1])

    patch.setattr(Scheduler, "_admit_waiting", admit_waiting)


def let_small_ones_pass(patch):
    def admit_waiting(self):
        for sequence in list(self._waiting):
            if self._make_room(sequence, 0):
                let_in(self, sequence)

    patch.setattr(Scheduler, "_admit_waiting", admit_waiting)


def let_in(scheduler_, sequence):
    scheduler_._waiting.remove(sequence)
    scheduler_._blocks.admit(sequence)
    sequence.state = SequenceState.RUNNING
    insort(scheduler_._running, sequence, key=rank)


def preempt_another(patch, choose):
    """Where a block is missing: `choose` picks the victim from the scheduler and who misses it."""
    real_prepare, real_preempt = BlockManager.prepare, Scheduler._preempt
    missed = []

    def prepare(self, sequence, num_tokens):
        copies = real_prepare(self, sequence, num_tokens)
        missed[:] = [sequence] if copies is None else []
        return copies

    def preempt(self, sequence):
        real_preempt(self, choose(self, missed.pop()) if missed else sequence)

    patch.setattr(BlockManager, "prepare", prepare)
    patch.setattr(Scheduler, "_preempt", preempt)


def preempt_the_oldest(patch):
    preempt_another(patch, lambda self, sequence: self._running[0])


def preempt_whoever_misses_a_block(patch):
    preempt_another(patch, lambda self, sequence: sequence)


def prompts_take_the_whole_budget(patch):
    real = Scheduler.schedule

    def schedule(self, now):
        plan = real(self, now)
        rows = [r for r in plan.scheduled if r.num_scheduled_tokens > 1]
        return StepPlan(tuple(rows) or plan.scheduled, plan.block_copies)

    patch.setattr(Scheduler, "schedule", schedule)


def children_fork_a_token_too_far(patch):
    real = BlockManager.fork

    def fork(self, parent, child):
        real(self, parent, child)
        child.token_ids.append(parent.token_ids[-1])

    patch.setattr(BlockManager, "fork", fork)


def forget_the_samples_of_an_aborted_leader(patch):
    real = Scheduler._release_held

    def release_held(self, leader):
        if leader.num_computed_tokens >= leader.num_prompt_tokens:
            real(self, leader)

    patch.setattr(Scheduler, "_release_held", release_held)


def take_tokens_to_be_scored_from_the_cache(patch):
    patch.setattr(Sequence, "num_reusable_tokens", property(lambda self: self.num_tokens - 1))


def end_before_all_is_scored(patch):
    real = Scheduler.finish

    def finish(self, sequence, reason, *, error=None):
        sequence.num_scored_tokens = None
        real(self, sequence, reason, error=error)

    patch.setattr(Scheduler, "finish", finish)


def forget_what_was_scored_when_preempted(patch):
    real = Scheduler._preempt

    def preempt(self, sequence):
        real(self, sequence)
        if sequence.num_scored_tokens is not None:
            sequence.num_scored_tokens = min(sequence.num_scored_tokens, sequence.num_prompt_tokens)

    patch.setattr(Scheduler, "_preempt", preempt)


def call_a_deadline_length(patch):
    real = Scheduler._end

    def end(self, sequence, reason):
        if reason is scheduler.FinishReason.DEADLINE:
            reason = scheduler.FinishReason.LENGTH
        real(self, sequence, reason)

    patch.setattr(Scheduler, "_end", end)


def fork_a_beam_from_another(patch):
    real = BlockManager.fork
    parents = []

    def fork(self, parent, child):
        parents.append(parent)
        if child.params.num_beams > 1:
            parent = next(
                other
                for other in parents
                if other.request_id == parent.request_id
                and other.num_computed_tokens == parent.num_computed_tokens
            )
        real(self, parent, child)

    patch.setattr(BlockManager, "fork", fork)


def keep_the_last_token_of_beams_that_wait_for_others(patch):
    real = BeamGroup.advance

    def advance(self, blocks, seats, waiting):
        waits = list(self.offers) if len(self.offers) < len(self.places) else []
        over = real(self, blocks, seats, waiting)
        for place in waits:
            blocks.mark_computed(place, 1)
        return over

    patch.setattr(BeamGroup, "advance", advance)


def let_searches_that_wait_hold_their_blocks(patch):
    patch.setattr(scheduler, "stalled_sequences", lambda *_: [])


def leave_the_places_of_an_aborted_search(patch):
    real = Scheduler.abort

    def abort(self, request_id):
        if request_id not in self._beams:
            return real(self, request_id)
        ended = [s for s in self._requests[request_id] if s.block_table]
        for sequence in ended:
            self._end(sequence, scheduler.FinishReason.ABORT)
        return ended

    patch.setattr(Scheduler, "abort", abort)


FAULTS = [
    write_to_shared_blocks,
    copy_nothing_on_write,
    leak_blocks_on_abort,
    fork_without_counting,
    seal_before_computed,
    seal_every_block_of_a_preempted_sequence,
    evict_a_held_block,
    keep_an_evicted_block_in_the_cache,
    share_between_tenants,
    find_a_block_after_another_prefix,
    find_the_whole_prompt_in_the_cache,
    preempted_sequences_keep_their_computed_count,
    let_the_newest_in_first,
    let_small_ones_pass,
    preempt_the_oldest,
    preempt_whoever_misses_a_block,
    prompts_take_the_whole_budget,
    children_fork_a_token_too_far,
    forget_the_samples_of_an_aborted_leader,
    take_tokens_to_be_scored_from_the_cache,
    end_before_all_is_scored,
    forget_what_was_scored_when_preempted,
    call_a_deadline_length,
    fork_a_beam_from_another,
    keep_the_last_token_of_beams_that_wait_for_others,
    let_searches_that_wait_hold_their_blocks,
    leave_the_places_of_an_aborted_search,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_simulation_sees_a_planted_fault(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            SchedulerMachine,
            settings=settings(
                max_examples=MAX_EXAMPLES,
                stateful_step_count=30,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
