"""The softmax's numerators where they are rounded to bfloat16."""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from engine.kernels.cpu.emit import (
    F32,
    FLOAT32,
    I32,
    I64,
    INTEGERS,
    PANEL,
    VECTOR,
    VECTOR_BYTES,
    WIDTH,
    branch,
    cap_softly,
    declare,
    fma,
    larger,
    load,
    loop,
    reduce_lanes,
    splat,
    store,
    store_one,
    zeros,
)
from engine.kernels.cpu.pairs import round_to_bfloat16

NOTHING = float("-inf")  # what the softmax leaves out
LOG2_E = 1.44269504088896341
AT_ONCE = 4  # peaks that are found side by side


@intrinsic
def softmax_pairs(
    context: Any,
    scores: Any,  # address of float32 [16 × num_panels], changed: numerators, as bfloat16
    num_panels: Any,
    first: Any,  # scores in [first, end), which has some, are of keys that the query sees
    end: Any,
    scale: Any,  # float32, scores are multiplied by it; not below 0
    softcap: Any,  # float32, then capped; 0: not
    result: Any,  # address of float32 [2], changed: the peak, and the sum of the exponentials
) -> Any:
    """exp(score - peak) of one stretch of keys, 0 of those not seen, rounded; their sum is not.

    A key that is not seen changes no bit. Powers are within 1e-4 of what they should be, a
    fortieth of what they are rounded by.
    """
    signature = types.void(*(types.int64,) * 4, types.float32, types.float32, types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        scores, num_panels, first, end, scale, softcap, result = args

        def cap() -> list[Any]:
            _cap_all(build, scores, num_panels, scale, softcap)
            return [F32(1.0)]

        capped = build.fcmp_ordered("!=", softcap, F32(0.0))
        [scale] = branch(build, capped, [scale], cap)
        _hide(build, scores, num_panels, first, end)
        highest = _peak(build, scores, num_panels)
        wide_highest = splat(build, highest)
        factor = splat(build, build.fmul(scale, F32(LOG2_E)))

        def exponentiate(index: Any, state: list[Any]) -> list[Any]:
            score = load(build, _vector_at(build, scores, index), FLOAT32)
            # first the difference, which is 0 at the peak however large scores are
            power = _power_of_two(build, build.fmul(build.fsub(score, wide_highest), factor))
            rounded = round_to_bfloat16(build, power)
            place = build.add(scores, build.mul(index, I64(VECTOR_BYTES // 2)))
            pointer = build.inttoptr(place, rounded.type.as_pointer())
            build.store(rounded, pointer).align = 2
            return [build.fadd(state[0], power)]

        [sums] = loop(build, _num_vectors(build, num_panels), [zeros()], exponentiate)
        store_one(build, build.fmul(highest, scale), result)
        store_one(build, reduce_lanes(build, sums, build.fadd), build.add(result, I64(4)))
        return _context.get_dummy_value()

    return signature, emit


def _num_vectors(build: Any, num_panels: Any) -> Any:
    return build.mul(num_panels, I64(PANEL // WIDTH))


def _vector_at(build: Any, scores: Any, index: Any) -> Any:
    return build.add(scores, build.mul(index, I64(VECTOR_BYTES)))


def _cap_all(build: Any, scores: Any, num_panels: Any, scale: Any, softcap: Any) -> None:
    wide_scale, wide_cap = splat(build, scale), splat(build, softcap)

    def one_vector(index: Any, state: list[Any]) -> list[Any]:
        at = _vector_at(build, scores, index)
        score = build.fmul(load(build, at, FLOAT32), wide_scale)
        store(build, cap_softly(build, score, wide_cap), at)
        return state

    loop(build, _num_vectors(build, num_panels), [], one_vector)


def _hide(build: Any, scores: Any, num_panels: Any, first: Any, end: Any) -> None:
    """NOTHING for the scores that are not in [first, end)."""
    low, high = (splat(build, build.trunc(x, I32)) for x in (first, end))
    lanes = ir.Constant(INTEGERS, list(range(WIDTH)))

    def from_vector(begin: Any, count: Any) -> None:
        def one_vector(index: Any, state: list[Any]) -> list[Any]:
            index = build.add(index, begin)
            at = _vector_at(build, scores, index)
            place = splat(build, build.trunc(build.mul(index, I64(WIDTH)), I32))
            place = build.add(lanes, place)
            seen = build.and_(
                build.icmp_signed(">=", place, low), build.icmp_signed("<", place, high)
            )
            score = load(build, at, FLOAT32)
            store(build, build.select(seen, score, splat(build, F32(NOTHING))), at)
            return state

        loop(build, count, [], one_vector)

    from_vector(I64(0), build.sdiv(build.add(first, I64(WIDTH - 1)), I64(WIDTH)))
    last = build.sdiv(end, I64(WIDTH))
    from_vector(last, build.sub(_num_vectors(build, num_panels), last))


def _peak(build: Any, scores: Any, num_panels: Any) -> Any:
    """The largest score, or one that is no number."""

    def find(first: Any, each: int, peaks: list[Any]) -> list[Any]:
        found = []
        for n, peak in enumerate(peaks):
            if n >= each:
                found.append(peak)
                continue
            at = _vector_at(build, scores, build.add(first, I64(n)))
            found.append(larger(build, peak, load(build, at, FLOAT32)))
        return found

    count = _num_vectors(build, num_panels)
    whole = build.sdiv(count, I64(AT_ONCE))
    peaks = [splat(build, F32(NOTHING))] * AT_ONCE
    peaks = loop(build, whole, peaks, lambda i, x: find(build.mul(i, I64(AT_ONCE)), AT_ONCE, x))
    done = build.mul(whole, I64(AT_ONCE))
    rest = build.sub(count, done)
    peaks = loop(build, rest, peaks, lambda i, x: find(build.add(done, i), 1, x))
    while len(peaks) > 1:
        peaks = [larger(build, x, y) for x, y in zip(peaks[::2], peaks[1::2], strict=True)]
    return reduce_lanes(build, peaks[0], lambda x, y: larger(build, x, y))


def _power_of_two(build: Any, x: Any) -> Any:
    """2ˣ, x no more than a little above 0, to 1e-4: 2ⁿ × a polynomial of the rest, |r| ≤ 1/2."""
    rint = declare(build, f"llvm.rint.v{WIDTH}f32", VECTOR, VECTOR)
    n = build.call(rint, [x])
    r = build.fsub(x, n)
    p = splat(build, F32(0.05517132))
    for coefficient in (0.24261054, 0.69326099, 0.99992811):
        p = fma(build, p, r, splat(build, F32(coefficient)))
    scalef = declare(
        build, "llvm.x86.avx512.mask.scalef.ps.512", VECTOR, VECTOR, VECTOR, VECTOR,
        ir.IntType(16), I32,
    )  # fmt: skip
    return build.call(scalef, [p, n, zeros(), ir.IntType(16)(-1), I32(4)])
