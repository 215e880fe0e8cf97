"""Matrix products with packed weights.

A weight [N, K] is kept as panels of 16 of its rows, [N / 16, K, 16]: the right-hand sides of tiles,
read once, in order. Panels are shared out among threads; each takes all rows of its input, some
rows and panels at a time (after Goto and van de Geijn 2008), so a step
reads every weight once. The last panel is filled up with zeros.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from numba import cfunc, njit
from numba.core.ccallback import CFunc
from torch import Tensor

from engine.kernels.cpu.emit import BFLOAT16, FLOAT16, FLOAT32, INT8, INT16, PAIRS, PANEL
from engine.kernels.cpu.functions import address_of, call_function
from engine.kernels.cpu.int16 import GROUP_PAIRS, int16_panel_bytes, num_groups_of_pairs
from engine.kernels.cpu.machine import HAS_AMX
from engine.kernels.cpu.matmul_amx import amx_product_function
from engine.kernels.cpu.pairs import BY_AMX, num_pairs
from engine.kernels.cpu.quantize import num_groups
from engine.kernels.cpu.tiles import MAX_PANELS, MAX_ROWS, tile_by_stretches
from engine.kernels.cpu.tiles_int8 import (
    GROUP,
    GROUP_BYTES,
    INT8_BY_AMX,
    SIDE_BY_SIDE,
    tile_int8,
)
from engine.kernels.cpu.tiles_int16 import tile_int16
from engine.kernels.cpu.vectors import load_float, silu_mul_panel
from engine.kernels.cpu.widen import MANY_TILES, MOST_NUMBERS, room_for_panels, widen
from engine.kernels.cpu.workers import share
from engine.kernels.memory import allocate


class Weights(NamedTuple):
    """How a model's weights are stored, and the function that multiplies by their panels."""

    kind: int  # see `emit`
    product: int  # address of `_product_function`'s


KINDS = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
}

LINES_AHEAD = 1024  # bytes from what a lone tile reads to what it fetches
SINGLY = 4  # so few rows wait for memory, which comes faster to one panel at a time
MAX_FETCHING = 16  # tiles that share the fetching of the next panel among them
# so many rows and panels stay in a core's own cache, while each row meets each panel
ROWS_TOGETHER = 256 if HAS_AMX else 96
PANELS_BYTES = 384 << 10


def stored_as(dtype: torch.dtype, *, in_pairs: bool = False) -> Weights:
    """Compiles the function if it is not on disk."""
    kind = KINDS[dtype]
    if in_pairs:
        kind = INT16 if dtype == torch.float16 else PAIRS
    return Weights(kind, address_of(_product_function(kind)))


def padded(size: int) -> int:
    """The next multiple of a panel's columns."""
    return -(-size // PANEL) * PANEL


def pack(
    weight: Tensor,  # [N, K]
    dtype: torch.dtype,
) -> Tensor:  # [⌈N / 16⌉, K, 16]
    """The panels of a weight."""
    num_outputs, num_inputs = weight.shape
    num_panels = padded(num_outputs) // PANEL
    packed = allocate((num_panels, num_inputs, PANEL), dtype, torch.device("cpu"))
    whole = num_outputs // PANEL
    packed[:whole].copy_(weight[: whole * PANEL].view(whole, PANEL, num_inputs).transpose(1, 2))
    if whole < num_panels:
        rest = weight[whole * PANEL :]
        packed[whole, :, : rest.shape[0]].copy_(rest.T)
    return packed


@njit(nogil=True, cache=True)
def panel_bytes(num_inputs, kind):
    """From one panel of a weight to the next."""
    if kind == INT8:
        return num_groups(num_inputs) * GROUP_BYTES
    if kind == PAIRS:
        return PANEL * 4 * num_pairs(num_inputs)
    if kind == INT16:
        return int16_panel_bytes(num_inputs)
    return PANEL * num_inputs * (4 if kind == FLOAT32 else 2)


@njit(nogil=True, cache=True)
def _num_steps(num_inputs, kind):
    """Of a tile's loop: 32 bits of a row of X in each."""
    if kind == INT8:
        return num_groups(num_inputs) * (GROUP // SIDE_BY_SIDE)
    if kind == PAIRS:
        return num_pairs(num_inputs)
    return num_groups_of_pairs(num_inputs) * GROUP_PAIRS if kind == INT16 else num_inputs


@functools.cache
def _product_function(kind: int) -> CFunc:
    """Columns of Y from panels of a weight of one kind."""
    if (kind == PAIRS and BY_AMX) or (kind == INT8 and INT8_BY_AMX):
        return amx_product_function(kind)
    in_16_bits = kind in (FLOAT16, BFLOAT16)

    @cfunc("int64(" + 14 * "int64, " + "int64)", cache=True, error_model="numpy")
    def product(
        x, ldx, num_rows, panel, apart, num_panels, following, following_apart, y, ldy, start,
        start_apart, lds, k, size,
    ):  # fmt: skip
        """One or two panels' columns of Y = X [rows, k] × panels + start.

        All but counts are addresses, strides in floats, and bytes from the first panel to the
        second. `start` may be Y itself, which is then added to, or a bias with lds 0, or absent: 0.
        Meanwhile the panels at `following` are fetched, some of them in each tile; by a lone tile
        its own.
        """
        num_tiles = max(-(-num_rows // MAX_ROWS), 1)
        steps = _num_steps(k, kind)
        pace = -(-size // (num_tiles * steps))
        if num_tiles == 1:
            following, following_apart = panel + LINES_AHEAD, apart
        if num_tiles > MAX_FETCHING or (num_rows == 1 and kind == FLOAT32):
            # one panel in so many tiles is no matter; one row waits anyway
            following, following_apart, pace = panel, apart, 0
        is_wide = in_16_bits and num_tiles >= MANY_TILES and PANEL * k * num_panels <= MOST_NUMBERS
        if is_wide:
            wide = room_for_panels()
            for p in range(num_panels):
                widen(panel + apart * p, wide + 4 * PANEL * k * p, PANEL * k, kind)
            panel, apart = wide, 4 * PANEL * k
        for index in range(num_tiles):
            row = num_rows * index // num_tiles
            rows = num_rows * (index + 1) // num_tiles - row
            left, made, begin = x + 4 * row * ldx, y + 4 * row * ldy, start + 4 * row * lds
            ahead = following + index * steps * pace
            if kind == INT8:
                tile_int8(
                    left, ldx, panel, apart, made, ldy, begin, start_apart, lds, ahead,
                    following_apart, pace, num_groups(k), rows, num_panels,
                )  # fmt: skip
            elif kind == INT16:
                tile_int16(
                    left, ldx, panel, apart, made, ldy, begin, start_apart, lds, ahead,
                    following_apart, pace, num_groups_of_pairs(k), rows, num_panels,
                )  # fmt: skip
            elif is_wide:
                tile_by_stretches(
                    left, ldx, panel, apart, PANEL, made, ldy, begin, start_apart, lds, ahead,
                    following_apart, pace, steps, rows, num_panels, FLOAT32,
                )  # fmt: skip
            else:
                tile_by_stretches(
                    left, ldx, panel, apart, PANEL, made, ldy, begin, start_apart, lds, ahead,
                    following_apart, pace, steps, rows, num_panels, kind,
                )  # fmt: skip
        return 0

    return product


@njit(nogil=True, cache=True)
def multiply(x, weight, bias, y, added, num_rows, num_inputs, weights, crew):
    """One worker's panels of Y = X Wᵀ + bias, or of Y += X Wᵀ + bias where `added` says so.

    X and Y are arrays whose first rows count; X as its weight's kind wants it, see `quantize_row`.
    """
    ldx, ldy = x.strides[0] // 4, y.strides[0] // 4
    size = panel_bytes(num_inputs, weights.kind)
    low, high = share(y.shape[1] // PANEL, crew)
    if added and bias != 0:
        for t in range(num_rows):
            for i in range(PANEL * low, PANEL * high):
                y[t, i] += load_float(bias + 4 * i)
    at_once = MAX_PANELS if num_rows > SINGLY else 1
    together = max(PANELS_BYTES // (MAX_PANELS * size), 1) * MAX_PANELS
    for first in range(low, high, together):
        end = min(first + together, high)
        for row in range(0, num_rows, ROWS_TOGETHER):
            rows = min(ROWS_TOGETHER, num_rows - row)
            for p in range(first, end, at_once):
                num_panels = min(at_once, end - p)
                made = y.ctypes.data + 4 * (row * ldy + PANEL * p)
                start, lds = np.int64(0), np.int64(0)
                if added:
                    start, lds = made, np.int64(ldy)
                elif bias != 0:
                    start = bias + 4 * PANEL * p
                following = p + num_panels
                if following == end and row + rows < num_rows:
                    following = first
                product = (
                    x.ctypes.data + 4 * row * ldx, ldx, rows, weight + p * size, size, num_panels,
                    weight + following * size, size, made, ldy, start, 4 * PANEL, lds, num_inputs,
                    size,
                )  # fmt: skip
                call_function(weights.product, product)


@njit(nogil=True, cache=True)
def multiply_gated(x, weight, bias, out, tiles, num_rows, num_inputs, weights, crew):
    """One worker's panels of silu(X Gᵀ + b) × (X Uᵀ + c)."""
    ldx, ldy = x.strides[0] // 4, out.strides[0] // 4
    num_panels = out.shape[1] // PANEL
    size = panel_bytes(num_inputs, weights.kind)
    apart = num_panels * size  # a panel of gate and the same of up
    both = tiles[crew.worker].ctypes.data
    low, high = share(num_panels, crew)
    together = max(PANELS_BYTES // (2 * size), 1)
    for first in range(low, high, together):
        end = min(first + together, high)
        for row in range(0, num_rows, ROWS_TOGETHER):
            rows = min(ROWS_TOGETHER, num_rows - row)
            left = x.ctypes.data + 4 * row * ldx
            for p in range(first, end):
                start = np.int64(0)
                if bias != 0:
                    start = bias + 4 * PANEL * p
                following = p + 1
                if following == end and row + rows < num_rows:
                    following = first
                for i in range(0, 2, MAX_PANELS):  # gate, up; or both at once
                    begin = start
                    if bias != 0:
                        begin += 4 * PANEL * num_panels * i
                    product = (
                        left, ldx, rows, weight + p * size + i * apart, apart, MAX_PANELS,
                        weight + following * size + i * apart, apart, both + 4 * PANEL * i,
                        2 * PANEL, begin, 4 * PANEL * num_panels, 0, num_inputs, size,
                    )  # fmt: skip
                    call_function(weights.product, product)
                made = out.ctypes.data + 4 * (row * ldy + PANEL * p)
                for i in range(rows):
                    gate = both + 4 * 2 * PANEL * i
                    silu_mul_panel(gate, gate + 4 * PANEL, made + 4 * ldy * i)
