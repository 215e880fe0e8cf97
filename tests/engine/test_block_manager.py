import pytest

from engine import block_manager
from engine.block_manager import BlockManager, block_key
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

BLOCK_SIZE = 4


def sequence_of(token_ids, *, salt=b""):
    return Sequence(
        seq_id=0,
        request_id="r",
        sample_index=0,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(max_tokens=8),
        seed=0,
        cache_salt=salt,
    )


def compute(manager, sequence, num_tokens=None):
    """What a step does to a sequence's blocks; returns the copies it asked for."""
    if num_tokens is None:
        num_tokens = sequence.num_uncomputed_tokens
    copies = manager.prepare(sequence, num_tokens)
    manager.mark_computed(sequence, num_tokens)
    return copies


def computed(manager, token_ids, **options):
    sequence = sequence_of(token_ids, **options)
    manager.admit(sequence)
    compute(manager, sequence)
    return sequence


@pytest.fixture
def manager():
    return BlockManager(8, BLOCK_SIZE)


def test_a_sequence_is_admitted_with_blocks_for_every_token_it_knows(manager):
    sequence = sequence_of(range(9))
    manager.admit(sequence)
    assert len(sequence.block_table) == 3
    assert sequence.num_computed_tokens == 0
    assert manager.num_free_blocks == 5
    manager.check([sequence])


def test_a_block_table_only_grows_when_the_next_token_needs_it(manager):
    sequence = computed(manager, range(4))
    before = list(sequence.block_table)
    for token_id in range(4):
        sequence.token_ids.append(token_id)
        assert compute(manager, sequence) == []
        assert sequence.block_table[:1] == before
        assert len(sequence.block_table) == 2
    sequence.token_ids.append(9)
    compute(manager, sequence)
    assert len(sequence.block_table) == 3
    manager.check([sequence])


def test_taking_more_blocks_than_are_free_takes_none(manager):
    holder = computed(manager, range(28))
    sequence = computed(manager, [70])
    sequence.token_ids += range(71, 75)
    assert manager.num_free_blocks == 0
    assert manager.prepare(sequence, 4) is None
    assert len(sequence.block_table) == 1
    manager.check([holder, sequence])


def test_full_computed_blocks_are_found_by_another_sequence(manager):
    first = computed(manager, range(10))
    second = sequence_of([*range(8), 77, 78])
    manager.admit(second)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert second.num_computed_tokens == 8
    assert manager.num_free_blocks == 4
    manager.check([first, second])


def test_blocks_are_not_found_before_they_are_computed(manager):
    first = sequence_of(range(10))
    manager.admit(first)
    manager.prepare(first, 10)
    second = sequence_of(range(10))
    manager.admit(second)
    assert second.num_computed_tokens == 0
    manager.check([first, second])


def test_a_chunk_seals_only_the_blocks_it_has_filled(manager):
    first = sequence_of(range(12))
    manager.admit(first)
    compute(manager, first, 7)
    second = sequence_of(range(12))
    manager.admit(second)
    assert second.num_computed_tokens == 4


def test_the_last_known_token_is_never_found(manager):
    first = computed(manager, range(8))
    second = sequence_of(range(8))
    manager.admit(second)
    assert second.num_computed_tokens == 4
    assert second.block_table[1] != first.block_table[1]


def test_freed_blocks_are_still_found(manager):
    first = computed(manager, range(8))
    table = list(first.block_table)
    manager.free(first)
    assert manager.num_free_blocks == 8
    assert first.block_table == []
    assert first.num_computed_tokens == 0
    second = sequence_of(range(9))
    manager.admit(second)
    assert second.block_table[:2] == table
    manager.check([second])


def test_the_cache_can_be_off():
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=False)
    manager.free(computed(manager, range(8)))
    second = sequence_of(range(9))
    manager.admit(second)
    assert second.num_computed_tokens == 0


def test_blank_blocks_are_taken_before_cached_ones(manager):
    manager.free(computed(manager, range(8)))
    other = computed(manager, range(100, 124))
    manager.free(other)
    again = sequence_of(range(9))
    manager.admit(again)
    assert again.num_computed_tokens == 8


def test_the_least_recently_used_block_is_evicted_first(manager):
    manager.free(computed(manager, range(4)))
    manager.free(computed(manager, range(10, 14)))
    manager.free(computed(manager, [*range(4), 99]))  # uses the first again
    holder = computed(manager, range(50, 78))  # takes 7 of 8: 6 blank ones and an evicted one
    used, unused = sequence_of([*range(4), 1]), sequence_of([*range(10, 14), 1])
    assert manager._find_prefix(used) != []
    assert manager._find_prefix(unused) == []
    manager.check([holder])


def test_of_one_sequence_the_end_is_evicted_before_the_beginning(manager):
    manager.free(computed(manager, range(12)))
    holder = computed(manager, range(50, 76))  # 7 blocks: 5 blank ones and two evicted
    again = sequence_of(range(13))
    assert len(manager._find_prefix(again)) == 1
    manager.check([holder])


def test_another_salt_shares_nothing(manager):
    first = computed(manager, range(8), salt=b"one")
    second = sequence_of(range(9), salt=b"two")
    manager.admit(second)
    assert second.num_computed_tokens == 0
    assert not set(first.block_table) & set(second.block_table)


def test_the_same_tokens_behind_another_prefix_are_another_block(manager):
    computed(manager, [1, 1, 1, 1, 5, 5, 5, 5])
    second = sequence_of([2, 2, 2, 2, 5, 5, 5, 5, 9])
    manager.admit(second)
    assert second.num_computed_tokens == 0


def test_fields_of_a_key_cannot_run_into_each_other():
    keys = [
        block_key(b"model", b"salt", b"", b"", (1, 2)),
        block_key(b"models", b"alt", b"", b"", (1, 2)),
        block_key(b"model", b"", b"salt", b"", (1, 2)),
        block_key(b"model", b"salt", b"", b"\1\0\0\0", (2,)),
        block_key(b"model", b"salt", b"", b"", (1, 2, 0)),
        block_key(b"model", b"salt", b"", b"", (1 + (2 << 8),)),
    ]
    assert len(set(keys)) == len(keys)


def test_a_colliding_key_is_no_hit(manager, monkeypatch):
    monkeypatch.setattr(block_manager, "block_key", lambda *fields: b"the same for all")
    first = computed(manager, range(4))
    second = sequence_of(range(10, 15))
    manager.admit(second)
    assert second.num_computed_tokens == 0
    compute(manager, second)
    manager.check([first, second])


def test_two_that_compute_the_same_at_once_keep_a_block_each(manager):
    first, second = sequence_of(range(8)), sequence_of(range(8))
    manager.admit(first)
    manager.admit(second)
    compute(manager, first)
    compute(manager, second)
    manager.check([first, second])
    manager.free(first)
    manager.check([second])
    third = sequence_of(range(9))
    manager.admit(third)
    assert third.num_computed_tokens == 8


def test_a_fork_shares_every_block_and_has_its_last_token_to_compute(manager):
    parent = computed(manager, range(6))
    child = sequence_of(range(6))
    manager.fork(parent, child)
    assert child.block_table == parent.block_table
    assert child.num_uncomputed_tokens == 1
    assert manager.num_free_blocks == 6
    manager.check([parent, child])


def test_the_first_to_write_to_a_shared_block_copies_it(manager):
    parent = computed(manager, range(6))
    child = sequence_of(range(6))
    manager.fork(parent, child)
    shared = parent.block_table[1]
    parent.token_ids.append(7)
    assert compute(manager, parent) == [(shared, parent.block_table[1])]
    assert parent.block_table[1] != shared
    assert child.block_table[1] == shared
    assert compute(manager, child) == [], "the last holder writes in place"
    manager.check([parent, child])


def test_a_shared_block_in_which_nothing_is_kept_is_replaced_without_a_copy(manager):
    parent = computed(manager, range(5))
    child = sequence_of(range(5))
    manager.fork(parent, child)
    assert compute(manager, child) == []
    assert child.block_table[1] != parent.block_table[1]
    manager.check([parent, child])


def test_a_full_block_written_to_by_its_only_holder_is_not_found_meanwhile(manager):
    parent = computed(manager, range(8))
    child = sequence_of(range(8))
    manager.fork(parent, child)
    manager.free(parent)
    assert manager.prepare(child, 1) == []
    assert len(manager._find_prefix(sequence_of(range(9)))) == 1
    manager.mark_computed(child, 1)
    assert len(manager._find_prefix(sequence_of(range(9)))) == 2
    manager.check([child])


def test_what_went_wrong_is_forgotten(manager):
    manager.free(computed(manager, range(8)), forget=True)
    assert manager._find_prefix(sequence_of(range(9))) == []
    manager.check([])


def test_fits_counts_shared_blocks_once_and_cached_ones_in_full():
    manager = BlockManager(4, BLOCK_SIZE)
    holder = computed(manager, range(8))
    same = sequence_of([*range(8), 9])
    assert manager.fits(same, spare=1)
    assert not manager.fits(same, spare=2)
    manager.free(holder)
    assert manager.fits(same, spare=1)
    assert not manager.fits(same, spare=2)


def test_fits_knows_what_freeing_others_would_give_back():
    manager = BlockManager(4, BLOCK_SIZE)
    one = computed(manager, range(8))
    other = computed(manager, [*range(4), *range(50, 56)])
    assert manager.num_free_blocks == 0
    newcomer = sequence_of(range(80, 88))
    assert not manager.fits(newcomer)
    assert not manager.fits(newcomer, without=[one]), "one of its blocks stays with the other"
    assert manager.fits(newcomer, without=[other])
    assert manager.fits(newcomer, without=[one, other], spare=2)
    assert not manager.fits(newcomer, without=[one, other], spare=3)
    reader = sequence_of(range(12))
    assert not manager.fits(reader)
    assert manager.fits(reader, without=[other], spare=1)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda manager, sequence: sequence.block_table.pop(),
        lambda manager, sequence: sequence.block_table.append(7),
        lambda manager, sequence: manager._blank.pop(),
        lambda manager, sequence: manager._blank.append(sequence.block_table[0]),
        lambda manager, sequence: manager._seals.pop(sequence.block_table[0]),
        lambda manager, sequence: manager._blocks_by_key.clear(),
        lambda manager, sequence: manager._cached.update({manager._blank.pop(): None}),
        lambda manager, sequence: sequence.token_ids.__setitem__(0, 99),
        lambda manager, sequence: setattr(sequence, "cache_salt", b"other"),
        lambda manager, sequence: setattr(sequence, "num_computed_tokens", 9),
    ],
)
def test_check_sees_books_that_do_not_balance(manager, corrupt):
    sequence = computed(manager, range(8))
    manager.check([sequence])
    corrupt(manager, sequence)
    with pytest.raises(AssertionError):
        manager.check([sequence])
