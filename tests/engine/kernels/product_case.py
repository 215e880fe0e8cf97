"""Products by compiled CPU kernels, each worker's part after the other's."""

import numpy as np

from engine.kernels.cpu.matmul import multiply
from engine.kernels.cpu.workers import Crew

NO_MEETING = np.zeros(8, np.int64)  # of workers that run one after the other


def rounded(x, round_row, words):
    """What weights are multiplied by, [rows, words of a row]: NaN where nothing is written."""
    made = np.full((len(x), words(x.shape[1])), np.nan, np.float32)
    for row, out in zip(x.numpy(), made, strict=True):
        round_row(row, x.shape[1], out)
    return made


def product(x, left, packed, out, stored, *, bias=None, added=False, workers=2):
    """X Wᵀ into `out`; `left` is X as weights stored so are multiplied by it."""
    num_rows, num_inputs = x.shape
    for worker in range(workers):
        multiply(
            left, packed.data_ptr(), 0 if bias is None else bias.data_ptr(), out.numpy(), added,
            num_rows, num_inputs, stored, Crew(worker, workers, NO_MEETING),
        )  # fmt: skip
    return out
