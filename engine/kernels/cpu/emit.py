"""What the vector kernels are written with: LLVM's instructions, loops and branches, by name.

Each function adds instructions where a builder stands and returns the value they make.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

from engine.kernels.cpu.machine import FEATURES

binding.initialize_native_asmparser()  # for instructions as text

# lanes: of AVX-512's registers where it is whole, of AVX2's elsewhere; for machines with less,
# LLVM cuts the vectors up
WIDTH = 16 if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= FEATURES else 8
VECTOR_BYTES = 4 * WIDTH
PANEL = 16  # columns of a tile
NUM_VECTORS = PANEL // WIDTH  # of a tile's row

# how numbers are stored; those in 8 bits have their scales beside them
FLOAT32, FLOAT16, BFLOAT16, INT8 = 0, 1, 2, 3
# two rows of a panel side by side, which are multiplied as such: of bfloat16, of integers
PAIRS, INT16 = 4, 5
ITEM_BYTES = {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2, INT8: 1, PAIRS: 4, INT16: 2}

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(F32, WIDTH)
INTEGERS = ir.VectorType(I32, WIDTH)
LONGS = ir.VectorType(I64, WIDTH)
SHORTS = ir.VectorType(ir.IntType(16), 2 * WIDTH)


def zeros() -> Any:
    return ir.Constant(VECTOR, [0.0] * WIDTH)


def row_address(build: Any, address: Any, stride: Any, index: int) -> Any:
    return build.add(address, build.mul(stride, I64(4 * index)))


def room(build: Any, num_bytes: int) -> Any:
    """The address of memory of the function's own, aligned to a line; not cleared."""
    memory = build.alloca(ir.IntType(8), size=I32(num_bytes))
    memory.align = 64
    return build.ptrtoint(memory, I64)


def load_one(build: Any, address: Any) -> Any:
    loaded = build.load(build.inttoptr(address, F32.as_pointer()))
    loaded.align = 4
    return loaded


def load_integers(build: Any, address: Any, kind: Any) -> Any:
    """Four bytes, or four for each lane, as they are; `kind` is I32 or INTEGERS."""
    loaded = build.load(build.inttoptr(address, kind.as_pointer()))
    loaded.align = 4
    return loaded


def store_one(build: Any, x: Any, address: Any) -> None:
    build.store(x, build.inttoptr(address, F32.as_pointer())).align = 4


def store(build: Any, vector: Any, address: Any) -> None:
    build.store(vector, build.inttoptr(address, VECTOR.as_pointer())).align = 4


def load(build: Any, address: Any, kind: int) -> Any:
    return load_stored(build, address, kind, WIDTH)


def load_stored(build: Any, address: Any, kind: int, width: int | None) -> Any:
    """A stored number, or a vector of them, as float32; one in 8 bits without its scale."""

    def of(element: Any) -> Any:
        return element if width is None else ir.VectorType(element, width)

    stored = {
        FLOAT32: F32, FLOAT16: ir.HalfType(), BFLOAT16: ir.IntType(16), INT8: ir.IntType(8),
        INT16: ir.IntType(16),
    }[kind]  # fmt: skip
    loaded = build.load(build.inttoptr(address, of(stored).as_pointer()))
    loaded.align = ITEM_BYTES[kind]
    if kind == FLOAT32:
        return loaded
    if kind == FLOAT16:
        return build.fpext(loaded, of(F32))
    if kind in (INT8, INT16):
        return build.sitofp(loaded, of(F32))
    sixteen = I32(16) if width is None else ir.Constant(of(I32), [16] * width)
    return build.bitcast(build.shl(build.zext(loaded, of(I32)), sixteen), of(F32))


def prefetch(build: Any, address: Any) -> None:
    """Have the line at an address, which may be anywhere, brought into the cache."""
    byte = ir.IntType(8).as_pointer()
    function = declare(build, "llvm.prefetch.p0", ir.VoidType(), byte, I32, I32, I32)
    build.call(function, [build.inttoptr(address, byte), I32(0), I32(3), I32(1)])


def splat(build: Any, x: Any) -> Any:
    kind = ir.VectorType(x.type, WIDTH)
    one = build.insert_element(ir.Constant(kind, ir.Undefined), x, I32(0))
    return build.shuffle_vector(one, ir.Constant(kind, ir.Undefined), lane_numbers([0] * WIDTH))


def lane_numbers(indices: list[int]) -> Any:
    return ir.Constant(ir.VectorType(I32, len(indices)), indices)


def declare(build: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, list(arguments))
    return cgutils.get_or_insert_function(build.module, kind, name)


def fma(build: Any, x: Any, y: Any, z: Any) -> Any:
    fma = declare(build, f"llvm.fma.v{WIDTH}f32", VECTOR, VECTOR, VECTOR, VECTOR)
    return build.call(fma, [x, y, z])


def larger(build: Any, x: Any, y: Any) -> Any:
    return build.select(build.fcmp_ordered(">", x, y), x, y)


def reduce_lanes(build: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Half of the lanes with the other half, and so on; `combine` takes vectors of any width."""
    none = ir.Constant(vector.type, ir.Undefined)
    width = WIDTH
    while width > 1:
        width //= 2
        low, high = (
            build.shuffle_vector(vector, none, lane_numbers(list(range(first, first + width))))
            for first in (0, width)
        )
        vector = combine(low, high)
        none = ir.Constant(vector.type, ir.Undefined)
    return build.extract_element(vector, I32(0))


def exponential(build: Any, x: Any) -> Any:
    """exp(x) to 2 ulp: 2ⁿ × exp(r), |r| ≤ ln 2 / 2, by Cephes' polynomial (Moshier 1989)."""

    def constant(number: float) -> Any:
        return splat(build, F32(number))

    low, high = constant(-87.3), constant(88.3)
    # a NaN stays one: the comparisons are false for it, and x is what remains
    x = build.select(build.fcmp_ordered("<", x, low), low, x)
    x = build.select(build.fcmp_ordered(">", x, high), high, x)
    rint = declare(build, f"llvm.rint.v{WIDTH}f32", VECTOR, VECTOR)
    n = build.call(rint, [build.fmul(x, constant(1.44269504088896341))])
    r = fma(build, n, constant(-0.693359375), x)
    r = fma(build, n, constant(2.12194440e-4), r)
    p = constant(1.9875691500e-4)
    for coefficient in (
        1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
    ):  # fmt: skip
        p = fma(build, p, r, constant(coefficient))
    p = fma(build, p, build.fmul(r, r), build.fadd(r, constant(1.0)))
    exponent = build.add(build.fptosi(n, INTEGERS), splat(build, I32(127)))
    power = build.bitcast(build.shl(exponent, splat(build, I32(23))), VECTOR)
    return build.fmul(p, power)


def cap_softly(build: Any, score: Any, cap: Any) -> Any:
    """cap × tanh(score / cap), tanh(x) = 1 - 2 / (exp(2x) + 1)."""
    one, two = splat(build, F32(1.0)), splat(build, F32(2.0))
    power = exponential(build, build.fmul(two, build.fdiv(score, cap)))
    return build.fmul(cap, build.fsub(one, build.fdiv(two, build.fadd(power, one))))


def loop(
    build: Any,
    count: Any,  # int64
    state: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],  # (index, state) -> state
) -> list[Any]:
    """Run the body `count` times; returns the last state."""
    before = build.block
    head, inside, after = (build.append_basic_block() for _ in range(3))
    build.branch(head)
    build.position_at_end(head)
    index = build.phi(I64)
    index.add_incoming(I64(0), before)
    held = [build.phi(x.type) for x in state]
    for phi, x in zip(held, state, strict=True):
        phi.add_incoming(x, before)
    build.cbranch(build.icmp_signed("<", index, count), inside, after)
    build.position_at_end(inside)
    made = body(index, list(held))
    index.add_incoming(build.add(index, I64(1)), build.block)
    for phi, x in zip(held, made, strict=True):
        phi.add_incoming(x, build.block)
    build.branch(head)
    build.position_at_end(after)
    return list(held)


def branch(
    build: Any, condition: Any, otherwise: list[Any], then: Callable[[], list[Any]]
) -> list[Any]:
    before = build.block
    inside, after = build.append_basic_block(), build.append_basic_block()
    build.cbranch(condition, inside, after)
    build.position_at_end(inside)
    made = then()
    end = build.block
    build.branch(after)
    build.position_at_end(after)
    joined = []
    for x, y in zip(otherwise, made, strict=True):
        phi = build.phi(x.type)
        phi.add_incoming(x, before)
        phi.add_incoming(y, end)
        joined.append(phi)
    return joined
