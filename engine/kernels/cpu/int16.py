"""Numbers in 16 bits: integers with a scale, a weight's for each row, an input's for each 32.

Block floating point (Wilkinson 1963): products of a group of 32 are summed as integers of 32 bits,
exactly, and only the groups' sums are float32. None of them overflows: by Cauchy and Schwarz a sum
is no larger than the norms of what is multiplied, and scales bound those. Beside float16's 11 bits
that are summed in float32, a number that is as large as most of its group has 12 to 13.
"""

from typing import Any

import torch
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from engine.kernels.cpu.emit import (
    F32,
    I32,
    I64,
    INTEGERS,
    PANEL,
    VECTOR,
    WIDTH,
    declare,
    fma,
    loop,
    splat,
    store_one,
    zeros,
)
from engine.kernels.cpu.machine import FEATURES
from engine.kernels.cpu.vectors import load_number
from engine.kernels.memory import allocate

HAS_INT16 = WIDTH == 16 and "avx512vnni" in FEATURES
GROUP = 32  # numbers of a row whose products are summed as integers
GROUP_PAIRS = GROUP // 2
# the norms of a group's integers before they are rounded, which adds 2.83 at most: their product
# stays below 2³¹, and no integer is larger than its group's norm
INPUT_NORM, WEIGHT_NORM, LARGEST = 32764.0, 65535.0, 32767.0

_EXPONENT = 23  # where a float32's begins
# exponents of float32, biased: what is smaller, or larger, is scaled as if it had the nearest
_LEAST, _LARGEST, _INFINITE = 16, 253, 255
_LEAST_NORM = 2.0**-50  # of a group, its row's largest number in [1, 4): squares keep their bits


@njit(nogil=True, cache=True)
def num_groups_of_pairs(num_inputs):
    """Groups of a row, filled up with zeros."""
    return (num_inputs + GROUP - 1) // GROUP


@njit(nogil=True, cache=True)
def int16_words(num_inputs):
    """float32's worth of memory that a row takes: pairs, then scales, in whole lines."""
    words = num_groups_of_pairs(num_inputs) * (GROUP_PAIRS + 1)
    return (words + PANEL - 1) // PANEL * PANEL


@njit(nogil=True, cache=True)
def int16_panel_bytes(num_inputs):
    """From one panel of a weight to the next: pairs, and 16 rows' scales."""
    return 4 * PANEL * (num_groups_of_pairs(num_inputs) * GROUP_PAIRS + 1)


def pack_int16(
    weight: Tensor,  # [N, K] float
) -> Tensor:  # [⌈N / 16⌉, (⌈K / 32⌉ × 16 + 1) × 32] int16
    """The panels of a weight, its inputs by pairs, then its 16 rows' scales, float32."""
    num_outputs, num_inputs = weight.shape
    num_panels, num_groups = -(-num_outputs // PANEL), num_groups_of_pairs(num_inputs)
    num_pairs = num_groups * GROUP_PAIRS
    packed = allocate((num_panels, (num_pairs + 1) * 2 * PANEL), torch.int16, torch.device("cpu"))
    numbers = packed[:, : num_pairs * 2 * PANEL].view(num_panels, num_pairs, PANEL, 2)
    scales = packed[:, num_pairs * 2 * PANEL :].view(torch.float32)
    for panel in range(num_panels):
        rows = weight[PANEL * panel : PANEL * (panel + 1)].double()
        filled = rows.new_zeros(PANEL, num_groups, GROUP)
        filled.flatten(1)[: len(rows), :num_inputs] = rows
        norms = filled.norm(dim=2).amax(dim=1)
        steps = torch.maximum(norms / WEIGHT_NORM, filled.abs().amax(dim=(1, 2)) / LARGEST)
        # what is kept, float32, is what divides: a little more than it has to be
        steps = (steps * (1 + 2**-22)).float()
        # in fewer bits a step may be a smaller one; of a row of zeros it only has to be a number
        steps.clamp_(min=torch.finfo(torch.float32).tiny)
        scales[panel] = steps
        integers = (filled.flatten(1) / steps[:, None].double()).round().to(torch.int16)
        numbers[panel] = integers.view(PANEL, num_pairs, 2).transpose(0, 1)
    return packed


@njit(nogil=True, cache=True)
def int16_weight_at(panel, lane, i, num_inputs):
    """Of a panel's row `lane` the i-th number, as float32; `panel` is an address."""
    number = load_number(panel + 4 * (i // 2 * PANEL + lane) + i % 2 * 2, 5)
    scales = panel + int16_panel_bytes(num_inputs) - 4 * PANEL
    return number * load_number(scales + 4 * lane, 0)


@njit(nogil=True, cache=True)
def int16_row(x, num_inputs, out):
    """A row, float32, as tiles read it: integers, then their groups' scales."""
    round_int16(x.ctypes.data, num_inputs, out.ctypes.data)


@intrinsic
def round_int16(
    context: Any,
    x: Any,  # address of float32 [count]
    count: Any,
    out: Any,  # address of `int16_words`, changed
) -> Any:
    """A row by groups; one with a number that is none makes all its scales such.

    Sums with groups whose norms add up to 5e33 may be infinite before a weight's scale is applied.
    """
    signature = types.void(*(types.int64,) * 3)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        x, count, out = args
        num_groups = build.sdiv(build.add(count, I64(GROUP - 1)), I64(GROUP))
        scales = build.add(out, build.mul(num_groups, I64(2 * GROUP)))
        by, back = _powers(build, x, count)
        factor = splat(build, by)

        def round_group(index: Any, _state: list[Any]) -> list[Any]:
            begin = build.mul(index, I64(GROUP))
            vectors = [
                build.fmul(_load_first(build, x, count, begin, n * WIDTH), factor)
                for n in range(GROUP // WIDTH)
            ]
            squares = zeros()
            for vector in vectors:
                squares = fma(build, vector, vector, squares)
            norm = build.call(
                declare(build, "llvm.sqrt.f32", F32, F32), [_sum_of_lanes(build, squares)]
            )
            few = build.fcmp_ordered("<", norm, F32(_LEAST_NORM))
            norm = build.select(few, F32(_LEAST_NORM), norm)
            step = splat(build, build.fdiv(F32(INPUT_NORM), norm))
            for n, vector in enumerate(vectors):
                rint = declare(build, f"llvm.rint.v{WIDTH}f32", VECTOR, VECTOR)
                rounded = build.call(rint, [build.fmul(vector, step)])
                small = build.trunc(
                    build.fptosi(rounded, INTEGERS), ir.VectorType(ir.IntType(16), WIDTH)
                )
                place = build.add(out, build.mul(build.add(begin, I64(n * WIDTH)), I64(2)))
                build.store(small, build.inttoptr(place, small.type.as_pointer())).align = 2
            scale = build.fmul(build.fmul(norm, F32(1 / INPUT_NORM)), back)
            store_one(build, scale, build.add(scales, build.mul(index, I64(4))))
            return []

        loop(build, num_groups, [], round_group)
        return _context.get_dummy_value()

    return signature, emit


def _powers(build: Any, x: Any, count: Any) -> tuple[Any, Any]:
    """The power of two that brings a row's largest number to [1, 4), and what leads back.

    Of a row with a number that is none both are none.
    """
    num_vectors = build.sdiv(build.add(count, I64(WIDTH - 1)), I64(WIDTH))

    def compare(index: Any, state: list[Any]) -> list[Any]:
        vector = _load_first(build, x, count, build.mul(index, I64(WIDTH)), 0)
        # without their sign, floats have the order of their bits
        size = build.and_(build.bitcast(vector, INTEGERS), splat(build, I32(0x7FFFFFFF)))
        return [build.select(build.icmp_signed(">", size, state[0]), size, state[0])]

    [peaks] = loop(build, num_vectors, [ir.Constant(INTEGERS, [0] * WIDTH)], compare)
    reduce = declare(build, f"llvm.vector.reduce.smax.v{WIDTH}i32", I32, INTEGERS)
    exponent = build.lshr(build.call(reduce, [peaks]), I32(_EXPONENT))
    finite = build.icmp_signed("!=", exponent, I32(_INFINITE))
    small = build.icmp_signed("<", exponent, I32(_LEAST))
    exponent = build.select(small, I32(_LEAST), exponent)
    large = build.icmp_signed(">", exponent, I32(_LARGEST))
    exponent = build.select(large, I32(_LARGEST), exponent)
    by = build.bitcast(build.shl(build.sub(I32(2 * 127), exponent), I32(_EXPONENT)), F32)
    back = build.bitcast(build.shl(exponent, I32(_EXPONENT)), F32)
    nan = F32(float("nan"))
    return build.select(finite, by, nan), build.select(finite, back, nan)


def _sum_of_lanes(build: Any, vector: Any) -> Any:
    """In any order: it is only a scale, and the same for the same row."""
    function = declare(build, f"llvm.vector.reduce.fadd.v{WIDTH}f32", F32, F32, VECTOR)
    return build.call(function, [F32(0.0), vector], fastmath=["reassoc"])


def _load_first(build: Any, address: Any, count: Any, begin: Any, apart: int) -> Any:
    """The vector from a number on: zeros from `count` on, where nothing is read."""
    begin = build.add(begin, I64(apart))
    lanes = ir.Constant(INTEGERS, list(range(WIDTH)))
    left = build.trunc(build.sub(count, begin), I32)
    mask = build.icmp_signed("<", lanes, splat(build, left))
    pointer = VECTOR.as_pointer()
    masks = ir.VectorType(ir.IntType(1), WIDTH)
    load = declare(build, f"llvm.masked.load.v{WIDTH}f32.p0", VECTOR, pointer, I32, masks, VECTOR)
    at = build.inttoptr(build.add(address, build.mul(begin, I64(4))), pointer)
    return build.call(load, [at, I32(4), mask, zeros()])
