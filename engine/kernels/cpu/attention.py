"""Attention over the paged KV cache, for decodes and chunks of prompts alike.

One head of a block holds its keys transposed, [block_size / 16, D, 16], then its values,
[block_size, D]: both are right-hand sides of tiles, read in place. Query heads that share a KV head
are rows of one left-hand side.

Keys are taken in stretches of 256, counted from the sequence's start: a softmax of its own in each,
merged in order (Milakov and Gimelshein 2018; split as in Dao et al. 2023, Flash-Decoding). Where
the stretches lie depends on nothing but the sequence, so a row's result does not either.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from engine.kernels.cpu.emit import PANEL
from engine.kernels.cpu.tiles import MAX_ROWS, tile
from engine.kernels.cpu.vectors import exp_float, softmax_row, store_number
from engine.kernels.cpu.workers import Crew, fetch_add, share, wait_for_all

STRETCH = 256  # keys under one softmax
MAX_ITEM_ROWS = 48  # query rows that share one read of keys and values
ITEMS_PER_WORKER = 8  # with fewer items than this, each is cut into its stretches

# columns of a plan's items
SEQUENCE, KV_HEAD, FIRST_ROW, END_ROW, FIRST_STRETCH, END_STRETCH, PARTIAL = range(7)


class AttentionShape(NamedTuple):
    """Sizes of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # a multiple of 16
    block_size: int  # a multiple of 16
    kv_kind: int  # how the cache stores numbers, see `emit`
    kv_bytes: int  # of a stored number


class Sequences(NamedTuple):
    """Where the sequences of one step lie, as in `AttentionMetadata`."""

    block_tables: np.ndarray  # [N, max_blocks] int64
    cu_query_lens: np.ndarray  # [N + 1] int64
    seq_lens: np.ndarray  # [N] int64


class Scores(NamedTuple):
    """What a layer does to its scores before the softmax."""

    scale: np.float32
    window: int  # 0: none
    softcap: np.float32  # 0: none
    sinks: np.ndarray  # [H] float32, or empty


class Plan(NamedTuple):
    """Who computes what in one step's attention, the same in every layer."""

    items: np.ndarray  # [num_items, 7] int64, the dearest first
    merges: np.ndarray  # [num_merges, 5] int64: sequence, kv head, first row, first partial, number
    partials: np.ndarray  # [num_partials, MAX_ITEM_ROWS, D + 2] float32
    scratch: np.ndarray  # [num_workers, …] float32


class Scratch(NamedTuple):
    """A worker's own memory, cut up."""

    queries: np.ndarray  # [MAX_ITEM_ROWS, D]
    totals: np.ndarray  # [MAX_ITEM_ROWS, D + 2] of each row its values, peak and sum so far
    scores: np.ndarray  # [MAX_ROWS, STRETCH]
    parts: np.ndarray  # [MAX_ROWS, D + 2] the same over one stretch


@njit(nogil=True, cache=True)
def count_items(cu_query_lens, seq_lens, shape):
    """Items of a step, whole and cut into stretches (at most)."""
    group = shape.num_heads // shape.num_kv_heads
    whole, pieces = 0, 0
    for n in range(len(seq_lens)):
        num_rows = (cu_query_lens[n + 1] - cu_query_lens[n]) * group
        items = -(-num_rows // MAX_ITEM_ROWS) * shape.num_kv_heads
        whole += items
        pieces += items * -(-seq_lens[n] // STRETCH)
    return whole, pieces


@njit(nogil=True, cache=True)
def plan_attention(
    cu_query_lens,  # [N + 1] int64
    seq_lens,  # [N] int64
    shape,
    num_workers,
):
    """Items of at most 48 query rows of one sequence and KV head, cut along keys when few."""
    group = shape.num_heads // shape.num_kv_heads
    whole, pieces = count_items(cu_query_lens, seq_lens, shape)
    cut = num_workers > 1 and whole < ITEMS_PER_WORKER * num_workers
    items = np.empty((pieces if cut else whole, 7), np.int64)
    merges = np.empty((whole if cut else 0, 5), np.int64)
    costs = np.empty(len(items), np.int64)
    num_items, num_merges = 0, 0
    for n in range(len(seq_lens)):
        query_len = cu_query_lens[n + 1] - cu_query_lens[n]
        for first in range(0, query_len * group, MAX_ITEM_ROWS):
            end = min(first + MAX_ITEM_ROWS, query_len * group)
            seen = seq_lens[n] - query_len + (end - 1) // group + 1
            stretches = -(-seen // STRETCH)
            step = 1 if cut else stretches
            for head in range(shape.num_kv_heads):
                if cut:
                    entry = merges[num_merges]
                    entry[0], entry[1], entry[2] = n, head, first
                    entry[3], entry[4] = num_items, stretches
                    num_merges += 1
                for stretch in range(0, stretches, step):
                    partial = num_items if cut else -1
                    item = items[num_items]
                    item[SEQUENCE], item[KV_HEAD] = n, head
                    item[FIRST_ROW], item[END_ROW] = first, end
                    item[FIRST_STRETCH], item[END_STRETCH] = stretch, stretch + step
                    item[PARTIAL] = partial
                    costs[num_items] = (end - first + 6) * min(seen, step * STRETCH)
                    num_items += 1
    room = MAX_ITEM_ROWS * (2 * shape.head_dim + 2) + MAX_ROWS * (STRETCH + shape.head_dim + 2)
    return Plan(
        items[:num_items][np.argsort(-costs[:num_items])],
        merges[:num_merges],
        np.empty((pieces if cut else 0, MAX_ITEM_ROWS, shape.head_dim + 2), np.float32),
        np.empty((num_workers, room), np.float32),
    )


@njit(nogil=True, cache=True)
def key_panel_at(cache, block_table, key, kv_head, shape):
    """Address of the 16 keys around a place in a sequence, [D, 16]; block_table is its row."""
    block = block_table[key // shape.block_size]
    size = shape.block_size * shape.head_dim
    head = (block * shape.num_kv_heads + kv_head) * 2 * size
    inside = key % shape.block_size // PANEL * PANEL * shape.head_dim
    return cache + (head + inside) * shape.kv_bytes


@njit(nogil=True, cache=True)
def store_token(cache, slot, kv_head, key, value, shape):
    """Write one token's key and value, float32 [D], of one head into its slot."""
    size = shape.block_size * shape.head_dim
    block, place = slot // shape.block_size, slot % shape.block_size
    head = (block * shape.num_kv_heads + kv_head) * 2 * size
    first = head + place // PANEL * PANEL * shape.head_dim + place % PANEL
    keys = cache + first * shape.kv_bytes
    values = cache + (head + size + place * shape.head_dim) * shape.kv_bytes
    if shape.kv_kind == 0:
        for d in range(shape.head_dim):
            store_number(key[d], keys + d * PANEL * 4, 0)
            store_number(value[d], values + d * 4, 0)
    elif shape.kv_kind == 1:
        for d in range(shape.head_dim):
            store_number(key[d], keys + d * PANEL * 2, 1)
            store_number(value[d], values + d * 2, 1)
    else:
        for d in range(shape.head_dim):
            store_number(key[d], keys + d * PANEL * 2, 2)
            store_number(value[d], values + d * 2, 2)


@njit(nogil=True, cache=True)
def merge(total, part, head_dim):
    """Take one more stretch of keys into a row: [D] weighted values, then the peak and the sum."""
    if part[head_dim + 1] == 0.0:
        return  # nothing seen
    if total[head_dim + 1] == 0.0:
        for d in range(head_dim + 2):
            total[d] = part[d]
        return
    peak = max(total[head_dim], part[head_dim])
    kept = exp_float(total[head_dim] - peak)
    added = exp_float(part[head_dim] - peak)
    for d in range(head_dim):
        total[d] = total[d] * kept + part[d] * added
    total[head_dim] = peak
    total[head_dim + 1] = total[head_dim + 1] * kept + part[head_dim + 1] * added


@njit(nogil=True, cache=True)
def finish_row(total, out, head_dim, sinks, h):
    """Divide by the sum; a head's sink is one more score, of a key without a value."""
    if len(sinks):
        sink = sinks[h]
        peak = max(total[head_dim], sink)
        kept = exp_float(total[head_dim] - peak)
        weight = kept / (total[head_dim + 1] * kept + exp_float(sink - peak))
    else:
        weight = np.float32(1.0) / total[head_dim + 1]
    for d in range(head_dim):
        out[d] = total[d] * weight


@njit(nogil=True, cache=True)
def cut_up(memory, head_dim):
    """A worker's scratch memory as arrays."""
    width = head_dim + 2
    totals_at = MAX_ITEM_ROWS * head_dim
    scores_at = totals_at + MAX_ITEM_ROWS * width
    parts_at = scores_at + MAX_ROWS * STRETCH
    return Scratch(
        memory[:totals_at].reshape(MAX_ITEM_ROWS, head_dim),
        memory[totals_at:scores_at].reshape(MAX_ITEM_ROWS, width),
        memory[scores_at:parts_at].reshape(MAX_ROWS, STRETCH),
        memory[parts_at : parts_at + MAX_ROWS * width].reshape(MAX_ROWS, width),
    )


@njit(nogil=True, cache=True)
def attend_tile(queries, rows, places, base, cache, table, head, shape, scores, scratch):
    """Up to 6 rows over the keys of one stretch that they see, into `scratch.parts`.

    Returns whether they see any. `places` says where the rows stand, see `row_place`.
    """
    head_dim, kind = shape.head_dim, shape.kv_kind
    first_place, group, offset = places
    end = min(row_place(first_place, group, offset, rows - 1) + 1, base + STRETCH)
    start = base
    if scores.window > 0:
        start = max(base, row_place(first_place, group, offset, 0) + 1 - scores.window)
    if start >= end:
        return False
    first_key = start // PANEL * PANEL
    num_panels = -(-(end - first_key) // PANEL)
    made = scratch.scores.ctypes.data
    for p in range(num_panels):
        keys = key_panel_at(cache, table, first_key + p * PANEL, head, shape)
        tile(
            queries, head_dim, keys, PANEL, made + 4 * PANEL * p, STRETCH, 0, 0, head_dim, rows,
            kind,
        )  # fmt: skip
    for i in range(rows):
        place = row_place(first_place, group, offset, i)
        first_seen = 0
        if scores.window > 0:
            first_seen = max(0, place + 1 - scores.window - first_key)
        softmax_row(
            made + 4 * STRETCH * i, num_panels, first_seen, place + 1 - first_key, scores.scale,
            scores.softcap, scratch.parts[i].ctypes.data + 4 * head_dim,
        )  # fmt: skip
    values_at = shape.block_size * head_dim * shape.kv_bytes
    width = head_dim + 2
    for p in range(num_panels):
        key = first_key + p * PANEL
        values = key_panel_at(cache, table, key, head, shape) + values_at
        # slots past the last key may hold anything: they are not touched
        count = min(PANEL, end - key)
        for d in range(0, head_dim, PANEL):
            part = scratch.parts.ctypes.data + 4 * d
            tile(
                made + 4 * PANEL * p, STRETCH, values + d * shape.kv_bytes, head_dim, part, width,
                part if p > 0 else 0, width, count, rows, kind,
            )  # fmt: skip
    return True


@njit(nogil=True, cache=True)
def row_place(first_place, group, offset, row):
    """A row's place in its sequence: the heads of a group stand at one."""
    return first_place + (offset + row) // group


@njit(nogil=True, cache=True)
def attend_item(item, query, out, cache, sequences, shape, scores, plan, worker):
    """One item: its rows of queries over its stretches of keys."""
    n, head, first_row = item[SEQUENCE], item[KV_HEAD], item[FIRST_ROW]
    num_rows = item[END_ROW] - first_row
    head_dim = shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    begin = sequences.cu_query_lens[n]
    before = sequences.seq_lens[n] - (sequences.cu_query_lens[n + 1] - begin)
    table = sequences.block_tables[n]
    scratch = cut_up(plan.scratch[worker], head_dim)
    totals = scratch.totals
    if item[PARTIAL] >= 0:
        totals = plan.partials[item[PARTIAL]]
    for i in range(num_rows):
        row = first_row + i
        token, h = begin + row // group, head * group + row % group
        for d in range(head_dim):
            scratch.queries[i, d] = query[token, h, d]
        totals[i, head_dim + 1] = 0.0
    for stretch in range(item[FIRST_STRETCH], item[END_STRETCH]):
        for low in range(0, num_rows, MAX_ROWS):
            rows = min(MAX_ROWS, num_rows - low)
            if attend_tile(
                scratch.queries[low:].ctypes.data, rows, (before, group, first_row + low),
                stretch * STRETCH, cache, table, head, shape, scores, scratch,
            ):  # fmt: skip
                for i in range(rows):
                    merge(totals[low + i], scratch.parts[i], head_dim)
    if item[PARTIAL] < 0:
        for i in range(num_rows):
            row = first_row + i
            h = head * group + row % group
            finish_row(totals[i], out[begin + row // group, h], head_dim, scores.sinks, h)


@njit(nogil=True, cache=True)
def merge_pieces(entry, out, cu_query_lens, shape, sinks, plan, worker):
    """Put the pieces of one item together, in order."""
    n, head, first_row, first, count = entry[0], entry[1], entry[2], entry[3], entry[4]
    head_dim = shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    begin = cu_query_lens[n]
    end_row = min(first_row + MAX_ITEM_ROWS, (cu_query_lens[n + 1] - begin) * group)
    total = plan.scratch[worker, : head_dim + 2]
    for row in range(first_row, end_row):
        total[head_dim + 1] = 0.0
        for piece in range(first, first + count):
            merge(total, plan.partials[piece, row - first_row], head_dim)
        h = head * group + row % group
        finish_row(total, out[begin + row // group, h], head_dim, sinks, h)


@njit(nogil=True, cache=True)
def attend(
    query,  # [T, H or more, D] float32
    out,  # [T, H, D] float32, changed
    cache,  # address of a layer's blocks, filled by `store_token`
    sequences,
    shape,
    scores,
    plan,
    cursor,  # [1] int64, 0 at first: the next item, which the quickest worker takes
    crew,
    phase,
):
    """One worker's part of `reference.paged_attention`; returns the next phase.

    All is there when all workers have come to its end.
    """
    while True:
        index = fetch_add(cursor.ctypes.data, 1)
        if index >= len(plan.items):
            break
        attend_item(
            plan.items[index], query, out, cache, sequences, shape, scores, plan, crew.worker
        )
    if len(plan.merges):
        wait_for_all(crew, phase)
        phase += 1
        low, high = share(len(plan.merges), crew)
        for index in range(low, high):
            merge_pieces(
                plan.merges[index], out, sequences.cu_query_lens, shape, scores.sinks, plan,
                crew.worker,
            )  # fmt: skip
    return phase


@njit(nogil=True, cache=True, parallel=True)
def attend_all(query, out, cache, sequences, shape, scores, plan):
    """`attend` by all workers at once."""
    num_workers = len(plan.scratch)
    cursor, meeting = np.zeros(1, np.int64), np.zeros(8, np.int64)
    for worker in prange(num_workers):
        crew = Crew(worker, num_workers, meeting)
        attend(query, out, cache, sequences, shape, scores, plan, cursor, crew, 0)
