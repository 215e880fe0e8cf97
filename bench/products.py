"""Products of some layers' weights by the CPU kernels, as a step runs them."""

from collections.abc import Callable

import numba
import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.matmul import Weights, multiply, pack, stored_as
from engine.kernels.cpu.pairs import pack_pairs, pair_row, pair_words
from engine.kernels.cpu.quantize import pack_int8, quantize_row, quantized_words
from engine.kernels.cpu.workers import Crew

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # [N, K] of SmolLM2-135M's layers


@numba.njit(parallel=True, nogil=True, cache=True)
def _multiply(x, weights, outputs, num_rows, num_inputs, kind, product, num_workers):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    """One product with each of some weights of one shape; as in a step, threads are woken once."""
    for worker in numba.prange(num_workers):
        crew = Crew(worker, num_workers, np.zeros(8, np.int64))
        for i in range(len(weights)):
            stored = Weights(kind, product)
            multiply(x, weights[i], 0, outputs, False, num_rows, num_inputs, stored, crew)


def by_kernels(
    weights: list[list[Tensor]], dtype: torch.dtype, num_tokens: int, *, in_pairs: bool = False
) -> Callable[[], None]:
    """All layers by these kernels."""
    packed = [
        [
            pack_pairs(w) if in_pairs else pack_int8(w) if dtype == torch.int8 else pack(w, dtype)
            for w in layer
        ]
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
        elif in_pairs:
            pairs = np.empty((num_tokens, pair_words(k)), np.float32)
            for row, made in zip(x, pairs, strict=True):
                pair_row(row, k, made)
            x = pairs
        addresses = np.array([layer[place].data_ptr() for layer in packed], np.int64)
        out = np.empty((num_tokens, n), np.float32)
        calls.append(
            (
                x,
                addresses,
                out,
                num_tokens,
                k,
                *stored_as(dtype, in_pairs=in_pairs),
                torch.get_num_threads(),
            )
        )

    def run(_held: object = packed) -> None:
        for call in calls:
            _multiply(*call)

    return run
