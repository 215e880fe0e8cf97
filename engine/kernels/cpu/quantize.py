"""Numbers in 8 bits, by groups of 32 of a row: weights once, what they multiply in each step.

A group's largest number becomes ±127, the others are rounded to the nearest, and a scale leads
back. Products of a group are sums of integers, exact on every machine (`tiles_int8`); the groups'
are added as float32. The groups, and 16 bits for a weight's scale, are those of llama.cpp's Q8_0.
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
    VECTOR_BYTES,
    WIDTH,
    declare,
    splat,
    store_one,
    zeros,
)
from engine.kernels.cpu.tiles_int8 import (
    GROUP,
    GROUP_BYTES,
    GROUP_WORDS,
    INT8_BY_AMX,
    NUMBERS_BYTES,
    OFFSET,
    SCALES_BYTES,
    SIDE_BY_SIDE,
)
from engine.kernels.cpu.vectors import load_number
from engine.kernels.memory import allocate

LEVELS = 127
TINY = 1e-36  # a group of none larger is taken for zeros


@njit(nogil=True, cache=True)
def num_groups(num_inputs):
    return (num_inputs + GROUP - 1) // GROUP


@njit(nogil=True, cache=True)
def quantized_words(num_inputs):
    """float32's worth of memory that a row takes."""
    count = num_groups(num_inputs)
    if INT8_BY_AMX:  # numbers, then scales, in whole lines
        return (count * (GROUP // 4 + 1) + PANEL - 1) // PANEL * PANEL
    return count * GROUP_WORDS


def pack_int8(
    weight: Tensor,  # [N, K] float
) -> Tensor:  # [⌈N / 16⌉, ⌈K / 32⌉ × GROUP_BYTES] int8
    """The panels of a weight: of each group 16 rows' numbers, then of each their scales, bfloat16.

    Inputs that are multiplied side by side lie together: [32 / 4, 16, 4], or [32 / 2, 16, 2].
    """
    num_outputs, num_inputs = weight.shape
    num_panels, count = -(-num_outputs // PANEL), num_groups(num_inputs)
    filled = weight.new_zeros(num_panels * PANEL, count * GROUP)
    filled[:num_outputs, :num_inputs] = weight
    grouped = filled.view(num_panels, PANEL, count, GROUP)
    scales = (grouped.abs().amax(dim=3) / LEVELS).bfloat16()
    steps = torch.where(scales > 0, scales.float(), 1.0).unsqueeze(3)
    rounded = (grouped / steps).round().clamp(-LEVELS, LEVELS)
    numbers = (rounded + OFFSET).to(torch.uint8 if OFFSET else torch.int8).view(torch.int8)
    numbers = numbers.view(num_panels, PANEL, count, GROUP // SIDE_BY_SIDE, SIDE_BY_SIDE)
    packed = allocate((num_panels, count * GROUP_BYTES), torch.int8, torch.device("cpu"))
    packed[:, : count * NUMBERS_BYTES] = numbers.permute(0, 2, 3, 1, 4).flatten(1)
    packed[:, count * NUMBERS_BYTES :] = (
        scales.transpose(1, 2).contiguous().view(torch.int8).flatten(1)
    )
    return packed


@njit(nogil=True, cache=True)
def weight_at(panel, lane, i, num_inputs):
    """Of a panel's row `lane` the i-th number, as float32; `panel` is an address."""
    group, place = i // GROUP, i % GROUP
    row = group * NUMBERS_BYTES + place // SIDE_BY_SIDE * (PANEL * SIDE_BY_SIDE)
    number = load_number(panel + row + lane * SIDE_BY_SIDE + place % SIDE_BY_SIDE, 3)
    if OFFSET:  # kept without a sign, read with one
        number += OFFSET if number < 0 else -OFFSET
    scales = panel + num_groups(num_inputs) * NUMBERS_BYTES + group * SCALES_BYTES
    return number * load_number(scales + 2 * lane, 2)


@njit(nogil=True, cache=True)
def quantize_row(x, num_inputs, out):
    """One row, float32, as tiles read it; `out` is a row of `quantized_words`.

    Of each group its scale, what its sums begin with, its numbers. For AMX all numbers come first,
    then all scales.
    """
    count, begin = num_groups(num_inputs), out.ctypes.data
    for group in range(count):
        first = group * GROUP
        head = begin + 4 * GROUP_WORDS * group
        numbers = head + 8
        if INT8_BY_AMX:
            head, numbers = begin + GROUP * count + 4 * group, begin + GROUP * group
        quantize_group(x.ctypes.data + 4 * first, min(GROUP, num_inputs - first), head, numbers)


@intrinsic
def quantize_group(
    context: Any,
    x: Any,  # address of float32 [count]
    count: Any,  # 1 to 32; beyond are zeros
    head: Any,  # address of a group's scale and, but for AMX, of what its sums begin with; changed
    numbers: Any,  # address of its numbers, changed
) -> Any:
    """A group's numbers in 8 bits; one that is none, or infinite, makes the scale no number."""
    signature = types.void(*(types.int64,) * 4)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        x, count, head, out = args
        vectors = [_load_first(build, x, count, n * WIDTH) for n in range(GROUP // WIDTH)]
        largest = _largest(build, vectors)
        finite = build.fcmp_ordered("<", largest, F32(float("inf")))
        usable = build.and_(finite, build.fcmp_ordered(">", largest, F32(TINY)))
        scale = build.select(usable, build.fdiv(largest, F32(LEVELS)), F32(0.0))
        store_one(build, build.select(finite, scale, F32(float("nan"))), head)
        factor = splat(build, build.fdiv(F32(LEVELS), largest))
        numbers = [_round(build, vector, factor, usable) for vector in vectors]
        if not INT8_BY_AMX:
            _store_integer(build, _first_sum(build, numbers), build.add(head, I64(4)))
        narrow = ir.IntType(32 // SIDE_BY_SIDE)
        for n, each in enumerate(numbers):
            small = build.trunc(each, ir.VectorType(narrow, WIDTH))
            at = build.add(out, I64(n * VECTOR_BYTES // SIDE_BY_SIDE))
            build.store(small, build.inttoptr(at, small.type.as_pointer())).align = 1
        return _context.get_dummy_value()

    return signature, emit


def _first_sum(build: Any, numbers: list[Any]) -> Any:
    """-OFFSET × the sum of all numbers, int32."""
    total = numbers[0]
    for each in numbers[1:]:
        total = build.add(total, each)
    reduce = declare(build, f"llvm.vector.reduce.add.v{WIDTH}i32", I32, INTEGERS)
    return build.mul(build.call(reduce, [total]), I32(-OFFSET))


def _load_first(build: Any, address: Any, count: Any, begin: int) -> Any:
    """The vector from the number `begin` on: zeros from `count` on, where nothing is read."""
    lanes = ir.Constant(INTEGERS, [begin + lane for lane in range(WIDTH)])
    mask = build.icmp_signed("<", lanes, splat(build, build.trunc(count, I32)))
    pointer = VECTOR.as_pointer()
    masks = ir.VectorType(ir.IntType(1), WIDTH)
    load = declare(build, f"llvm.masked.load.v{WIDTH}f32.p0", VECTOR, pointer, I32, masks, VECTOR)
    at = build.inttoptr(build.add(address, I64(4 * begin)), pointer)
    return build.call(load, [at, I32(4), mask, zeros()])


def _largest(build: Any, vectors: list[Any]) -> Any:
    """Of all numbers the largest without its sign, float32; not a number if one is not.

    As integers: without their sign, floats have the order of their bits, and NaN is the greatest.
    """
    peak = ir.Constant(INTEGERS, [0] * WIDTH)
    for vector in vectors:
        size = build.and_(build.bitcast(vector, INTEGERS), splat(build, I32(0x7FFFFFFF)))
        peak = build.select(build.icmp_signed(">", size, peak), size, peak)
    reduce = declare(build, f"llvm.vector.reduce.smax.v{WIDTH}i32", I32, INTEGERS)
    return build.bitcast(build.call(reduce, [peak]), F32)


def _round(build: Any, vector: Any, factor: Any, usable: Any) -> Any:
    rint = declare(build, f"llvm.rint.v{WIDTH}f32", VECTOR, VECTOR)
    rounded = build.fptosi(build.call(rint, [build.fmul(vector, factor)]), INTEGERS)
    return build.select(usable, rounded, ir.Constant(INTEGERS, [0] * WIDTH))


def _store_integer(build: Any, x: Any, address: Any) -> None:
    build.store(x, build.inttoptr(address, I32.as_pointer())).align = 4
