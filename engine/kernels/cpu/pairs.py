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
from engine.kernels.cpu.machine import FEATURES
from engine.kernels.memory import allocate

HAS_PAIRS = WIDTH == 16 and "avx512bf16" in FEATURES


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
) -> Tensor:  # [⌈N / 16⌉, ⌈K / 2⌉, 16, 2] bfloat16
    """The panels of a weight, its inputs by pairs."""
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // PANEL)
    filled = weight.new_zeros(num_panels * PANEL, num_inputs + num_inputs % 2)
    filled[:num_outputs, :num_inputs] = weight
    pairs = filled.view(num_panels, PANEL, -1, 2).transpose(1, 2)
    packed = allocate(tuple(pairs.shape), torch.bfloat16, torch.device("cpu"))
    return packed.copy_(pairs)


@njit(nogil=True, cache=True)
def pair_words(num_inputs):
    """float32's worth of memory that a row takes, in whole vectors."""
    return (num_inputs + PANEL - 1) // PANEL * (PANEL // 2)


@njit(nogil=True, cache=True)
def pair_row(x, num_inputs, out):
    """One row, float32, rounded to pairs; `out` is a row of `pair_words`."""
    whole = num_inputs // WIDTH
    for i in range(whole):
        round_vector(x.ctypes.data + 4 * WIDTH * i, out.ctypes.data + 2 * WIDTH * i)
    if whole * WIDTH < num_inputs:
        _round_rest(x, whole * WIDTH, num_inputs, out)


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
        x = load(build, args[0], FLOAT32)
        bits = build.bitcast(x, INTEGERS)
        odd = build.and_(build.lshr(bits, splat(build, I32(16))), splat(build, I32(1)))
        rounded = build.add(build.add(bits, splat(build, I32(0x7FFF))), odd)
        # a NaN would be rounded to infinity, or past it
        is_nan = build.fcmp_unordered("uno", x, x)
        rounded = build.select(is_nan, splat(build, I32(0x7FC00000)), rounded)
        shifted = build.lshr(rounded, splat(build, I32(16)))
        shorts = build.trunc(shifted, ir.VectorType(ir.IntType(16), WIDTH))
        build.store(shorts, build.inttoptr(args[1], shorts.type.as_pointer())).align = 2
        return _context.get_dummy_value()

    return signature, emit
