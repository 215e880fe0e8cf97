"""What the machine gives at the moment: arithmetic and memory, as PyTorch reaches them."""

import time
from collections.abc import Callable

import torch


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def limits() -> dict[str, float]:
    """The best rate of a large float32 product, GFLOP/s, and of reading memory, GB/s."""
    a, b = torch.randn(2, 2048, 2048)
    product_ms = min(milliseconds(lambda: torch.mm(a, b)) for _ in range(5))
    much = torch.ones(1 << 27)
    read_ms = min(milliseconds(much.sum) for _ in range(5))
    return {
        "product_gflops": round(2 * 2048**3 / product_ms / 1e6, 1),
        "read_gb_per_s": round(much.nbytes / read_ms / 1e6, 1),
    }
