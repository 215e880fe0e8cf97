"""The CPU kernels' linear layers against PyTorch's, and the machine's own limits, in one run.

    python -m bench.kernels [--threads 2]

The layers are SmolLM2-135M's, each of 30 with weights of its own, so that they come from memory and
not from a cache. All candidates take turns; the median of their rounds counts. The machine's speed
may swing while it runs: compare within a row.
"""

import argparse
import os
import statistics
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.limits import limits, milliseconds
from engine.kernels.cpu.matmul import Weights, multiply, pack, stored_as
from engine.kernels.cpu.quantize import pack_int8, quantize_row, quantized_words
from engine.kernels.cpu.workers import Crew

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # [N, K] of a layer's products
NUM_LAYERS = 30
OPERATIONS = 2 * NUM_LAYERS * sum(n * k for n, k in SHAPES)  # of one token
TOKENS = (1, 4, 8, 16, 32, 64, 128, 512)
ROUNDS = 5


@numba.njit(parallel=True, nogil=True)
def _multiply(x, weights, outputs, num_rows, num_inputs, kind, product, num_workers):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    """One product with each of some weights of one shape; as in a step, threads are woken once."""
    for worker in numba.prange(num_workers):
        crew = Crew(worker, num_workers, np.zeros(8, np.int64))
        for i in range(len(weights)):
            stored = Weights(kind, product)
            multiply(x, weights[i], 0, outputs, False, num_rows, num_inputs, stored, crew)


def ours(weights: list[list[Tensor]], dtype: torch.dtype, num_tokens: int) -> Callable[[], None]:
    """All layers by these kernels."""
    packed = [
        [pack_int8(w) if dtype == torch.int8 else pack(w, dtype) for w in layer]
        for layer in weights
    ]
    calls = []
    for place, (n, k) in enumerate(SHAPES):
        x = np.random.default_rng(0).standard_normal((num_tokens, k), np.float32)
        if dtype == torch.int8:
            quantized = np.empty((num_tokens, quantized_words(k)), np.float32)
            for row, made in zip(x, quantized, strict=True):
                quantize_row(row, k, made)
            x = quantized
        addresses = np.array([layer[place].data_ptr() for layer in packed], np.int64)
        out = np.empty((num_tokens, n), np.float32)
        calls.append((x, addresses, out, num_tokens, k, *stored_as(dtype), torch.get_num_threads()))

    def run(_held: object = packed) -> None:
        for call in calls:
            _multiply(*call)

    return run


def by_torch(weights: list[list[Tensor]], num_tokens: int) -> Callable[[], None]:
    inputs = [torch.randn(num_tokens, k) for _, k in SHAPES]

    def run() -> None:
        for layer in weights:
            for x, weight in zip(inputs, layer, strict=True):
                F.linear(x, weight)

    return run


def by_onednn(packed: list[list[Tensor]], num_tokens: int) -> Callable[[], None]:
    inputs = [torch.randn(num_tokens, k) for _, k in SHAPES]

    def run() -> None:
        for layer in packed:
            for x, weight in zip(inputs, layer, strict=True):
                torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    torch.set_num_threads(parser.parse_args().threads)
    numba.set_num_threads(torch.get_num_threads())
    weights = [[torch.randn(n, k) * 0.05 for n, k in SHAPES] for _ in range(NUM_LAYERS)]
    onednn = [[torch.ops.mkldnn._reorder_linear_weight(w) for w in layer] for layer in weights]
    print("tokens | " + " | ".join(("float32", "bfloat16", "int8", "F.linear", "oneDNN packed")))
    for num_tokens in TOKENS:
        calls = [
            ours(weights, torch.float32, num_tokens),
            ours(weights, torch.bfloat16, num_tokens),
            ours(weights, torch.int8, num_tokens),
            by_torch(weights, num_tokens),
            by_onednn(onednn, num_tokens),
        ]
        rounds = [[milliseconds(call) for call in calls] for _ in range(ROUNDS + 1)][1:]
        medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
        operations = OPERATIONS * num_tokens / 1e6
        columns = [f"{m:.1f} ms, {operations / m:.0f} GOP/s" for m in medians]
        print(f"{num_tokens:6d} | {' | '.join(columns)} | beside it {limits()}", flush=True)


if __name__ == "__main__":
    main()
