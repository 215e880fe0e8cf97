"""The inner loops of softmax and gate, and single numbers as they are stored.

Each takes addresses (int64, in bytes) and numbers, and becomes straight vector code in the kernel
that calls it: a compiler is not trusted to find it by itself.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from engine.kernels.cpu.emit import (
    F32,
    FLOAT16,
    FLOAT32,
    I32,
    I64,
    INT8,
    INTEGERS,
    NUM_VECTORS,
    PANEL,
    VECTOR_BYTES,
    WIDTH,
    branch,
    cap_softly,
    declare,
    exponential,
    fma,
    larger,
    load,
    load_one,
    load_stored,
    loop,
    prefetch,
    reduce_lanes,
    splat,
    store,
    store_one,
    zeros,
)

NOTHING = -3.0e38  # a score that no key has: what the softmax leaves out


@intrinsic
def softmax_row(
    context: Any,
    scores: Any,  # address of float32 [16 × num_panels], changed: exp(score - peak), 0 if not seen
    num_panels: Any,
    first: Any,  # scores in [first, end) are of keys that the query sees
    end: Any,
    scale: Any,  # float32, scores are multiplied by it
    softcap: Any,  # float32, then capped; 0: not
    result: Any,  # address of float32 [2], changed: the peak, and the sum of the exponentials
) -> Any:
    """The softmax's numerators over one stretch of keys, its peak and its sum.

    Lane by lane, so that keys which are not seen change no bit of the sum.
    """
    signature = types.void(*(types.int64,) * 4, types.float32, types.float32, types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        scores, num_panels, first, end, scale, softcap, result = args
        wide_scale, wide_cap = splat(build, scale), splat(build, softcap)
        nothing = splat(build, F32(NOTHING))
        capped = build.fcmp_ordered("!=", softcap, F32(0.0))
        num_vectors = build.mul(num_panels, I64(NUM_VECTORS))

        def find_peak(index: Any, state: list[Any]) -> list[Any]:
            address = build.add(scores, build.mul(index, I64(VECTOR_BYTES)))
            score = build.fmul(load(build, address, FLOAT32), wide_scale)
            [score] = branch(build, capped, [score], lambda: [cap_softly(build, score, wide_cap)])
            score = _hide_unseen(build, score, build.mul(index, I64(WIDTH)), first, end)
            store(build, score, address)
            return [larger(build, state[0], score)]

        [peaks] = loop(build, num_vectors, [nothing], find_peak)
        peak = reduce_lanes(build, peaks, lambda x, y: larger(build, x, y))
        wide_peak = splat(build, peak)

        def exponentiate(index: Any, state: list[Any]) -> list[Any]:
            address = build.add(scores, build.mul(index, I64(VECTOR_BYTES)))
            score = load(build, address, FLOAT32)
            power = exponential(build, build.fsub(score, wide_peak))
            seen = build.fcmp_unordered("!=", score, nothing)  # a NaN has been seen
            power = build.select(seen, power, zeros())
            store(build, power, address)
            return [build.fadd(state[0], power)]

        [sums] = loop(build, num_vectors, [zeros()], exponentiate)
        total = reduce_lanes(build, sums, build.fadd)
        store_one(build, peak, result)
        store_one(build, total, build.add(result, I64(4)))
        return _context.get_dummy_value()

    return signature, emit


def _hide_unseen(build: Any, scores: Any, begin: Any, first: Any, end: Any) -> Any:
    """A vector of scores, of the keys from `begin` on: NOTHING for those not in [first, end)."""

    def hide() -> list[Any]:
        lanes = ir.Constant(INTEGERS, list(range(WIDTH)))
        place = build.add(lanes, splat(build, build.trunc(begin, I32)))
        low, high = (splat(build, build.trunc(x, I32)) for x in (first, end))
        seen = build.and_(build.icmp_signed(">=", place, low), build.icmp_signed("<", place, high))
        return [build.select(seen, scores, splat(build, F32(NOTHING)))]

    some_unseen = build.or_(
        build.icmp_signed("<", begin, first),
        build.icmp_signed(">", build.add(begin, I64(WIDTH)), end),
    )
    return branch(build, some_unseen, [scores], hide)[0]


@intrinsic
def multiply_by_scales(
    context: Any,
    numbers: Any,  # address of float32 [16 × num_panels], changed
    pieces: Any,  # address of int64 [num_panels]: where the 16 tokens of each panel lie
    scales: Any,  # bytes from there to their float32 [16]
    num_panels: Any,
) -> Any:
    """Each token's number times its scale."""
    signature = types.void(*(types.int64,) * 4)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        numbers, pieces, scales, num_panels = args

        def one_panel(index: Any, state: list[Any]) -> list[Any]:
            address = build.add(pieces, build.mul(index, I64(8)))
            piece = build.load(build.inttoptr(address, I64.as_pointer()))
            for at in range(0, 4 * PANEL, VECTOR_BYTES):
                scale = load(build, build.add(build.add(piece, scales), I64(at)), FLOAT32)
                place = build.add(numbers, build.add(build.mul(index, I64(4 * PANEL)), I64(at)))
                store(build, build.fmul(load(build, place, FLOAT32), scale), place)
            return state

        loop(build, num_panels, [], one_panel)
        return _context.get_dummy_value()

    return signature, emit


@intrinsic
def silu_mul_panel(
    context: Any,
    gate: Any,  # address of float32 [16]
    up: Any,  # address of float32 [16]
    out: Any,  # address of float32 [16], changed
) -> Any:
    """silu(gate) × up."""
    signature = types.void(types.int64, types.int64, types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        gate, up, out = args
        ones = splat(build, F32(1.0))
        for part in range(NUM_VECTORS):
            at = [build.add(x, I64(VECTOR_BYTES * part)) for x in (gate, up, out)]
            x = load(build, at[0], FLOAT32)
            power = exponential(build, build.fneg(x))
            sigmoid = build.fdiv(x, build.fadd(ones, power))
            store(build, build.fmul(sigmoid, load(build, at[1], FLOAT32)), at[2])
        return _context.get_dummy_value()

    return signature, emit


@intrinsic
def gelu_mul_panels(
    context: Any,
    gate: Any,  # address of float32 [16 × num_panels]
    up: Any,  # address of as many
    out: Any,  # address of as many, changed; may be gate
    num_panels: Any,
) -> Any:
    """gelu(gate) × up, by tanh: (1 + tanh(y)) / 2 = 1 / (1 + exp(-2y))."""
    signature = types.void(*(types.int64,) * 4)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        gate, up, out, num_panels = args
        ones = splat(build, F32(1.0))
        minus_two, cubic = splat(build, F32(-1.5957691216057308)), splat(build, F32(0.044715))

        def gate_vector(at: Any) -> None:
            x = load(build, build.add(gate, at), FLOAT32)
            inner = fma(build, build.fmul(build.fmul(x, x), x), cubic, x)
            power = exponential(build, build.fmul(inner, minus_two))
            gated = build.fdiv(x, build.fadd(ones, power))
            gated = build.fmul(gated, load(build, build.add(up, at), FLOAT32))
            store(build, gated, build.add(out, at))

        _for_each_vector(build, build.mul(num_panels, I64(PANEL)), gate_vector)
        return _context.get_dummy_value()

    return signature, emit


@intrinsic
def weigh_row(
    context: Any,
    source: Any,  # address of float32 [count]
    weight: Any,  # float32
    target: Any,  # address of float32 [count], changed
    count: Any,  # a multiple of 16
) -> Any:
    """target = source × weight."""
    signature = types.void(types.int64, types.float32, types.int64, types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        source, weight, target, count = args
        wide = splat(build, weight)

        def weigh(at: Any) -> None:
            x = load(build, build.add(source, at), FLOAT32)
            store(build, build.fmul(x, wide), build.add(target, at))

        _for_each_vector(build, count, weigh)
        return _context.get_dummy_value()

    return signature, emit


@intrinsic
def blend_rows(
    context: Any,
    target: Any,  # address of float32 [count], changed
    kept: Any,  # float32
    source: Any,  # address of float32 [count]
    added: Any,  # float32
    count: Any,  # a multiple of 16
) -> Any:
    """target = target × kept + source × added."""
    signature = types.void(types.int64, types.float32, types.int64, types.float32, types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        target, kept, source, added, count = args
        wide_kept, wide_added = splat(build, kept), splat(build, added)

        def blend(at: Any) -> None:
            x = build.fmul(load(build, build.add(target, at), FLOAT32), wide_kept)
            y = load(build, build.add(source, at), FLOAT32)
            store(build, fma(build, y, wide_added, x), build.add(target, at))

        _for_each_vector(build, count, blend)
        return _context.get_dummy_value()

    return signature, emit


def _for_each_vector(build: Any, count: Any, do: Callable[[Any], None]) -> None:
    """With the bytes at which each begins."""

    def body(index: Any, state: list[Any]) -> list[Any]:
        do(build.mul(index, I64(VECTOR_BYTES)))
        return state

    loop(build, build.sdiv(count, I64(WIDTH)), [], body)


@intrinsic
def largest_magnitude(
    context: Any,
    source: Any,  # address of float32 [count]
    count: Any,  # a multiple of 16
) -> Any:
    """The largest of all |x|, in the order of their bits: infinity, and then what is no number."""
    signature = types.float32(types.int64, types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        source, count = args
        but_sign = splat(build, I32(0x7FFFFFFF))

        def compare(index: Any, state: list[Any]) -> list[Any]:
            address = build.add(source, build.mul(index, I64(VECTOR_BYTES)))
            bits = build.bitcast(load(build, address, FLOAT32), INTEGERS)
            return [larger_bits(state[0], build.and_(bits, but_sign))]

        def larger_bits(x: Any, y: Any) -> Any:
            return build.select(build.icmp_signed(">", x, y), x, y)

        none = ir.Constant(INTEGERS, [0] * WIDTH)
        [largest] = loop(build, build.sdiv(count, I64(WIDTH)), [none], compare)
        return build.bitcast(reduce_lanes(build, largest, larger_bits), F32)

    return signature, emit


@intrinsic
def fetch(context: Any, address: Any) -> Any:
    """Have the line at an address, which may be anywhere, brought into the cache."""
    signature = types.void(types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        prefetch(build, args[0])
        return _context.get_dummy_value()

    return signature, emit


@intrinsic
def exp_float(context: Any, x: Any) -> Any:
    """exp(x) by the polynomial of the vectors, so that both agree."""
    signature = types.float32(types.float32)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        return build.extract_element(exponential(build, splat(build, args[0])), I32(0))

    return signature, emit


@intrinsic
def load_float(context: Any, address: Any) -> Any:
    """The float32 at an address."""
    signature = types.float32(types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        return load_one(build, args[0])

    return signature, emit


@intrinsic(prefer_literal=True)
def load_number(context: Any, address: Any, kind: Any) -> Any:
    """The number at an address, stored as `kind` (literal) says, as float32 without its scale."""
    stored = kind.literal_value
    signature = types.float32(types.int64, kind)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        return load_stored(build, args[0], stored, None)

    return signature, emit


@intrinsic(prefer_literal=True)
def store_number(context: Any, x: Any, address: Any, kind: Any) -> Any:
    """Store a float32 as `kind` (literal) says, rounded to the nearest, ties to even.

    In 8 bits it is to lie in [-127, 127].
    """
    stored = kind.literal_value
    signature = types.void(types.float32, types.int64, kind)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        x, address = args[:2]
        if stored == FLOAT32:
            store_one(build, x, address)
        elif stored == FLOAT16:
            pointer = build.inttoptr(address, ir.HalfType().as_pointer())
            build.store(build.fptrunc(x, ir.HalfType()), pointer).align = 2
        elif stored == INT8:
            rounded = build.call(declare(build, "llvm.rint.f32", F32, F32), [x])
            byte = build.fptosi(rounded, ir.IntType(8))
            build.store(byte, build.inttoptr(address, ir.IntType(8).as_pointer()))
        else:
            bits = build.bitcast(x, I32)
            odd = build.and_(build.lshr(bits, I32(16)), I32(1))
            rounded = build.add(build.add(bits, I32(0x7FFF)), odd)
            # a NaN would be rounded to infinity, or past it
            rounded = build.select(build.fcmp_unordered("uno", x, x), I32(0x7FC00000), rounded)
            half = build.trunc(build.lshr(rounded, I32(16)), ir.IntType(16))
            build.store(half, build.inttoptr(address, ir.IntType(16).as_pointer())).align = 2
        return _context.get_dummy_value()

    return signature, emit


@intrinsic
def as_floats(context: Any, address: Any) -> Any:
    """An address as a pointer to float32, for `carray`."""
    return _pointer(types.float32)


@intrinsic
def as_integers(context: Any, address: Any) -> Any:
    """An address as a pointer to int64, for `carray`."""
    return _pointer(types.int64)


def _pointer(kind: Any) -> Any:
    signature = types.CPointer(kind)(types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        return build.inttoptr(args[0], _context.get_value_type(_signature.return_type))

    return signature, emit
