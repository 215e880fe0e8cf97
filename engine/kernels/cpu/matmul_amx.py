"""Matrix products with packed weights by AMX, of bfloat16 by pairs and of numbers in 8 bits."""

import functools

from numba import cfunc, njit
from numba.core.ccallback import CFunc

from engine.kernels.cpu.amx import TILE_ROWS
from engine.kernels.cpu.emit import PAIRS
from engine.kernels.cpu.pairs import num_pairs
from engine.kernels.cpu.quantize import num_groups
from engine.kernels.cpu.tiles_amx import (
    BLOCK,
    GROUPS_AT_ONCE,
    ROWS_AT_ONCE,
    tile_bfloat16,
    tile_int8_amx,
)

LINES_AHEAD = 2048  # bytes from what a lone tile reads to what it fetches


@njit(inline="always")
def _multiply_panels(
    tile, x, ldx, num_rows, panel, apart, num_panels, following, following_apart, y, ldy, start,
    start_apart, lds, size, blocks, fetches, most_rows,
):  # fmt: skip
    """By a tile that takes so many rows, goes through so many blocks and fetches so often."""
    num_tiles = -(-num_rows // most_rows)
    lines = -(-size // (64 * fetches * num_tiles))
    if num_tiles == 1:
        following, following_apart = panel + LINES_AHEAD, apart
    times, rest = num_rows // most_rows, num_rows % most_rows
    if times:
        tile(
            x, ldx, panel, apart, y, ldy, start, start_apart, lds, following, following_apart,
            lines, blocks, times, most_rows, -(-most_rows // TILE_ROWS), num_panels,
        )  # fmt: skip
    if rest:
        row = num_rows - rest
        begin, ahead = start + 4 * row * lds, following + 64 * lines * fetches * times
        tile(
            x + 4 * row * ldx, ldx, panel, apart, y + 4 * row * ldy, ldy, begin, start_apart, lds,
            ahead, following_apart, lines, blocks, 1, rest, -(-rest // TILE_ROWS), num_panels,
        )  # fmt: skip


@functools.cache
def amx_product_function(kind: int) -> CFunc:
    """Of panels of PAIRS or of INT8, all else as `matmul`'s `product` has it."""

    @cfunc("int64(" + 14 * "int64, " + "int64)", cache=True, error_model="numpy")
    def product_by_amx(
        x, ldx, num_rows, panel, apart, num_panels, following, following_apart, y, ldy, start,
        start_apart, lds, k, size,
    ):  # fmt: skip
        if kind == PAIRS:
            blocks = num_pairs(k) * 2 // BLOCK
            _multiply_panels(
                tile_bfloat16, x, ldx, num_rows, panel, apart, num_panels, following,
                following_apart, y, ldy, start, start_apart, lds, size, blocks, blocks,
                ROWS_AT_ONCE,
            )  # fmt: skip
        else:
            groups = num_groups(k)
            _multiply_panels(
                tile_int8_amx, x, ldx, num_rows, panel, apart, num_panels, following,
                following_apart, y, ldy, start, start_apart, lds, size, groups,
                max(groups // GROUPS_AT_ONCE, 1), TILE_ROWS,
            )  # fmt: skip
        return 0

    return product_by_amx
