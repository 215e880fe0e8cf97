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
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.limits import limits, milliseconds
from bench.products import SHAPES, by_kernels

NUM_LAYERS = 30
OPERATIONS = 2 * NUM_LAYERS * sum(n * k for n, k in SHAPES)  # of one token
TOKENS = (1, 4, 8, 16, 32, 64, 128, 512)
ROUNDS = 5


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
            by_kernels(weights, torch.float32, num_tokens),
            by_kernels(weights, torch.bfloat16, num_tokens),
            by_kernels(weights, torch.int8, num_tokens),
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
