"""Matrix products with packed weights.

A weight [N, K] is kept as panels of 16 of its rows, [N / 16, K, 16]: the right-hand sides of tiles,
read once, in order. Panels are shared out among threads; each takes all rows of its input, some
rows and panels at a time (after Goto and van de Geijn 2008), so a step reads every weight once. The last panel is filled up with zeros.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from engine.kernels.cpu.emit import BFLOAT16, FLOAT16, FLOAT32, INT8, PANEL
from engine.kernels.cpu.tiles import MAX_ROWS, tile, tile_int8
from engine.kernels.cpu.vectors import load_float, silu_mul_panel
from engine.kernels.cpu.workers import share
from engine.kernels.memory import allocate

KINDS = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
}

LINES_AHEAD = 1024  # bytes from what a lone tile reads to what it fetches
MAX_FETCHING = 16  # tiles that share the fetching of the next panel among them
# so many rows and panels stay in a core's own cache, while each row meets each panel
ROWS_TOGETHER = 96
PANELS_BYTES = 384 << 10


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


def pack_int8(
    weight: Tensor,  # [N, K] float
) -> Tensor:  # [⌈N / 16⌉, 64 + 16 × K'] int8, K' the next even number
    """The panels of a weight in 8 bits: of each its 16 rows' scales, then the rows by pairs.

    A row's largest number becomes ±127, and all are rounded to the nearest.
    """
    num_outputs, num_inputs = weight.shape
    filled = weight.new_zeros(padded(num_outputs), num_inputs + num_inputs % 2)
    filled[:num_outputs, :num_inputs] = weight
    scales = filled.abs().amax(dim=1) / 127
    rounded = (filled / torch.where(scales > 0, scales, 1.0).unsqueeze(1)).round().to(torch.int8)
    rows = rounded.view(-1, PANEL, filled.shape[1] // 2, 2).transpose(1, 2)
    packed = allocate(
        (len(rows), 4 * PANEL + PANEL * filled.shape[1]), torch.int8, torch.device("cpu")
    )
    packed[:, : 4 * PANEL] = scales.view(-1, PANEL).contiguous().view(torch.int8)
    packed[:, 4 * PANEL :] = rows.reshape(len(rows), -1)
    return packed


@njit(nogil=True, cache=True)
def panel_bytes(num_inputs, kind):
    """From one panel of a weight to the next."""
    if kind == INT8:
        return PANEL * (4 + num_inputs + num_inputs % 2)
    return PANEL * num_inputs * (4 if kind == FLOAT32 else 2)


@njit(nogil=True, cache=True)
def quantize_row(x, num_inputs, out):
    """One row as int16 with a scale, as `tile_int8` reads it; `out` is a row of float32 memory.

    As fine as 32-bit sums over all inputs allow, 14 bits or so: the weights' 8 bits are all that
    is lost. What is not a number, or infinite, makes the scale, and so the product, no number.
    """
    largest = np.float32(0.0)
    for i in range(num_inputs):
        largest = max(largest, abs(x[i]))
    poison = np.float32(0.0)
    for i in range(num_inputs):
        poison += x[i] * np.float32(0.0)
    levels = np.float32(min(32767, (2**31 - 1) // (127 * max(num_inputs, 1))))
    factor = np.float32(0.0)
    if largest > 0 and poison == 0:
        factor = levels / largest
    out[0] = largest / levels + poison
    numbers = out[1:].view(np.int16)
    for i in range(num_inputs):
        numbers[i] = np.int16(np.rint(x[i] * factor))
    if num_inputs % 2:
        numbers[num_inputs] = 0


@njit(nogil=True, cache=True)
def panel_product(x, ldx, num_rows, panel, following, y, ldy, start, lds, k, kind):
    """Y[:, 16] = X [rows, k] × panel + start; all but counts are addresses and strides in floats.

    `start` may be Y itself, which is then added to, or a bias with lds 0, or absent: 0. Meanwhile
    the panel at `following` is fetched, some of it in each tile; by a lone tile its own panel.
    """
    num_tiles = max(-(-num_rows // MAX_ROWS), 1)
    size, steps = panel_bytes(k, kind), -(-k // 2) if kind == INT8 else k
    pace = -(-size // (num_tiles * steps))
    if num_tiles == 1:
        following = panel + LINES_AHEAD
    if num_tiles > MAX_FETCHING or (num_rows == 1 and kind == FLOAT32):
        following, pace = panel, 0  # one panel in so many tiles is no matter; one row waits anyway
    for index in range(num_tiles):
        row = num_rows * index // num_tiles
        rows = num_rows * (index + 1) // num_tiles - row
        left, made, begin = x + 4 * row * ldx, y + 4 * row * ldy, start + 4 * row * lds
        ahead = following + index * steps * pace
        if kind == INT8:
            tile_int8(left, ldx, panel, made, ldy, begin, lds, ahead, pace, k + k % 2, rows)
        else:
            tile(left, ldx, panel, PANEL, made, ldy, begin, lds, ahead, pace, k, rows, kind)


@njit(nogil=True, cache=True)
def multiply(x, weight, bias, y, added, num_rows, num_inputs, kind, crew):
    """One worker's panels of Y = X Wᵀ + bias, or of Y += X Wᵀ + bias where `added` says so.

    X and Y are arrays whose first rows count; X as its weight's kind wants it, see `quantize_row`.
    """
    ldx, ldy = x.strides[0] // 4, y.strides[0] // 4
    size = panel_bytes(num_inputs, kind)
    low, high = share(y.shape[1] // PANEL, crew)
    if added and bias != 0:
        for t in range(num_rows):
            for i in range(PANEL * low, PANEL * high):
                y[t, i] += load_float(bias + 4 * i)
    together = max(PANELS_BYTES // size, 1)
    for first in range(low, high, together):
        end = min(first + together, high)
        for row in range(0, num_rows, ROWS_TOGETHER):
            rows = min(ROWS_TOGETHER, num_rows - row)
            for p in range(first, end):
                made = y.ctypes.data + 4 * (row * ldy + PANEL * p)
                start, lds = np.int64(0), np.int64(0)
                if added:
                    start, lds = made, np.int64(ldy)
                elif bias != 0:
                    start = bias + 4 * PANEL * p
                following = p + 1
                if following == end and row + rows < num_rows:
                    following = first
                panel_product(
                    x.ctypes.data + 4 * row * ldx, ldx, rows, weight + p * size,
                    weight + following * size, made, ldy, start, lds, num_inputs, kind,
                )  # fmt: skip


@njit(nogil=True, cache=True)
def multiply_gated(x, weight, bias, out, tiles, num_rows, num_inputs, kind, crew):
    """One worker's panels of silu(X Gᵀ + b) × (X Uᵀ + c)."""
    ldx, ldy = x.strides[0] // 4, out.strides[0] // 4
    num_panels = out.shape[1] // PANEL
    size = panel_bytes(num_inputs, kind)
    gate, up = tiles[crew.worker, 0].ctypes.data, tiles[crew.worker, 1].ctypes.data
    low, high = share(num_panels, crew)
    together = max(PANELS_BYTES // (2 * size), 1)
    for first in range(low, high, together):
        end = min(first + together, high)
        for row in range(0, num_rows, ROWS_TOGETHER):
            rows = min(ROWS_TOGETHER, num_rows - row)
            at = x.ctypes.data + 4 * row * ldx
            for p in range(first, end):
                gate_panel = weight + p * size
                up_panel = gate_panel + num_panels * size
                gate_bias, up_bias = np.int64(0), np.int64(0)
                if bias != 0:
                    gate_bias = bias + 4 * PANEL * p
                    up_bias = gate_bias + 4 * PANEL * num_panels
                following = p + 1
                if following == end and row + rows < num_rows:
                    following = first
                panel_product(
                    at, ldx, rows, gate_panel, up_panel, gate, PANEL, gate_bias, 0, num_inputs, kind
                )
                panel_product(
                    at, ldx, rows, up_panel, weight + following * size, up, PANEL, up_bias, 0,
                    num_inputs, kind,
                )  # fmt: skip
                target = out.ctypes.data + 4 * (row * ldy + PANEL * p)
                for i in range(rows):
                    offset = 4 * PANEL * i
                    silu_mul_panel(gate + offset, up + offset, target + 4 * ldy * i)
