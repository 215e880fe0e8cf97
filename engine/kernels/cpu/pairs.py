"""Products of bfloat16 numbers, two at a time, summed in float32: AVX-512's `vdpbf16ps`.

What weights are multiplied by is rounded to bfloat16 as well: 8 bits of precision, as a GPU does.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from engine.kernels.cpu.emit import (
    FLOAT32,
    I32,
    INTEGERS,
    PANEL,
    VECTOR,
    WIDTH,
    declare,
    load,
    load_integers,
    splat,
)
from engine.kernels.cpu.machine import CPU, FEATURES, HAS_AMX
from engine.kernels.memory import allocate

# Intel's vectors multiply bfloat16 at half the rate of float32, AMD's at twice
HAS_PAIRS = WIDTH == 16 and "avx512bf16" in FEATURES and (HAS_AMX or CPU.startswith("znver"))
BY_AMX = HAS_PAIRS and HAS_AMX  # 32 numbers of a row at once
FILLED_TO = 32 if BY_AMX else 2  # numbers of a weight's row, with zeros


class _BFloatType(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloatType._create_instance()
_BFLOATS = ir.VectorType(_BFloatType(), 2 * WIDTH)


def load_pairs(build: Any, address: Any) -> Any:
    """A pair of numbers for each lane, int32."""
    return load_integers(build, address, INTEGERS)


def load_pair(build: Any, address: Any) -> Any:
    """One pair for all lanes, int32."""
    return splat(build, load_integers(build, address, I32))


def add_products(build: Any, total: Any, x: Any, y: Any) -> Any:
    """total + the products of each lane's pairs."""
    function = declare(
        build, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, VECTOR, _BFLOATS, _BFLOATS
    )
    return build.call(function, [total, build.bitcast(x, _BFLOATS), build.bitcast(y, _BFLOATS)])


def pack_pairs(
    weight: Tensor,  # [N, K] float
) -> Tensor:  # [⌈N / 16⌉, num_pairs(K), 16, 2] bfloat16
    """The panels of a weight, its inputs by pairs."""
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // PANEL)
    filled = weight.new_zeros(num_panels * PANEL, 2 * num_pairs(num_inputs))
    filled[:num_outputs, :num_inputs] = weight
    pairs = filled.view(num_panels, PANEL, -1, 2).transpose(1, 2)
    packed = allocate(tuple(pairs.shape), torch.bfloat16, torch.device("cpu"))
    return packed.copy_(pairs)


@njit(nogil=True, cache=True)
def num_pairs(num_inputs):
    """Pairs of a weight's row."""
    return (num_inputs + FILLED_TO - 1) // FILLED_TO * (FILLED_TO // 2)


@njit(nogil=True, cache=True)
def pair_words(num_inputs):
    """float32's worth of memory that a row takes, in whole vectors, and lines."""
    return (num_inputs + 2 * PANEL - 1) // (2 * PANEL) * PANEL


@njit(nogil=True, cache=True)
def pair_row(x, num_inputs, out):
    """One row, float32, rounded to pairs, then zeros; `out` is a row of `pair_words`."""
    whole = num_inputs // WIDTH
    for i in range(whole):
        round_vector(x.ctypes.data + 4 * WIDTH * i, out.ctypes.data + 2 * WIDTH * i)
    for first in range(whole * WIDTH, 2 * pair_words(num_inputs), WIDTH):
        _round_rest(x, first, num_inputs, out)


@njit(nogil=True, cache=True)
def _round_rest(x, first, end, out):
    rest = np.zeros(WIDTH, np.float32)
    for i in range(first, end):
        rest[i - first] = x[i]
    round_vector(rest.ctypes.data, out.ctypes.data + 2 * first)


@intrinsic
def round_vector(
    context: Any,
    x: Any,  # address of a vector of float32
    out: Any,  # address of as many bfloat16, changed: to the nearest, ties to even
) -> Any:
    signature = types.void(types.int64, types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        rounded = round_to_bfloat16(build, load(build, args[0], FLOAT32))
        build.store(rounded, build.inttoptr(args[1], rounded.type.as_pointer())).align = 2
        return _context.get_dummy_value()

    return signature, emit


def round_to_bfloat16(build: Any, x: Any) -> Any:
    """A vector of float32 to the nearest, ties to even."""
    if not HAS_PAIRS:
        return _round_by_integers(build, x)
    halves = ir.VectorType(_BFloatType(), WIDTH)
    function = declare(build, "llvm.x86.avx512bf16.cvtneps2bf16.512", halves, VECTOR)
    return build.call(function, [x])


def _round_by_integers(build: Any, x: Any) -> Any:
    bits = build.bitcast(x, INTEGERS)
    odd = build.and_(build.lshr(bits, splat(build, I32(16))), splat(build, I32(1)))
    rounded = build.add(build.add(bits, splat(build, I32(0x7FFF))), odd)
    # a NaN would be rounded to infinity, or past it
    is_nan = build.fcmp_unordered("uno", x, x)
    rounded = build.select(is_nan, splat(build, I32(0x7FC00000)), rounded)
    shifted = build.lshr(rounded, splat(build, I32(16)))
    return build.trunc(shifted, ir.VectorType(ir.IntType(16), WIDTH))
