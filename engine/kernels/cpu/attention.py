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

from engine.kernels.cpu.vectors import (
    MAX_ROWS,
    PANEL,
    exp_float,
    fetch_add,
    softmax_row,
    store_number,
    tile,
)

STRETCH = 256  # keys under one softmax
MAX_ITEM_ROWS = 48  # query rows that share one read of keys and values
PIECES_PER_WORKER = 8  # with fewer items than this, each is cut into its stretches

# columns of a plan's items
SEQUENCE, KV_HEAD, FIRST_ROW, END_ROW, FIRST_STRETCH, END_STRETCH, PARTIAL = range(7)


class AttentionShape(NamedTuple):
    """Sizes of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_kind: int  # how the cache stores numbers, see `vectors`
    kv_bytes: int  # of a stored number


class Plan(NamedTuple):
    """Who computes what in one step's attention, the same in every layer."""

    items: np.ndarray  # [num_items, 7] int64, the dearest first
    merges: np.ndarray  # [num_merges, 5] int64: sequence, kv head, first row, first partial, number
    partials: np.ndarray  # [num_partials, MAX_ITEM_ROWS, D + 2] float32
    cursor: np.ndarray  # [1] int64, the next item to take
    scratch: np.ndarray  # [num_workers, …] float32


@njit(nogil=True, cache=True)
def plan_attention(
    cu_query_lens,  # [N + 1] int64
    seq_lens,  # [N] int64
    shape,
    num_workers,
):
    """Items of at most 48 query rows of one sequence and KV head, cut along keys when few."""
    num_sequences = len(seq_lens)
    group = shape.num_heads // shape.num_kv_heads
    num_tiles = 0
    num_pieces = 0
    for n in range(num_sequences):
        num_rows = (cu_query_lens[n + 1] - cu_query_lens[n]) * group
        tiles = -(-num_rows // MAX_ITEM_ROWS) * shape.num_kv_heads
        num_tiles += tiles
        num_pieces += tiles * -(-seq_lens[n] // STRETCH)
    cut = num_workers > 1 and num_tiles < PIECES_PER_WORKER * num_workers
    items = np.empty((num_pieces if cut else num_tiles, 7), np.int64)
    merges = np.empty((num_tiles if cut else 0, 5), np.int64)
    partials = np.empty((num_pieces if cut else 0, MAX_ITEM_ROWS, shape.head_dim + 2), np.float32)
    costs = np.empty(len(items), np.int64)
    num_items = 0
    num_merges = 0
    for n in range(num_sequences):
        query_len = cu_query_lens[n + 1] - cu_query_lens[n]
        num_rows = query_len * group
        for first in range(0, num_rows, MAX_ITEM_ROWS):
            end = min(first + MAX_ITEM_ROWS, num_rows)
            seen = seq_lens[n] - query_len + (end - 1) // group + 1
            stretches = -(-seen // STRETCH)
            for head in range(shape.num_kv_heads):
                if cut:
                    merges[num_merges, 0] = n
                    merges[num_merges, 1] = head
                    merges[num_merges, 2] = first
                    merges[num_merges, 3] = num_items
                    merges[num_merges, 4] = stretches
                    num_merges += 1
                step = 1 if cut else stretches
                for stretch in range(0, stretches, step):
                    item = items[num_items]
                    item[SEQUENCE], item[KV_HEAD] = n, head
                    item[FIRST_ROW], item[END_ROW] = first, end
                    item[FIRST_STRETCH], item[END_STRETCH] = stretch, stretch + step
                    item[PARTIAL] = num_items if cut else -1
                    costs[num_items] = (end - first + 6) * min(seen, step * STRETCH)
                    num_items += 1
    order = np.argsort(-costs[:num_items])
    room = MAX_ITEM_ROWS * (2 * shape.head_dim + 2) + MAX_ROWS * (STRETCH + shape.head_dim + 2)
    return Plan(
        items[:num_items][order],
        merges[:num_merges],
        partials,
        np.zeros(1, np.int64),
        np.empty((num_workers, room + 16), np.float32),
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
        total[:] = part
        return
    peak = max(total[head_dim], part[head_dim])
    kept = exp_float(total[head_dim] - peak)
    added = exp_float(part[head_dim] - peak)
    for d in range(head_dim):
        total[d] = total[d] * kept + part[d] * added
    total[head_dim] = peak
    total[head_dim + 1] = total[head_dim + 1] * kept + part[head_dim + 1] * added


@njit(nogil=True, cache=True)
def finish_row(total, out, head_dim, sink, has_sink):
    """Divide by the sum; a sink is one more score, of a key without a value."""
    if has_sink:
        peak = max(total[head_dim], sink)
        kept = exp_float(total[head_dim] - peak)
        weight = kept / (total[head_dim + 1] * kept + exp_float(sink - peak))
    else:
        weight = np.float32(1.0) / total[head_dim + 1]
    for d in range(head_dim):
        out[d] = total[d] * weight


@njit(nogil=True, cache=True)
def attend_item(
    item, query, out, cache, block_tables, cu_query_lens, seq_lens, shape, scale, window, softcap,
    sinks, plan, scratch,
):  # fmt: skip
    """One item: its rows of queries over its stretches of keys."""
    n, head = item[SEQUENCE], item[KV_HEAD]
    first_row, end_row = item[FIRST_ROW], item[END_ROW]
    num_rows = end_row - first_row
    head_dim = shape.head_dim
    width = head_dim + 2
    group = shape.num_heads // shape.num_kv_heads
    begin = cu_query_lens[n]
    before = seq_lens[n] - (cu_query_lens[n + 1] - begin)  # the first query's place
    table = block_tables[n]
    queries = scratch[: MAX_ITEM_ROWS * head_dim].reshape(MAX_ITEM_ROWS, head_dim)
    at = MAX_ITEM_ROWS * head_dim
    totals = scratch[at : at + MAX_ITEM_ROWS * width].reshape(MAX_ITEM_ROWS, width)
    at += MAX_ITEM_ROWS * width
    scores = scratch[at : at + MAX_ROWS * STRETCH]
    at += MAX_ROWS * STRETCH
    parts = scratch[at : at + MAX_ROWS * width].reshape(MAX_ROWS, width)
    if item[PARTIAL] >= 0:
        totals = plan.partials[item[PARTIAL]]
    for i in range(num_rows):
        row = first_row + i
        queries[i] = query[begin + row // group, head * group + row % group]
        totals[i, head_dim + 1] = 0.0
    values_at = shape.block_size * head_dim * shape.kv_bytes
    for stretch in range(item[FIRST_STRETCH], item[END_STRETCH]):
        base = stretch * STRETCH
        for low in range(0, num_rows, MAX_ROWS):
            rows = min(MAX_ROWS, num_rows - low)
            # what the tile's last row sees, and what its first begins with
            end = before + (first_row + low + rows - 1) // group + 1
            end = min(end, base + STRETCH)
            start = base
            if window > 0:
                start = max(base, before + (first_row + low) // group + 1 - window)
            if start >= end:
                continue
            first_key = start // PANEL * PANEL
            num_panels = -(-(end - first_key) // PANEL)
            tile_scores = scores.ctypes.data
            for p in range(num_panels):
                keys = key_panel_at(cache, table, first_key + p * PANEL, head, shape)
                tile(
                    queries[low:].ctypes.data, head_dim, keys, PANEL,
                    tile_scores + 4 * PANEL * p, STRETCH, 0, 0, head_dim, rows, shape.kv_kind,
                )  # fmt: skip
            for i in range(rows):
                place = before + (first_row + low + i) // group
                first_seen = 0
                if window > 0:
                    first_seen = max(0, place + 1 - window - first_key)
                softmax_row(
                    tile_scores + 4 * STRETCH * i, num_panels, first_seen, place + 1 - first_key,
                    scale, softcap, parts[i].ctypes.data + 4 * head_dim,
                )  # fmt: skip
            for p in range(num_panels):
                key = first_key + p * PANEL
                values = key_panel_at(cache, table, key, head, shape) + values_at
                # slots past the last key may hold anything: they are not touched
                count = min(PANEL, end - key)
                for d in range(0, head_dim, PANEL):
                    made = parts.ctypes.data + 4 * d
                    tile(
                        tile_scores + 4 * PANEL * p, STRETCH, values + d * shape.kv_bytes,
                        head_dim, made, width, made if p > 0 else 0, width, count, rows,
                        shape.kv_kind,
                    )  # fmt: skip
            for i in range(rows):
                merge(totals[low + i], parts[i], head_dim)
    if item[PARTIAL] < 0:
        for i in range(num_rows):
            row = first_row + i
            h = head * group + row % group
            sink = sinks[h] if len(sinks) else np.float32(0.0)
            finish_row(totals[i], out[begin + row // group, h], head_dim, sink, len(sinks) > 0)


@njit(nogil=True, cache=True)
def merge_pieces(entry, out, cu_query_lens, shape, sinks, plan, scratch):
    """Put the pieces of one item together, in order."""
    n, head, first_row, first, count = entry
    head_dim = shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    begin = cu_query_lens[n]
    end_row = min(first_row + MAX_ITEM_ROWS, (cu_query_lens[n + 1] - begin) * group)
    total = scratch[: head_dim + 2]
    for row in range(first_row, end_row):
        total[head_dim + 1] = 0.0
        for piece in range(first, first + count):
            merge(total, plan.partials[piece, row - first_row], head_dim)
        h = head * group + row % group
        sink = sinks[h] if len(sinks) else np.float32(0.0)
        finish_row(total, out[begin + row // group, h], head_dim, sink, len(sinks) > 0)


@njit(nogil=True, cache=True, parallel=True)
def attend(
    query,  # [T, H, D] float32
    out,  # [T, H, D] float32, changed
    cache,  # address of a layer's blocks
    block_tables,  # [N, max_blocks] int64
    cu_query_lens,  # [N + 1] int64
    seq_lens,  # [N] int64
    shape,
    scale,  # float32
    window,  # 0: none
    softcap,  # float32, 0: none
    sinks,  # [H] float32, or empty
    plan,
):
    """`reference.paged_attention` over a cache that `store_token` has filled."""
    num_workers = len(plan.scratch)
    plan.cursor[0] = 0
    num_items = len(plan.items)
    for worker in prange(num_workers):
        scratch = plan.scratch[worker]
        while True:
            index = fetch_add(plan.cursor.ctypes.data, 1)
            if index >= num_items:
                break
            attend_item(
                plan.items[index], query, out, cache, block_tables, cu_query_lens, seq_lens,
                shape, scale, window, softcap, sinks, plan, scratch,
            )  # fmt: skip
    for index in range(len(plan.merges)):
        merge_pieces(plan.merges[index], out, cu_query_lens, shape, sinks, plan, plan.scratch[0])
