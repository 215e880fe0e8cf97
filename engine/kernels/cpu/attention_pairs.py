"""How rows attend to a stretch of keys where all that is multiplied is bfloat16.

Queries and the softmax's numerators are rounded; scores, their sums and what is made are float32.
By AMX where there is such, else by AVX-512's products of pairs.
"""

import functools

import numpy as np
from numba import cfunc, njit
from numba.core.ccallback import CFunc
from numba.np.numpy_support import carray

from engine.kernels.cpu import attention_amx
from engine.kernels.cpu.amx import TILE_ROWS
from engine.kernels.cpu.attention_plan import (
    AHEAD,
    NUM_PANELS,
    PAIR_ROWS,
    STRETCH,
    seen_panels,
)
from engine.kernels.cpu.emit import PAIRS, PANEL, WIDTH
from engine.kernels.cpu.pairs import BY_AMX, round_vector
from engine.kernels.cpu.softmax_pairs import softmax_pairs
from engine.kernels.cpu.tiles import FEW_ROWS, MAX_PANELS, MAX_PANELS_FEW, tile, tile_over
from engine.kernels.cpu.tiles_amx import BLOCK
from engine.kernels.cpu.vectors import as_integers

_FIRST_HALVES = 0x0000FFFF0000FFFF  # of two pairs the first number of each


@njit(inline="always")
def round_query(query, head_dim, out):
    """A row, float32, rounded to bfloat16; addresses."""
    for i in range(0, head_dim, WIDTH):
        round_vector(query + 4 * i, out + 2 * i)


@njit(inline="always")
def _score(queries, rows, head_dim, panels, low, high, values_at, made):
    """Queries [rows, D] × the keys of some panels, into `made`."""
    for p in range(low, high, MAX_PANELS):
        ahead = p + AHEAD
        if ahead < high:
            first, second = panels[ahead], panels[ahead + 1]
        else:  # past the last keys come the first values
            ahead += low - high
            first, second = panels[ahead] + values_at, panels[ahead + 1] + values_at
        tile(
            queries, head_dim // 2, panels[p], panels[p + 1] - panels[p], PANEL,
            made + 4 * PANEL * (p - low), STRETCH, 0, 0, 0, first, second - first, 4 * PANEL,
            head_dim // 2, rows, min(MAX_PANELS, high - p), PAIRS,
        )  # fmt: skip


@njit(inline="always")
def _weigh(weights, panels, values_at, num_panels, rows, head_dim, parts):
    """Weights [rows, 16 × num_panels] × values into `parts`, in the order of the keys."""
    most = MAX_PANELS_FEW if rows <= FEW_ROWS else MAX_PANELS
    d = 0
    while d < head_dim:
        while PANEL * most > head_dim - d:
            most //= 2
        tile_over(
            weights, STRETCH, panels, values_at + 4 * d, head_dim, parts + 4 * d, head_dim + 2,
            AHEAD, num_panels * (PANEL // 2), rows, most, PAIRS,
        )  # fmt: skip
        d += PANEL * most


@njit(inline="always")
def _copy_values(piece, count, head_dim, out):
    """The first so many values of a piece, and zeros: other slots may hold what is no number."""
    width = head_dim // 2  # int64 of a row of pairs
    source = carray(as_integers(piece), (PANEL // 2, width))
    target = carray(as_integers(out), (PANEL // 2, width))
    for row in range(PANEL // 2):
        mask = np.int64(0)
        if 2 * row + 1 < count:
            mask = np.int64(-1)
        elif 2 * row < count:
            mask = np.int64(_FIRST_HALVES)
        for i in range(width):
            target[row, i] = source[row, i] & mask


@njit(inline="always")
def _clear(address, count):
    """So many times eight bytes."""
    numbers = carray(as_integers(address), (count,))
    for i in range(count):
        numbers[i] = 0


@functools.cache
def pairs_function() -> CFunc:
    """`attention.tile_function` of a cache of bfloat16 by pairs."""

    @cfunc(
        "int64(" + 9 * "int64, " + "float32, float32, int64, int64)",
        cache=True,
        error_model="numpy",
    )
    def attend_pairs(
        queries, places, rows, base, panels, head_dim, values_at, kv_bytes, window, scale,
        softcap, made, parts,
    ):  # fmt: skip
        """As `attend_tile`; queries are bfloat16, and a piece of values is copied beyond `made`."""
        places = carray(as_integers(places), (rows,))
        panels = carray(as_integers(panels), (NUM_PANELS,))
        low, high, end = seen_panels(places, base, window)
        if low >= high:
            return 0
        first_key = base + PANEL * low
        seen, row_tiles = panels[low:].ctypes.data, 1 if rows <= TILE_ROWS else 2
        if BY_AMX:
            attention_amx.score_keys(
                queries, seen, high - low, head_dim // BLOCK, made, STRETCH, AHEAD, values_at, rows,
                row_tiles, 1,
            )  # fmt: skip
        else:
            _score(queries, rows, head_dim, panels, low, high, values_at, made)
        for i in range(rows):
            first_seen = 0
            if window > 0:
                first_seen = max(0, places[i] + 1 - window - first_key)
            end_seen = min(places[i] + 1 - first_key, PANEL * (high - low))
            row, result = made + 4 * STRETCH * i, parts + 4 * ((head_dim + 2) * i + head_dim)
            if end_seen <= first_seen:  # no weight, and no sum
                _clear(row, PANEL // 4 * (high - low))
                _clear(result, 1)
            else:
                softmax_pairs(row, high - low, first_seen, end_seen, scale, softcap, result)
        last = panels[high - 1]
        if (end - base) % PANEL:
            copy = made + 4 * STRETCH * PAIR_ROWS
            _copy_values(last + values_at, (end - base) % PANEL, head_dim, copy)
            panels[high - 1] = copy - values_at
        if BY_AMX:
            attention_amx.weigh_values(
                made, 4 * STRETCH, seen, values_at, high - low, head_dim, parts, head_dim + 2,
                AHEAD, rows, row_tiles, 1,
            )  # fmt: skip
        else:
            _weigh(made, seen, values_at, high - low, rows, head_dim, parts)
        panels[high - 1] = last
        return 1

    return attend_pairs
