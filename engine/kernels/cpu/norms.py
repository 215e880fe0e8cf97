"""Norms of rows, by whole vectors."""

from typing import Any

import numpy as np
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from engine.kernels.cpu.emit import (
    FLOAT32,
    I64,
    VECTOR_BYTES,
    WIDTH,
    fma,
    load,
    loop,
    reduce_lanes,
    splat,
    store,
    zeros,
)
from engine.kernels.cpu.vectors import load_float


@njit(nogil=True, cache=True)
def norm_row(x, weight, eps, out, size):
    """x / sqrt(mean(x²) + eps) × weight, of the first `size` numbers; `weight` is an address."""
    num_vectors = size // WIDTH
    whole = num_vectors * WIDTH
    total = sum_of_squares(x.ctypes.data, num_vectors)
    for i in range(whole, size):
        total += x[i] * x[i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    scale_row(x.ctypes.data, scale, weight, out.ctypes.data, num_vectors)
    for i in range(whole, size):
        out[i] = x[i] * scale * load_float(weight + 4 * i)


@intrinsic
def sum_of_squares(
    context: Any,
    x: Any,  # address of float32 [WIDTH × num_vectors]
    num_vectors: Any,
) -> Any:
    """Of each lane, four sums of every fourth vector; and the sum of all these."""
    signature = types.float32(types.int64, types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        x, num_vectors = args

        def add(sums: list[Any], index: Any, first: int, count: int) -> list[Any]:
            for n in range(first, first + count):
                at = build.mul(build.add(index, I64(n - first)), I64(VECTOR_BYTES))
                vector = load(build, build.add(x, at), FLOAT32)
                sums = [*sums[:n], fma(build, vector, vector, sums[n]), *sums[n + 1 :]]
            return sums

        fours = build.sdiv(num_vectors, I64(4))
        done = build.mul(fours, I64(4))
        sums = loop(
            build, fours, [zeros()] * 4, lambda i, sums: add(sums, build.mul(i, I64(4)), 0, 4)
        )
        rest = build.sub(num_vectors, done)
        sums = loop(build, rest, sums, lambda i, sums: add(sums, build.add(done, i), 0, 1))
        total = build.fadd(build.fadd(sums[0], sums[1]), build.fadd(sums[2], sums[3]))
        return reduce_lanes(build, total, build.fadd)

    return signature, emit


@intrinsic
def scale_row(
    context: Any,
    x: Any,  # address of float32 [WIDTH × num_vectors]
    scale: Any,  # float32
    weight: Any,  # address of as many
    out: Any,  # address of as many, changed; may be x
    num_vectors: Any,
) -> Any:
    """x × scale × weight."""
    signature = types.void(types.int64, types.float32, types.int64, types.int64, types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        x, scale, weight, out, num_vectors = args
        wide = splat(build, scale)

        def body(index: Any, state: list[Any]) -> list[Any]:
            at = build.mul(index, I64(VECTOR_BYTES))
            scaled = build.fmul(load(build, build.add(x, at), FLOAT32), wide)
            weights = load(build, build.add(weight, at), FLOAT32)
            store(build, build.fmul(scaled, weights), build.add(out, at))
            return state

        loop(build, num_vectors, [], body)
        return _context.get_dummy_value()

    return signature, emit
