"""Matrix products with packed weights.

A weight [N, K] is kept as panels of 16 of its rows, [N / 16, K, 16]: the right-hand sides of tiles,
read once, in order. Panels are shared out among threads; each takes all rows of its input, so a
step reads every weight once. The last panel is filled up with zeros.
"""

import torch
from numba import njit
from torch import Tensor

from engine.kernels.cpu.vectors import BFLOAT16, FLOAT16, FLOAT32, MAX_ROWS, PANEL, tile
from engine.kernels.memory import allocate

KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}


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
def panel_product(x, ldx, num_rows, panel, y, ldy, start, lds, k, kind):
    """Y[:, 16] = X [rows, k] × panel + start; all but counts are addresses and strides in floats.

    `start` may be Y itself, which is then added to, or a bias with lds 0, or absent: 0.
    """
    for row in range(0, num_rows, MAX_ROWS):
        rows = min(MAX_ROWS, num_rows - row)
        begin = start + 4 * row * lds
        tile(
            x + 4 * row * ldx, ldx, panel, PANEL, y + 4 * row * ldy, ldy, begin, lds, k, rows, kind
        )
