"""Attention over the paged KV cache, for decodes and chunks of prompts alike.

Blocks hold keys and values as right-hand sides of tiles, see `kv_blocks`. Query heads that share a
KV head are rows of one left-hand side. Of a cache in 8 bits, a key's scale multiplies its score,
and a value's scale its key's weight, once the weights' sum is known; all else is as of any cache.

Keys are taken in stretches: a softmax of its own in each, merged in order (Milakov and Gimelshein
2018; split as in Dao et al. 2023, Flash-Decoding).
"""

import functools
from typing import NamedTuple

import numpy as np
from numba import cfunc, njit, prange
from numba.core.ccallback import CFunc
from numba.np.numpy_support import carray

from engine.kernels.cpu.attention_pairs import pairs_function, round_query
from engine.kernels.cpu.attention_plan import (
    AHEAD,
    END_MEMBER,
    END_ROW,
    END_STRETCH,
    FIRST_MEMBER,
    FIRST_PIECE,
    FIRST_ROW,
    FIRST_STRETCH,
    KV_HEAD,
    MAX_ITEM_ROWS,
    MERGE_END,
    MERGE_FIRST,
    MERGE_HEAD,
    NUM_PANELS,
    NUM_PIECES,
    PAIR_ROWS,
    PARTIAL,
    SEQUENCE,
    STRETCH,
    seen_panels,
)
from engine.kernels.cpu.emit import INT8, PAIRS, PANEL, WIDTH
from engine.kernels.cpu.functions import call_function
from engine.kernels.cpu.kv_blocks import key_panel_at, values_after_keys
from engine.kernels.cpu.tiles import (
    FEW_ROWS,
    MAX_PANELS,
    MAX_PANELS_FEW,
    MAX_ROWS,
    tile,
    tile_over,
)
from engine.kernels.cpu.vectors import (
    as_integers,
    blend_rows,
    exp_float,
    fetch,
    multiply_by_scales,
    softmax_row,
    weigh_row,
)
from engine.kernels.cpu.workers import Crew, fetch_add, share, wait_for_all

ROWS = max(MAX_ROWS, PAIR_ROWS)
# so few wait for memory: values are read whole, block by block, where no tile is as wide
WHOLE_ROWS = 3 if WIDTH == 8 else 0


class Scores(NamedTuple):
    """What a layer does to its scores before the softmax."""

    scale: np.float32
    window: int  # 0: none
    softcap: np.float32  # 0: none
    sinks: np.ndarray  # [H] float32, or empty


class Scratch(NamedTuple):
    """A worker's own memory, cut up."""

    queries: np.ndarray  # [MAX_ITEM_ROWS, D]
    totals: np.ndarray  # [MAX_ITEM_ROWS, D + 2] of each row its values, peak and sum so far
    scores: np.ndarray  # [ROWS × STRETCH], and of PAIRS a piece of values
    parts: np.ndarray  # [ROWS, D + 2] the same over one stretch


@njit(nogil=True, cache=True)
def merge(total, part, head_dim):
    """Take one more stretch of keys into a row: [D] weighted values, then the peak and the sum."""
    if part[head_dim + 1] == 0.0:
        return  # nothing seen
    if total[head_dim + 1] == 0.0:
        weigh_row(part.ctypes.data, np.float32(1.0), total.ctypes.data, head_dim)
        total[head_dim], total[head_dim + 1] = part[head_dim], part[head_dim + 1]
        return
    peak = max(total[head_dim], part[head_dim])
    kept = exp_float(total[head_dim] - peak)
    added = exp_float(part[head_dim] - peak)
    blend_rows(total.ctypes.data, kept, part.ctypes.data, added, head_dim)
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
    elif total[head_dim + 1] == 0.0:
        weight = np.float32(np.nan)  # in this row alone
    else:
        weight = np.float32(1.0) / total[head_dim + 1]
    weigh_row(total.ctypes.data, weight, out.ctypes.data, head_dim)


@njit(nogil=True, cache=True)
def cut_up(memory, head_dim):
    """A worker's scratch memory as arrays."""
    width = head_dim + 2
    totals_at = MAX_ITEM_ROWS * head_dim
    scores_at = totals_at + MAX_ITEM_ROWS * width
    parts_at = scores_at + ROWS * STRETCH + PANEL // 2 * head_dim
    return Scratch(
        memory[:totals_at].reshape(MAX_ITEM_ROWS, head_dim),
        memory[totals_at:scores_at].reshape(MAX_ITEM_ROWS, width),
        memory[scores_at:parts_at],
        memory[parts_at : parts_at + ROWS * width].reshape(ROWS, width),
    )


@njit(inline="always")
def score_keys(queries, rows, head_dim, panels, low, high, values_at, kv_bytes, made, kind):
    """Queries [rows, D] × the keys of some panels, into `made`; scales of 8-bit keys left out."""
    numbers = PANEL * head_dim * kv_bytes  # bytes
    size = numbers + 4 * PANEL if kind == INT8 else numbers
    for p in range(low, high, MAX_PANELS):
        ahead = p + AHEAD
        if ahead < high:
            first, second = panels[ahead], panels[ahead + 1]
        else:  # past the last keys come the first values
            ahead += low - high
            first, second = panels[ahead] + values_at, panels[ahead + 1] + values_at
        tile(
            queries, head_dim, panels[p], panels[p + 1] - panels[p], PANEL,
            made + 4 * PANEL * (p - low), STRETCH, 0, 0, 0, first, second - first,
            -(-size // head_dim), head_dim, rows, min(MAX_PANELS, high - p), kind,
        )  # fmt: skip
        if kind == INT8:  # all scales of values are read before the first value
            for panel in panels[p : p + MAX_PANELS]:
                fetch(panel + values_at + numbers)


@njit(inline="always")
def weigh_values(weights, panels, values_at, num_keys, rows, head_dim, kv_bytes, parts, kind):
    """Weights [rows, keys] × values into `parts`, in the order of the keys."""
    width = head_dim + 2
    if rows > WHOLE_ROWS:
        most = MAX_PANELS_FEW if rows <= FEW_ROWS else MAX_PANELS
        d = 0
        while d < head_dim:
            while PANEL * most > head_dim - d:
                most //= 2
            tile_over(
                weights, STRETCH, panels.ctypes.data, values_at + d * kv_bytes, head_dim,
                parts + 4 * d, width, AHEAD, num_keys, rows, most, kind,
            )  # fmt: skip
            d += PANEL * most
        return
    for p in range(-(-num_keys // PANEL)):
        count = min(PANEL, num_keys - PANEL * p)
        for d in range(0, head_dim, PANEL):
            part, at = parts + 4 * d, values_at + d * kv_bytes
            tile(
                weights + 4 * PANEL * p, STRETCH, panels[p] + at, 0, head_dim, part, width,
                part if p > 0 else 0, 0, width, panels[p + AHEAD] + at, 0, head_dim * kv_bytes,
                count, rows, 1, kind,
            )  # fmt: skip


@functools.cache
def tile_function(kind: int) -> CFunc:
    """How some rows attend to a stretch of keys, for a cache that stores numbers so."""
    if kind == PAIRS:
        return pairs_function()

    @cfunc(
        "int64(" + 9 * "int64, " + "float32, float32, int64, int64)",
        cache=True,
        error_model="numpy",
    )
    def attend_tile(
        queries, places, rows, base, panels, head_dim, values_at, kv_bytes, window, scale,
        softcap, made, parts,
    ):  # fmt: skip
        """Some rows over the keys of one stretch that they see, into `parts` [rows, D + 2].

        Returns whether they see any. All but counts are addresses: `places` says where each row
        stands in its sequence, `panels` where the stretch's keys lie, `made` [MAX_ROWS, STRETCH] is
        to work in.
        """
        places = carray(as_integers(places), (rows,))
        panels = carray(as_integers(panels), (NUM_PANELS,))
        low, high, end = seen_panels(places, base, window)
        if low >= high:
            return 0
        first_key = base + PANEL * low
        score_keys(queries, rows, head_dim, panels, low, high, values_at, kv_bytes, made, kind)
        seen, scales_at = panels[low:], PANEL * head_dim  # of numbers in 8 bits
        for i in range(rows):
            first_seen, row = 0, made + 4 * STRETCH * i
            if window > 0:
                first_seen = max(0, places[i] + 1 - window - first_key)
            if kind == INT8:
                multiply_by_scales(row, seen.ctypes.data, scales_at, high - low)
            softmax_row(
                row, high - low, first_seen, places[i] + 1 - first_key, scale, softcap,
                parts + 4 * ((head_dim + 2) * i + head_dim),
            )  # fmt: skip
            if kind == INT8:
                multiply_by_scales(row, seen.ctypes.data, values_at + scales_at, high - low)
        # slots past the last key may hold anything: they are not touched
        weigh_values(made, seen, values_at, end - first_key, rows, head_dim, kv_bytes, parts, kind)
        return 1

    return attend_tile


@njit(nogil=True, cache=True)
def find_panels(panels, base, end, cache, block_table, head, shape):
    """Addresses of a stretch's keys up to `end`; beyond it the last of them again."""
    last = min(end, base + STRETCH) - 1
    for p in range(len(panels)):
        key = min(base + PANEL * p, last)
        panels[p] = key_panel_at(cache, block_table, key, head, shape)


@njit(nogil=True, cache=True)
def attend_item(item, query, out, cache, sequences, shape, scores, plan, worker):
    """One item: its rows of queries over its stretches of keys."""
    head, first_row = item[KV_HEAD], item[FIRST_ROW]
    head_dim, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    scratch, places = cut_up(plan.scratch[worker], head_dim), plan.places[worker]
    panels = plan.panels[worker]
    totals = scratch.totals
    if item[PARTIAL] >= 0:
        totals = plan.partials[item[PARTIAL] :]
    num_rows = 0
    for member in range(item[FIRST_MEMBER], item[END_MEMBER]):
        n = plan.order[member]
        begin, end = sequences.cu_query_lens[n], sequences.cu_query_lens[n + 1]
        for row in range(first_row, item[END_ROW]):
            token, h = row // group, head * group + row % group
            source, target = query[begin + token, h].ctypes.data, scratch.queries.ctypes.data
            if shape.kv_kind == PAIRS:
                round_query(source, head_dim, target + 2 * head_dim * num_rows)
            else:
                weigh_row(source, np.float32(1.0), target + 4 * head_dim * num_rows, head_dim)
            totals[num_rows, head_dim + 1] = 0.0
            places[num_rows] = sequences.seq_lens[n] - (end - begin) + token
            num_rows += 1
    is_pairs = shape.kv_kind == PAIRS
    at_once, query_bytes = PAIR_ROWS if is_pairs else MAX_ROWS, head_dim * (2 if is_pairs else 4)
    n = plan.order[item[FIRST_MEMBER]]  # the others have the same blocks there
    table, begin = sequences.block_tables[n], sequences.cu_query_lens[n]
    for stretch in range(item[FIRST_STRETCH], item[END_STRETCH]):
        find_panels(
            panels, stretch * STRETCH, places[:num_rows].max() + 1, cache, table, head, shape
        )
        for low in range(0, num_rows, at_once):
            high = min(low + at_once, num_rows)
            tile_arguments = (
                scratch.queries.ctypes.data + query_bytes * low, places[low:].ctypes.data,
                high - low, stretch * STRETCH, panels.ctypes.data, head_dim,
                values_after_keys(shape), shape.kv_bytes, scores.window, scores.scale,
                scores.softcap, scratch.scores.ctypes.data, scratch.parts.ctypes.data,
            )  # fmt: skip
            if call_function(shape.attend_tile, tile_arguments):
                for i in range(low, high):
                    merge(totals[i], scratch.parts[i - low], head_dim)
    if item[PARTIAL] < 0:
        for i in range(num_rows):
            row = first_row + i
            h = head * group + row % group
            finish_row(totals[i], out[begin + row // group, h], head_dim, scores.sinks, h)


@njit(nogil=True, cache=True)
def merge_pieces(entry, out, cu_query_lens, shape, sinks, plan, worker):
    """Put the pieces of one sequence's rows together, in order."""
    head_dim = shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    begin = cu_query_lens[entry[SEQUENCE]]
    first_row, first, num_pieces = entry[MERGE_FIRST], entry[FIRST_PIECE], entry[NUM_PIECES]
    total = plan.scratch[worker, : head_dim + 2]
    for row in range(first_row, entry[MERGE_END]):
        total[head_dim + 1] = 0.0
        for piece in plan.pieces[first : first + num_pieces]:
            merge(total, plan.partials[piece + row - first_row], head_dim)
        h = entry[MERGE_HEAD] * group + row % group
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
