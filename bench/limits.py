"""What the machine gives now: arithmetic, as PyTorch and as the kernels reach it, and memory."""

import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from bench.products import SHAPES, by_kernels
from engine.kernels.cpu.int16 import HAS_INT16
from engine.kernels.cpu.pairs import HAS_PAIRS

ROWS = 512


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def limits() -> dict[str, float]:
    """Rates of large products, PyTorch's and the kernels', and of reading memory."""
    a, b = torch.randn(2, 2048, 2048)
    product_ms = min(milliseconds(lambda: torch.mm(a, b)) for _ in range(5))
    much = torch.ones(1 << 27)
    read_ms = min(milliseconds(much.sum) for _ in range(5))
    found = {
        "product_gflops": round(2 * 2048**3 / product_ms / 1e6, 1),
        "kernel_gflops": _kernel_rate(torch.float32),
        "kernel_int8_gops": _kernel_rate(torch.int8),
        "read_gb_per_s": round(much.nbytes / read_ms / 1e6, 1),
    }
    if HAS_INT16:
        found["kernel_float16_gflops"] = _kernel_rate(torch.float16, in_pairs=True)
    if HAS_PAIRS:
        found["kernel_bfloat16_gflops"] = _kernel_rate(torch.bfloat16, in_pairs=True)
    return found


def _kernel_rate(dtype: torch.dtype, *, in_pairs: bool = False) -> float:
    """Operations, in 1e9 a second, of some layers' products of 512 tokens."""
    layers = [[torch.randn(shape) for shape in SHAPES] for _ in range(4)]
    call = by_kernels(layers, dtype, ROWS, in_pairs=in_pairs)
    best_ms = min(milliseconds(call) for _ in range(6))
    operations = 2 * ROWS * len(layers) * sum(n * k for n, k in SHAPES)
    return round(operations / best_ms / 1e6, 1)
