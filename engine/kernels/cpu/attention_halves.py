"""How rows attend to a stretch of keys where all that is multiplied is float16: see `halves`.

Queries are scaled so that no sum overflows, whatever the keys are; so are the softmax's numerators,
whatever the values. Scores, their sums and what is made are float32.
"""

import functools

from numba import cfunc, njit
from numba.core.ccallback import CFunc
from numba.np.numpy_support import carray

from engine.kernels.cpu.attention_pairs import clear, copy_values
from engine.kernels.cpu.attention_plan import AHEAD, NUM_PANELS, PAIR_ROWS, STRETCH, seen_panels
from engine.kernels.cpu.emit import HALF_PAIRS, PANEL
from engine.kernels.cpu.halves import half_pairs, half_words, round_halves
from engine.kernels.cpu.softmax_pairs import HALF_WEIGHT, softmax_pairs
from engine.kernels.cpu.tiles import FEW_ROWS, MAX_PANELS, MAX_PANELS_FEW
from engine.kernels.cpu.tiles_halves import PIECES, tile_half_keys, tile_over_halves
from engine.kernels.cpu.vectors import as_integers, float_bits

# of a query's numbers: 32 products of less than 2⁻⁵ with float16's largest do not overflow
QUERY_PEAK = -6


@njit(inline="always")
def halve_query(query, head_dim, out):
    """A row of float32 as float16, `half_words` wide; addresses."""
    round_halves(query, head_dim, out, 4 * half_pairs(head_dim), QUERY_PEAK)


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
        tile_half_keys(
            queries, half_words(head_dim), panels[p], panels[p + 1] - panels[p],
            made + 4 * PANEL * (p - low), STRETCH, 0, 0, 0, first, second - first, 4 * PANEL,
            half_pairs(head_dim), rows, min(MAX_PANELS, high - p),
        )  # fmt: skip


@njit(inline="always")
def _weigh(weights, panels, low, high, values_at, rows, head_dim, parts):
    """Weights [rows, keys of some panels] × their values into `parts`, in the order of the keys."""
    most = MAX_PANELS_FEW if rows <= FEW_ROWS else MAX_PANELS
    back = float_bits(1 / HALF_WEIGHT)
    d = 0
    while d < head_dim:
        while PANEL * most > head_dim - d:
            most //= 2
        tile_over_halves(
            weights, STRETCH, panels[low:].ctypes.data, values_at + 4 * d, head_dim, parts + 4 * d,
            head_dim + 2, AHEAD, high - low, low % PIECES, back, rows, most,
        )  # fmt: skip
        d += PANEL * most


@functools.cache
def halves_function() -> CFunc:
    """`attention.tile_function` of a cache of float16 by pairs."""

    @cfunc(
        "int64(" + 9 * "int64, " + "float32, float32, int64, int64)",
        cache=True,
        error_model="numpy",
    )
    def attend_halves(
        queries, places, rows, base, panels, head_dim, values_at, kv_bytes, window, scale,
        softcap, made, parts,
    ):  # fmt: skip
        """As `attend_tile`; a piece of values is copied beyond `made`."""
        places = carray(as_integers(places), (rows,))
        panels = carray(as_integers(panels), (NUM_PANELS,))
        low, high, end = seen_panels(places, base, window)
        if low >= high:
            return 0
        first_key = base + PANEL * low
        _score(queries, rows, head_dim, panels, low, high, values_at, made)
        for i in range(rows):
            first_seen = 0
            if window > 0:
                first_seen = max(0, places[i] + 1 - window - first_key)
            end_seen = min(places[i] + 1 - first_key, PANEL * (high - low))
            row, result = made + 4 * STRETCH * i, parts + 4 * ((head_dim + 2) * i + head_dim)
            if end_seen <= first_seen:  # no weight, and no sum
                clear(row, PANEL // 4 * (high - low))
                clear(result, 1)
            else:
                softmax_pairs(
                    row, high - low, first_seen, end_seen, scale, softcap, result, HALF_PAIRS
                )
        last = panels[high - 1]
        if (end - base) % PANEL:
            copy = made + 4 * STRETCH * PAIR_ROWS
            copy_values(last + values_at, (end - base) % PANEL, head_dim, copy)
            panels[high - 1] = copy - values_at
        _weigh(made, panels, low, high, values_at, rows, head_dim, parts)
        panels[high - 1] = last
        return 1

    return attend_halves
