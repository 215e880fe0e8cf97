"""Products of some layers' weights by the CPU kernels, as a step runs them."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.int16 import int16_row, int16_words, pack_int16
from engine.kernels.cpu.matmul import Weights, multiply, pack, stored_as
from engine.kernels.cpu.pairs import pack_pairs, pair_row, pair_words
from engine.kernels.cpu.quantize import pack_int8, quantize_row, quantized_words
from engine.kernels.cpu.workers import Crew
from engine.kernels.memory import allocate

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # [N, K] of SmolLM2-135M's layers


@numba.njit(parallel=True, nogil=True, cache=True)
def _multiply(x, weights, outputs, num_rows, num_inputs, kind, product, num_workers):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    """One product with each of some weights of one shape; as in a step, threads are woken once."""
    for worker in numba.prange(num_workers):
        crew = Crew(worker, num_workers, np.zeros(8, np.int64))
        for i in range(len(weights)):
            stored = Weights(kind, product)
            multiply(x, weights[i], 0, outputs, False, num_rows, num_inputs, stored, crew)


def _rounding(dtype: torch.dtype, *, in_pairs: bool) -> tuple[Any, Any, Any] | None:
    """How a weight is packed, what it is multiplied by rounded, and the words of such a row."""
    if dtype == torch.int8:
        return pack_int8, quantize_row, quantized_words
    if not in_pairs:
        return None
    if dtype == torch.float16:
        return pack_int16, int16_row, int16_words
    return pack_pairs, pair_row, pair_words


def by_kernels(
    weights: list[list[Tensor]], dtype: torch.dtype, num_tokens: int, *, in_pairs: bool = False
) -> Callable[[], None]:
    """All layers by these kernels."""
    rounding = _rounding(dtype, in_pairs=in_pairs)
    pack_one = rounding[0] if rounding else lambda weight: pack(weight, dtype)
    layers = [[pack_one(weight) for weight in layer] for layer in weights]
    num_workers, calls = torch.get_num_threads(), []
    for place, (n, k) in enumerate(SHAPES):
        x = np.random.default_rng(0).standard_normal((num_tokens, k), np.float32)
        if rounding:
            _, round_row, words = rounding
            size = num_tokens, words(k)
            rounded = allocate(size, torch.float32, torch.device("cpu")).numpy()
            for row, made in zip(x, rounded, strict=True):
                round_row(row, k, made)
            x = rounded
        addresses = np.array([layer[place].data_ptr() for layer in layers], np.int64)
        out = allocate((num_tokens, n), torch.float32, torch.device("cpu")).numpy()
        stored = stored_as(dtype, in_pairs=in_pairs)
        calls.append((x, addresses, out, num_tokens, k, *stored, num_workers))

    def run(_held: object = layers) -> None:
        for call in calls:
            _multiply(*call)

    return run
