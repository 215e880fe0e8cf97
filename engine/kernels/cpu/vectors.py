"""The inner loops, in LLVM's vectors: what a compiler is not trusted to find by itself.

Each intrinsic takes addresses (int64, in bytes) and numbers, and becomes straight vector code in
the kernel that calls it. Eight lanes fill a register of AVX2; LLVM cuts them to what a machine has.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

WIDTH = 8  # lanes
PANEL = 16  # columns of a tile: two vectors
MAX_ROWS = 6  # of a tile: 6 × 2 sums, 2 columns and 1 number fill 15 of AVX2's 16 registers

# how numbers are stored
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
ITEM_BYTES = {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2}

NOTHING = -3.0e38  # a score that no key has: what the softmax leaves out

_UNROLL = 4

_i32, _i64, _f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_vector = ir.VectorType(_f32, WIDTH)
_integers = ir.VectorType(_i32, WIDTH)


@intrinsic
def tile(
    context: Any,
    a: Any,  # address of A, float32 [rows, k]
    lda: Any,  # floats from one row of A to the next
    b: Any,  # address of B, [k, 16] stored as `kind` says
    ldb: Any,  # numbers from one row of B to the next
    c: Any,  # address of C, float32 [rows, 16], changed
    ldc: Any,  # floats from one row of C to the next
    start: Any,  # address of what is added, float32 [rows, 16]: C itself, a bias; 0: nothing
    lds: Any,  # floats from one row of that to the next; 0: the same for all
    k: Any,
    rows: Any,  # 1 to MAX_ROWS
    kind: Any,  # FLOAT32, FLOAT16 or BFLOAT16
) -> Any:
    """C = A × B + start, each sum in the order of k, by fused multiply-adds in float32."""
    signature = types.void(*(types.int64,) * 11)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        *arguments, rows, kind = args
        after = build.append_basic_block()
        choice = build.add(build.mul(kind, _i64(MAX_ROWS + 1)), rows)
        switch = build.switch(choice, after)
        for stored in ITEM_BYTES:
            for num_rows in range(1, MAX_ROWS + 1):
                block = build.append_basic_block()
                switch.add_case(_i64(stored * (MAX_ROWS + 1) + num_rows), block)
                build.position_at_end(block)
                build.call(_tile_function(build.module, num_rows, stored), arguments)
                build.branch(after)
        build.position_at_end(after)
        return _context.get_dummy_value()

    return signature, emit


def _tile_function(module: Any, num_rows: int, stored: int) -> Any:
    name = f"tokenmill_tile_{num_rows}_{stored}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_i64] * 9), name)
    function.linkage = "internal"
    build = ir.IRBuilder(function.append_basic_block())
    a, lda, b, ldb, c, ldc, start, lds, k = function.args
    rows_of_a = [_row(build, a, lda, i) for i in range(num_rows)]
    halves = [(i, half) for i in range(num_rows) for half in range(2)]
    item = ITEM_BYTES[stored]

    def started() -> list[Any]:
        rows = [_row(build, start, lds, i) for i in range(num_rows)]
        return [_load(build, build.add(rows[i], _i64(32 * half)), FLOAT32) for i, half in halves]

    def multiply(num_each: int, state: list[Any]) -> list[Any]:
        offset_in_a, row_of_b, *sums = state
        for _ in range(num_each):
            columns = [
                _load(build, build.add(row_of_b, _i64(half * WIDTH * item)), stored)
                for half in range(2)
            ]
            for i in range(num_rows):
                number = _splat(build, _load_float(build, build.add(rows_of_a[i], offset_in_a)))
                for half in range(2):
                    n = 2 * i + half
                    sums[n] = _fma(build, number, columns[half], sums[n])
            offset_in_a = build.add(offset_in_a, _i64(4))
            row_of_b = build.add(row_of_b, build.mul(ldb, _i64(item)))
        return [offset_in_a, row_of_b, *sums]

    given = build.icmp_signed("!=", start, _i64(0))
    state = [_i64(0), b, *_if(build, given, [_zeros()] * len(halves), started)]
    unrolled = build.sdiv(k, _i64(_UNROLL))
    state = _loop(build, unrolled, state, lambda _index, x: multiply(_UNROLL, x))
    rest = build.srem(k, _i64(_UNROLL))
    state = _loop(build, rest, state, lambda _index, x: multiply(1, x))
    for (i, half), total in zip(halves, state[2:], strict=True):
        _store(build, total, build.add(_row(build, c, ldc, i), _i64(32 * half)))
    build.ret_void()
    return function


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
        lanes = ir.Constant(_integers, list(range(WIDTH)))
        low, high = (_splat(build, build.trunc(x, _i32)) for x in (first, end))
        wide_scale, wide_cap = _splat(build, scale), _splat(build, softcap)
        nothing = _splat(build, _f32(NOTHING))
        capped = build.fcmp_ordered("!=", softcap, _f32(0.0))
        two_vectors = build.mul(num_panels, _i64(2))

        def find_peak(index: Any, state: list[Any]) -> list[Any]:
            address = build.add(scores, build.mul(index, _i64(32)))
            score = build.fmul(_load(build, address, FLOAT32), wide_scale)
            [score] = _if(build, capped, [score], lambda: [_softcap(build, score, wide_cap)])
            place = build.add(
                lanes, _splat(build, build.trunc(build.mul(index, _i64(WIDTH)), _i32))
            )
            seen = build.and_(
                build.icmp_signed(">=", place, low), build.icmp_signed("<", place, high)
            )
            score = build.select(seen, score, nothing)
            _store(build, score, address)
            return [_max(build, state[0], score)]

        [peaks] = _loop(build, two_vectors, [nothing], find_peak)
        peak = _reduce(build, peaks, lambda x, y: _max_float(build, x, y))
        wide_peak = _splat(build, peak)

        def exponentiate(index: Any, state: list[Any]) -> list[Any]:
            address = build.add(scores, build.mul(index, _i64(32)))
            score = _load(build, address, FLOAT32)
            power = _exp(build, build.fsub(score, wide_peak))
            seen = build.fcmp_unordered("!=", score, nothing)  # a NaN has been seen
            power = build.select(seen, power, _zeros())
            _store(build, power, address)
            return [build.fadd(state[0], power)]

        [sums] = _loop(build, two_vectors, [_zeros()], exponentiate)
        total = _reduce(build, sums, build.fadd)
        _store_float(build, peak, result)
        _store_float(build, total, build.add(result, _i64(4)))
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
        ones = _splat(build, _f32(1.0))
        for half in range(2):
            at = [build.add(x, _i64(32 * half)) for x in (gate, up, out)]
            x = _load(build, at[0], FLOAT32)
            power = _exp(build, build.fneg(x))
            sigmoid = build.fdiv(x, build.fadd(ones, power))
            _store(build, build.fmul(sigmoid, _load(build, at[1], FLOAT32)), at[2])
        return _context.get_dummy_value()

    return signature, emit


@intrinsic
def exp_float(context: Any, x: Any) -> Any:
    """exp(x) by the polynomial of the vectors, so that both agree."""
    signature = types.float32(types.float32)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        return build.extract_element(_exp(build, _splat(build, args[0])), _i32(0))

    return signature, emit


@intrinsic
def fetch_add(context: Any, address: Any, amount: Any) -> Any:
    """Add to an int64 that threads share; returns what it was."""
    signature = types.int64(types.int64, types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        pointer = build.inttoptr(args[0], _i64.as_pointer())
        return build.atomic_rmw("add", pointer, args[1], "monotonic")

    return signature, emit


@intrinsic
def load_float(context: Any, address: Any) -> Any:
    """The float32 at an address."""
    signature = types.float32(types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        return _load_float(build, args[0])

    return signature, emit


@intrinsic(prefer_literal=True)
def load_number(context: Any, address: Any, kind: Any) -> Any:
    """The number at an address, stored as `kind` (literal) says, as float32."""
    stored = kind.literal_value
    signature = types.float32(types.int64, kind)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        return _widen(build, args[0], stored, None)

    return signature, emit


@intrinsic(prefer_literal=True)
def store_number(context: Any, x: Any, address: Any, kind: Any) -> Any:
    """Store a float32 as `kind` (literal) says, rounded to the nearest, ties to even."""
    stored = kind.literal_value
    signature = types.void(types.float32, types.int64, kind)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        x, address = args[:2]
        if stored == FLOAT32:
            _store_float(build, x, address)
        elif stored == FLOAT16:
            pointer = build.inttoptr(address, ir.HalfType().as_pointer())
            build.store(build.fptrunc(x, ir.HalfType()), pointer).align = 2
        else:
            bits = build.bitcast(x, _i32)
            odd = build.and_(build.lshr(bits, _i32(16)), _i32(1))
            rounded = build.add(build.add(bits, _i32(0x7FFF)), odd)
            # a NaN would be rounded to infinity, or past it
            rounded = build.select(build.fcmp_unordered("uno", x, x), _i32(0x7FC00000), rounded)
            half = build.trunc(build.lshr(rounded, _i32(16)), ir.IntType(16))
            build.store(half, build.inttoptr(address, ir.IntType(16).as_pointer())).align = 2
        return _context.get_dummy_value()

    return signature, emit


# -- what the intrinsics are made of -----------------------------------------------------------


def _zeros() -> Any:
    return ir.Constant(_vector, [0.0] * WIDTH)


def _row(build: Any, address: Any, stride: Any, index: int) -> Any:
    return build.add(address, build.mul(stride, _i64(4 * index)))


def _load_float(build: Any, address: Any) -> Any:
    loaded = build.load(build.inttoptr(address, _f32.as_pointer()))
    loaded.align = 4
    return loaded


def _store_float(build: Any, x: Any, address: Any) -> None:
    build.store(x, build.inttoptr(address, _f32.as_pointer())).align = 4


def _store(build: Any, vector: Any, address: Any) -> None:
    build.store(vector, build.inttoptr(address, _vector.as_pointer())).align = 4


def _load(build: Any, address: Any, kind: int) -> Any:
    return _widen(build, address, kind, WIDTH)


def _widen(build: Any, address: Any, kind: int, width: int | None) -> Any:
    """A stored number, or a vector of them, as float32."""

    def of(element: Any) -> Any:
        return element if width is None else ir.VectorType(element, width)

    stored = {FLOAT32: _f32, FLOAT16: ir.HalfType(), BFLOAT16: ir.IntType(16)}[kind]
    loaded = build.load(build.inttoptr(address, of(stored).as_pointer()))
    loaded.align = ITEM_BYTES[kind]
    if kind == FLOAT32:
        return loaded
    if kind == FLOAT16:
        return build.fpext(loaded, of(_f32))
    sixteen = _i32(16) if width is None else ir.Constant(of(_i32), [16] * width)
    return build.bitcast(build.shl(build.zext(loaded, of(_i32)), sixteen), of(_f32))


def _splat(build: Any, x: Any) -> Any:
    kind = ir.VectorType(x.type, WIDTH)
    one = build.insert_element(ir.Constant(kind, ir.Undefined), x, _i32(0))
    return build.shuffle_vector(one, ir.Constant(kind, ir.Undefined), _lanes([0] * WIDTH))


def _lanes(indices: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_i32, len(indices)), indices)


def _function(build: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, list(arguments))
    return cgutils.get_or_insert_function(build.module, kind, name)


def _fma(build: Any, x: Any, y: Any, z: Any) -> Any:
    fma = _function(build, f"llvm.fma.v{WIDTH}f32", _vector, _vector, _vector, _vector)
    return build.call(fma, [x, y, z])


def _max(build: Any, x: Any, y: Any) -> Any:
    return build.select(build.fcmp_ordered(">", x, y), x, y)


_max_float = _max


def _reduce(build: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    lanes = [build.extract_element(vector, _i32(i)) for i in range(WIDTH)]
    while len(lanes) > 1:
        lanes = [combine(x, y) for x, y in zip(lanes[::2], lanes[1::2], strict=True)]
    return lanes[0]


def _exp(build: Any, x: Any) -> Any:
    """exp(x) to 2 ulp: 2ⁿ × exp(r), |r| ≤ ln 2 / 2, by Cephes' polynomial (Moshier 1989)."""

    def constant(number: float) -> Any:
        return _splat(build, _f32(number))

    low, high = constant(-87.3), constant(88.3)
    # a NaN stays one: the comparisons are false for it, and x is what remains
    x = build.select(build.fcmp_ordered("<", x, low), low, x)
    x = build.select(build.fcmp_ordered(">", x, high), high, x)
    rint = _function(build, f"llvm.rint.v{WIDTH}f32", _vector, _vector)
    n = build.call(rint, [build.fmul(x, constant(1.44269504088896341))])
    r = _fma(build, n, constant(-0.693359375), x)
    r = _fma(build, n, constant(2.12194440e-4), r)
    p = constant(1.9875691500e-4)
    for coefficient in (
        1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
    ):  # fmt: skip
        p = _fma(build, p, r, constant(coefficient))
    p = _fma(build, p, build.fmul(r, r), build.fadd(r, constant(1.0)))
    exponent = build.add(build.fptosi(n, _integers), _splat(build, _i32(127)))
    power = build.bitcast(build.shl(exponent, _splat(build, _i32(23))), _vector)
    return build.fmul(p, power)


def _softcap(build: Any, score: Any, cap: Any) -> Any:
    """cap × tanh(score / cap), tanh(x) = 1 - 2 / (exp(2x) + 1)."""
    one, two = _splat(build, _f32(1.0)), _splat(build, _f32(2.0))
    power = _exp(build, build.fmul(two, build.fdiv(score, cap)))
    return build.fmul(cap, build.fsub(one, build.fdiv(two, build.fadd(power, one))))


def _loop(
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
    index = build.phi(_i64)
    index.add_incoming(_i64(0), before)
    held = [build.phi(x.type) for x in state]
    for phi, x in zip(held, state, strict=True):
        phi.add_incoming(x, before)
    build.cbranch(build.icmp_signed("<", index, count), inside, after)
    build.position_at_end(inside)
    made = body(index, list(held))
    index.add_incoming(build.add(index, _i64(1)), build.block)
    for phi, x in zip(held, made, strict=True):
        phi.add_incoming(x, build.block)
    build.branch(head)
    build.position_at_end(after)
    return list(held)


def _if(
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
