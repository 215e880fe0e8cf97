"""Who computes what in one step's attention, the same in every layer.

Keys are taken in stretches of 256, counted from the sequence's start. Where they lie depends on
nothing but the sequence, so a row's result does not either, however its stretches are shared out.

Decodes whose sequences begin with the same blocks read these once: each stretch that they have in
common is one item with the rows of all (as in Hydragen, Juravsky et al. 2024, here for every length
of prefix at once, as a radix tree would have them).
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from engine.kernels.cpu.emit import PANEL
from engine.kernels.cpu.pairs import BY_AMX
from engine.kernels.cpu.tiles import MAX_ROWS
from engine.kernels.cpu.tiles_amx import ROWS_AT_ONCE

STRETCH = 256  # keys under one softmax
AHEAD = 4  # panels of keys or values from the one read to the one fetched: as slow as memory is
NUM_PANELS = STRETCH // PANEL + AHEAD + 1  # past the last, too, `tile_over` looks once
PAIR_ROWS = ROWS_AT_ONCE if BY_AMX else MAX_ROWS  # that attend at once, of bfloat16 by pairs
MAX_ITEM_ROWS = 48  # query rows that share one read of keys and values
ITEMS_PER_WORKER = 8  # with fewer items than this, each is cut into its stretches

# columns of an item: members are sequences, as `Plan.order` has them, and give it the same rows
(
    FIRST_MEMBER, END_MEMBER, KV_HEAD, FIRST_ROW, END_ROW, FIRST_STRETCH, END_STRETCH, PARTIAL,
    ITEM_SIZE,
) = range(9)  # fmt: skip
# columns of a merge: some rows of one sequence, and where their pieces are listed
SEQUENCE, MERGE_HEAD, MERGE_FIRST, MERGE_END, FIRST_PIECE, NUM_PIECES, MERGE_SIZE = range(7)


class AttentionShape(NamedTuple):
    """Sizes of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # a multiple of 16
    block_size: int  # a multiple of 16
    kv_kind: int  # how the cache stores numbers, see `emit`
    kv_bytes: int  # of a stored number, without its scale
    attend_tile: int  # address of `attention.tile_function`'s


class Sequences(NamedTuple):
    """Where the sequences of one step lie, as in `AttentionMetadata`."""

    block_tables: np.ndarray  # [N, max_blocks] int64
    cu_query_lens: np.ndarray  # [N + 1] int64
    seq_lens: np.ndarray  # [N] int64


class Plan(NamedTuple):
    """Items, which workers take one by one, and merges, once all items are done."""

    order: np.ndarray  # [N] int64: the sequences, those that begin alike side by side
    items: np.ndarray  # [num_items, ITEM_SIZE] int64, the dearest first
    merges: np.ndarray  # [num_merges, MERGE_SIZE] int64
    pieces: np.ndarray  # [num_pieces] int64: of a merge's stretches the first rows of partials
    partials: np.ndarray  # [num_rows, D + 2] float32: what an item without all stretches made
    scratch: np.ndarray  # [num_workers, …] float32
    places: np.ndarray  # [num_workers, MAX_ITEM_ROWS] int64: where an item's rows stand
    panels: np.ndarray  # [num_workers, NUM_PANELS] int64: addresses of a stretch's keys


class Draft(NamedTuple):
    """A plan in the making."""

    order: np.ndarray  # as in `Plan`
    shared: np.ndarray  # [N + 1]: stretches that each has in common with the one before
    items: np.ndarray
    keys: np.ndarray  # [num_items] int64: how many an item's stretches have
    merges: np.ndarray
    pieces: np.ndarray
    begun: np.ndarray  # [most stretches] int64: of each stretch the last item, of the first head
    sizes: np.ndarray  # [4] int64: items, merges, pieces and rows of partials so far


ITEMS, MERGES, PIECES, ROWS = range(4)


@njit(nogil=True, cache=True)
def seen_panels(places, base, window):
    """[low, high) of a stretch's panels that rows at these places see keys of; and those keys' end.

    None, low = high, where they see no key of it.
    """
    end = min(places.max() + 1, base + STRETCH)
    start = base
    if window > 0:
        start = max(base, places.min() + 1 - window)
    if start >= end:
        return 0, 0, end
    return (start - base) // PANEL, -(-(end - base) // PANEL), end


@njit(nogil=True, cache=True)
def plan_attention(sequences, shape, num_workers):
    """Items of at most 48 query rows of one KV head.

    They are of one sequence and all its stretches; but of one stretch where a prefix is shared, or
    where there are few items.
    """
    group = shape.num_heads // shape.num_kv_heads
    query_lens = sequences.cu_query_lens[1:] - sequences.cu_query_lens[:-1]
    order, shared = order_by_prefix(sequences, query_lens, shape)
    num_whole, num_pieces = count_items(query_lens, sequences.seq_lens, shape)
    few = num_workers > 1 and num_whole < ITEMS_PER_WORKER * num_workers
    draft = Draft(
        order,
        shared,
        np.empty((num_pieces, ITEM_SIZE), np.int64),
        np.empty(num_pieces, np.int64),
        np.empty((num_whole, MERGE_SIZE), np.int64),
        np.empty(num_pieces, np.int64),
        np.empty(-(-sequences.seq_lens.max() // STRETCH), np.int64),
        np.zeros(4, np.int64),
    )
    for i in range(len(order)):
        num_rows = query_lens[order[i]] * group
        before = sequences.seq_lens[order[i]] - query_lens[order[i]]
        for first in range(0, num_rows, MAX_ITEM_ROWS):
            end = min(first + MAX_ITEM_ROWS, num_rows)
            seen = before + (end - 1) // group + 1
            add_rows(draft, i, first, end, seen, few, shape.num_kv_heads)
    items, keys = draft.items[: draft.sizes[ITEMS]], draft.keys[: draft.sizes[ITEMS]]
    width = shape.head_dim + 2
    room = MAX_ITEM_ROWS * (shape.head_dim + width) + PANEL // 2 * shape.head_dim
    room += max(MAX_ROWS, PAIR_ROWS) * (STRETCH + width)
    return Plan(
        order,
        items[dearest_first(items, keys)],
        draft.merges[: draft.sizes[MERGES]],
        draft.pieces[: draft.sizes[PIECES]],
        np.empty((draft.sizes[ROWS], width), np.float32),
        np.empty((num_workers, room), np.float32),
        np.empty((num_workers, MAX_ITEM_ROWS), np.int64),
        np.empty((num_workers, NUM_PANELS), np.int64),
    )


@njit(nogil=True, cache=True)
def add_rows(draft, i, first, end, seen, few, num_heads):
    """Rows of the sequence at `i` in the order, which see so many keys, of all KV heads."""
    stretches = -(-seen // STRETCH)
    in_common = max(draft.shared[i], draft.shared[i + 1])
    if in_common == 0 and (stretches == 1 or not few):
        begin_item(draft, i, first, end, 0, seen, num_heads)
        return
    first_piece = draft.sizes[PIECES]
    for stretch in range(stretches):
        begun = draft.items[draft.begun[stretch]] if stretch < draft.shared[i] else draft.items[0]
        num_members = begun[END_MEMBER] - begun[FIRST_MEMBER]
        joined = stretch < draft.shared[i] and (num_members + 1) * (end - first) <= MAX_ITEM_ROWS
        if not joined:
            num_keys = min(seen - stretch * STRETCH, STRETCH)
            draft.begun[stretch] = begin_item(draft, i, first, end, stretch, num_keys, num_heads)
            room = MAX_ITEM_ROWS if stretch < draft.shared[i + 1] else end - first
        for head in range(num_heads):
            item = draft.items[draft.begun[stretch] + head]
            if joined:
                item[END_MEMBER] += 1
            else:
                item[PARTIAL] = draft.sizes[ROWS]
                draft.sizes[ROWS] += room
            own = (i - item[FIRST_MEMBER]) * (end - first)
            draft.pieces[first_piece + head * stretches + stretch] = item[PARTIAL] + own
    for head in range(num_heads):
        merge = draft.merges[draft.sizes[MERGES]]
        merge[SEQUENCE], merge[MERGE_HEAD] = draft.order[i], head
        merge[MERGE_FIRST], merge[MERGE_END] = first, end
        merge[FIRST_PIECE], merge[NUM_PIECES] = draft.sizes[PIECES], stretches
        draft.sizes[MERGES] += 1
        draft.sizes[PIECES] += stretches


@njit(nogil=True, cache=True)
def begin_item(draft, i, first, end, stretch, num_keys, num_heads):
    """An item of each KV head; returns the first."""
    at = draft.sizes[ITEMS]
    for head in range(num_heads):
        item = draft.items[at + head]
        item[FIRST_MEMBER], item[END_MEMBER], item[KV_HEAD] = i, i + 1, head
        item[FIRST_ROW], item[END_ROW] = first, end
        item[FIRST_STRETCH], item[END_STRETCH] = stretch, stretch + -(-num_keys // STRETCH)
        item[PARTIAL] = -1
        draft.keys[at + head] = num_keys
    draft.sizes[ITEMS] += num_heads
    return at


@njit(nogil=True, cache=True)
def count_items(query_lens, seq_lens, shape):
    """Items of a step with no prefix shared, whole and cut into stretches (at most)."""
    group = shape.num_heads // shape.num_kv_heads
    whole, pieces = 0, 0
    for n in range(len(seq_lens)):
        items = -(-query_lens[n] * group // MAX_ITEM_ROWS) * shape.num_kv_heads
        whole += items
        pieces += items * -(-seq_lens[n] // STRETCH)
    return whole, pieces


@njit(nogil=True, cache=True)
def dearest_first(items, keys):
    """An order of items by what they cost: rows, and a share for reading, times keys."""
    members = items[:, END_MEMBER] - items[:, FIRST_MEMBER]
    rows = members * (items[:, END_ROW] - items[:, FIRST_ROW])
    return np.argsort(-(rows + MAX_ROWS) * keys)


@njit(nogil=True, cache=True)
def order_by_prefix(sequences, query_lens, shape):
    """An order of the sequences, and how many stretches each has in common with the one before.

    Only decodes have any, and only stretches that are full. [N] and, with a 0 at its end, [N + 1].
    """
    tables, block_size = sequences.block_tables, shape.block_size
    num, group = len(query_lens), shape.num_heads // shape.num_kv_heads
    order = np.arange(num)
    shared = np.zeros(num + 1, np.int64)
    full = np.empty(num, np.int64)
    num_long = 0
    for n in range(num):
        decodes = query_lens[n] == 1 and 2 * group <= MAX_ITEM_ROWS
        full[n] = sequences.seq_lens[n] // STRETCH if decodes else 0
        if full[n] > 0:
            num_long += 1
    if num_long < 2:
        return order, shared
    # a block holds what follows one beginning, so that the last blocks of stretches tell prefixes
    # apart: they are sorted by
    ends = np.empty((num, full.max()), np.int64)
    for n in range(num):
        for stretch in range(full[n]):
            ends[n, stretch] = tables[n, ((stretch + 1) * STRETCH - 1) // block_size]
    for i in range(1, num):
        n, j = order[i], i
        while j > 0 and begins_lower(ends, full, n, order[j - 1]):
            order[j] = order[j - 1]
            j -= 1
        order[j] = n
    for i in range(1, num):
        a, b = order[i - 1], order[i]
        block = 0
        for stretch in range(min(full[a], full[b])):
            last = ((stretch + 1) * STRETCH - 1) // block_size
            while block <= last and tables[a, block] == tables[b, block]:
                block += 1
            if block <= last:
                break
            shared[i] = stretch + 1
    return order, shared


@njit(nogil=True, cache=True)
def begins_lower(ends, full, a, b):
    for stretch in range(min(full[a], full[b])):
        if ends[a, stretch] != ends[b, stretch]:
            return ends[a, stretch] < ends[b, stretch]
    return full[a] < full[b]
