"""What attention's programs find for themselves: which rows and which keys are theirs.

The work of a step is a list of items: a tile of one sequence's query rows, a split of its keys, a
KV head. The list is never written down. Its length and order follow from the lengths of the
sequences, which are on the device already, so that no copy to the host is waited for, nothing is
planned on it, and a captured CUDA graph is right for lengths that were not known at its capture.

A sequence's keys are split by its own length alone: the sums in a row of a decode are taken in the
same order whatever else is in the step.
"""

import triton
import triton.language as tl

SEQUENCES_AT_ONCE: tl.constexpr = tl.constexpr(256)


@triton.jit
def first_key(query_len, seq_len, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """The first key of a sequence that any of its queries sees, at the beginning of a tile."""
    if WINDOW > 0:
        first = tl.maximum(seq_len - query_len + 1 - WINDOW, 0) // KEYS * KEYS
    else:
        first = seq_len * 0
    return first


@triton.jit
def split_length(num_keys, max_splits, KEYS: tl.constexpr, SHORTEST: tl.constexpr):
    """How many keys a split has: whole tiles, as many in each split, not fewer than SHORTEST."""
    even = tl.cdiv(tl.cdiv(num_keys, max_splits), KEYS) * KEYS
    return tl.maximum(even, SHORTEST)


@triton.jit
def is_ours(query_len, few, MANY: tl.constexpr):
    """Whether a launch for few tokens of a sequence, or one for more, takes a sequence."""
    return query_len > few if MANY else (query_len > 0) & (query_len <= few)


@triton.jit
def count_items(
    n,  # sequences
    cu_query_lens,
    seq_lens,
    num_sequences,
    max_splits,
    few,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHORTEST: tl.constexpr,
    WINDOW: tl.constexpr,
    MANY: tl.constexpr,
):
    """Items of each sequence, for one KV head; none of one that is not there or not ours."""
    there = n < num_sequences
    start = tl.load(cu_query_lens + n, mask=there, other=0)
    query_len = tl.load(cu_query_lens + n + 1, mask=there, other=0) - start
    seq_len = tl.load(seq_lens + n, mask=there, other=0)
    num_keys = seq_len - first_key(query_len, seq_len, KEYS, WINDOW)
    num_splits = tl.cdiv(num_keys, split_length(num_keys, max_splits, KEYS, SHORTEST))
    num_tiles = tl.cdiv(query_len * GROUP, ROWS)
    return tl.where(is_ours(query_len, few, MANY), num_tiles * num_splits, 0)


@triton.jit
def find_item(
    item,
    cu_query_lens,
    seq_lens,
    num_sequences,
    max_splits,
    few,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHORTEST: tl.constexpr,
    WINDOW: tl.constexpr,
    MANY: tl.constexpr,
):
    """Whose an item is: (sequence, its place among that sequence's items, how many all have)."""
    n = 0
    passed = 0
    total = 0
    for first in range(0, num_sequences, SEQUENCES_AT_ONCE):
        counts = count_items(
            first + tl.arange(0, SEQUENCES_AT_ONCE),
            cu_query_lens, seq_lens, num_sequences, max_splits, few,
            GROUP, ROWS, KEYS, SHORTEST, WINDOW, MANY,
        )  # fmt: skip
        before = total + tl.cumsum(counts) <= item
        n += tl.sum(before.to(tl.int32))
        passed += tl.sum(tl.where(before, counts, 0))
        total += tl.sum(counts)
    return n, item - passed, total


@triton.jit
def locate(
    item, cu_query_lens, seq_lens, num_sequences, max_splits, few,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SHORTEST: tl.constexpr,
    WINDOW: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """An item: (sequence, its first token, (query length, length), tile, split, of how many)."""
    n, place, _ = find_item(
        item, cu_query_lens, seq_lens, num_sequences, max_splits, few,
        GROUP, ROWS, KEYS, SHORTEST, WINDOW, MANY,
    )  # fmt: skip
    start = tl.load(cu_query_lens + n)
    query_len = tl.load(cu_query_lens + n + 1) - start
    seq_len = tl.load(seq_lens + n)
    num_keys = seq_len - first_key(query_len, seq_len, KEYS, WINDOW)
    num_splits = tl.cdiv(num_keys, split_length(num_keys, max_splits, KEYS, SHORTEST))
    # the last rows see the most keys: they are begun first
    tile = tl.cdiv(query_len * GROUP, ROWS) - 1 - place // num_splits
    return n, start, (query_len, seq_len), tile, place % num_splits, num_splits


@triton.jit
def keys_seen(
    lengths, tile, split, max_splits,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SHORTEST: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """The keys of a split that some row of a tile sees, (begin, whole, end).

    Those before `whole` are seen by each of its rows.
    """
    query_len, seq_len = lengths
    first = first_key(query_len, seq_len, KEYS, WINDOW)
    length = split_length(seq_len - first, max_splits, KEYS, SHORTEST)
    # positions of the tile's first row and of its last
    lowest = seq_len - query_len + tile * ROWS // GROUP
    highest = seq_len - query_len + tl.minimum((tile * ROWS + ROWS - 1) // GROUP, query_len - 1)
    begin = first + split * length
    end = tl.minimum(begin + length, highest + 1)
    if WINDOW > 0:
        begin = tl.maximum(begin, (lowest - WINDOW + 1) // KEYS * KEYS)
        whole = begin
    else:
        whole = begin + tl.maximum(tl.minimum(end, lowest + 1) - begin, 0) // KEYS * KEYS
    return begin, whole, end
