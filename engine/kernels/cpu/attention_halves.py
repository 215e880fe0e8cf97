"""The products of attention where all that is multiplied is float16: see `halves`.

Queries are scaled so that no sum overflows, whatever the keys are; so are the softmax's numerators,
whatever the values. Scores, their sums and what is made are float32.
"""

from numba import njit

from engine.kernels.cpu.attention_plan import AHEAD, STRETCH
from engine.kernels.cpu.emit import PANEL
from engine.kernels.cpu.halves import half_pairs, half_words, round_halves
from engine.kernels.cpu.softmax_pairs import HALF_WEIGHT
from engine.kernels.cpu.tiles import FEW_ROWS, MAX_PANELS, MAX_PANELS_FEW
from engine.kernels.cpu.tiles_halves import PIECES, tile_half_keys, tile_over_halves
from engine.kernels.cpu.vectors import float_bits

# of a query's numbers: 32 products of less than 2⁻⁵ with float16's largest do not overflow
QUERY_PEAK = -6


@njit(inline="always")
def halve_query(query, head_dim, out):
    """A row of float32 as float16, `half_words` wide; addresses."""
    round_halves(query, head_dim, out, 4 * half_pairs(head_dim), QUERY_PEAK)


@njit(inline="always")
def score_half_keys(queries, rows, head_dim, panels, low, high, values_at, made):
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
def weigh_half_values(weights, panels, low, high, values_at, rows, head_dim, parts):
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
