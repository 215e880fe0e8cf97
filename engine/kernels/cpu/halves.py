"""Products of float16 numbers, summed in float16 for a short while and in float32 from there on.

AVX512-FP16 multiplies twice as many of them as of float32. 11 bits of precision, kept in range by
scales that are powers of two: the largest number of a weight's row lies in [1, 2), that of what it
is multiplied by in [256, 512), so that no sum of `STRETCH` products overflows.
"""

from typing import Any

import torch
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from engine.kernels.cpu.emit import (
    I32,
    I64,
    INTEGERS,
    PANEL,
    VECTOR,
    VECTOR_BYTES,
    WIDTH,
    declare,
    loop,
    splat,
    store_one,
    zeros,
)
from engine.kernels.cpu.machine import FEATURES
from engine.kernels.cpu.vectors import load_number
from engine.kernels.memory import allocate

HAS_HALVES = WIDTH == 16 and "avx512fp16" in FEATURES
STRETCH = 32  # so many products of a lane are summed in float16
PEAK = 8  # the largest number of a row: 2⁸ to 2⁹
HALVES = ir.VectorType(ir.HalfType(), 2 * WIDTH)

_EXPONENT = 23  # where a float32's begins
_LEAST, _INFINITE = 16, 255  # exponents of float32, biased: what is smaller is scaled as that is


@njit(nogil=True, cache=True)
def half_pairs(num_inputs):
    """Pairs of a row."""
    return (num_inputs + 1) // 2


@njit(nogil=True, cache=True)
def half_words(num_inputs):
    """float32's worth of memory that a row takes: pairs, then its scale, in whole lines."""
    return (half_pairs(num_inputs) // PANEL + 1) * PANEL


@njit(nogil=True, cache=True)
def half_panel_bytes(num_inputs):
    """From one panel of a weight to the next: pairs, and 16 rows' scales."""
    return 4 * PANEL * (half_pairs(num_inputs) + 1)


def pack_halves(
    weight: Tensor,  # [N, K] float
) -> Tensor:  # [⌈N / 16⌉, (⌈K / 2⌉ + 1) × 32] float16
    """The panels of a weight, its inputs by pairs, then its 16 rows' scales, float32."""
    num_outputs, num_inputs = weight.shape
    num_panels, num_pairs = -(-num_outputs // PANEL), half_pairs(num_inputs)
    packed = allocate((num_panels, (num_pairs + 1) * 2 * PANEL), torch.float16, torch.device("cpu"))
    numbers = packed[:, : num_pairs * 2 * PANEL].view(num_panels, num_pairs, PANEL, 2)
    scales = packed[:, num_pairs * 2 * PANEL :].view(torch.float32)
    for panel in range(num_panels):
        rows = weight[PANEL * panel : PANEL * (panel + 1)].float()
        exponents = torch.frexp(rows.abs().amax(dim=1)).exponent.clamp(min=-100) - 1
        filled = rows.new_zeros(PANEL, 2 * num_pairs)
        filled[: len(rows), :num_inputs] = torch.ldexp(rows, -exponents[:, None])
        numbers[panel] = filled.view(PANEL, num_pairs, 2).transpose(0, 1)
        scales[panel, : len(rows)] = torch.ldexp(torch.ones(len(rows)), exponents)
    return packed


@njit(nogil=True, cache=True)
def half_weight_at(panel, lane, i, num_inputs):
    """Of a panel's row `lane` the i-th number, as float32; `panel` is an address."""
    number = load_number(panel + 4 * (i // 2 * PANEL + lane) + i % 2 * 2, 1)
    return number * load_number(panel + 4 * (half_pairs(num_inputs) * PANEL + lane), 0)


@njit(nogil=True, cache=True)
def halve_row(x, num_inputs, out):
    """A row, float32, as tiles read it: float16, then its scale; `out` is of `half_words`."""
    round_halves(x.ctypes.data, num_inputs, out.ctypes.data, 4 * half_pairs(num_inputs), PEAK)


@intrinsic
def round_halves(
    context: Any,
    x: Any,  # address of float32 [count]
    count: Any,
    out: Any,  # address of float16, changed: as many, and zeros to a whole vector
    scale_at: Any,  # bytes from there to what the row is to be multiplied by, float32, changed
    peak: Any,  # the largest number becomes 2^peak to 2^(peak + 1)
) -> Any:
    """A row times a power of two, rounded to the nearest; what is no number remains none."""
    signature = types.void(*(types.int64,) * 5)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        x, count, out, scale_at, peak = args
        peak = build.trunc(peak, I32)
        num_vectors = build.sdiv(build.add(count, I64(WIDTH - 1)), I64(WIDTH))

        def compare(index: Any, state: list[Any]) -> list[Any]:
            bits = build.bitcast(_load_first(build, x, count, index), INTEGERS)
            size = build.and_(bits, splat(build, I32(0x7FFFFFFF)))
            # without their sign, floats have the order of their bits
            return [build.select(build.icmp_signed(">", size, state[0]), size, state[0])]

        [peaks] = loop(build, num_vectors, [ir.Constant(INTEGERS, [0] * WIDTH)], compare)
        reduce = declare(build, f"llvm.vector.reduce.smax.v{WIDTH}i32", I32, INTEGERS)
        exponent = build.lshr(build.call(reduce, [peaks]), I32(_EXPONENT))
        small = build.icmp_signed("<", exponent, I32(_LEAST))
        exponent = build.select(small, I32(_LEAST), exponent)
        # 2^(peak - e), and back; 1 where some number is none
        finite = build.icmp_signed("!=", exponent, I32(_INFINITE))
        by = build.select(finite, build.sub(build.add(peak, I32(2 * 127)), exponent), I32(127))
        back = build.select(finite, build.sub(exponent, peak), I32(127))
        factor = splat(build, _power(build, by))
        halves = ir.VectorType(ir.HalfType(), WIDTH)

        def round_each(index: Any, _state: list[Any]) -> list[Any]:
            scaled = build.fmul(_load_first(build, x, count, index), factor)
            place = build.add(out, build.mul(index, I64(VECTOR_BYTES // 2)))
            pointer = build.inttoptr(place, halves.as_pointer())
            build.store(build.fptrunc(scaled, halves), pointer).align = 2
            return []

        loop(build, num_vectors, [], round_each)
        store_one(build, _power(build, back), build.add(out, scale_at))
        return _context.get_dummy_value()

    return signature, emit


def _power(build: Any, exponent: Any) -> Any:
    """Two to a biased exponent, float32."""
    return build.bitcast(build.shl(exponent, I32(_EXPONENT)), ir.FloatType())


def _load_first(build: Any, address: Any, count: Any, index: Any) -> Any:
    """A vector of so many numbers; from `count` on zeros, where nothing is read."""
    begin = build.mul(index, I64(WIDTH))
    lanes = ir.Constant(INTEGERS, list(range(WIDTH)))
    left = build.trunc(build.sub(count, begin), I32)
    mask = build.icmp_signed("<", lanes, splat(build, left))
    pointer = VECTOR.as_pointer()
    masks = ir.VectorType(ir.IntType(1), WIDTH)
    load = declare(build, f"llvm.masked.load.v{WIDTH}f32.p0", VECTOR, pointer, I32, masks, VECTOR)
    at = build.inttoptr(build.add(address, build.mul(begin, I64(4))), pointer)
    return build.call(load, [at, I32(4), mask, zeros()])
