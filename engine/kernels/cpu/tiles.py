"""A tile of a matrix product, [rows, K] × [K, 16]: all the matrix arithmetic there is.

With AVX2, up to six rows times two vectors of columns are summed at once: with the two vectors of
the right side and one number of the left they fill 15 of the 16 registers, and keep both
multiply-add units busy (after Goto and van de Geijn 2008). With AVX-512 it is one vector of columns
and more rows, whose numbers the instructions take from memory.
"""

import platform
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from engine.kernels.cpu.emit import (
    FLOAT32,
    I32,
    I64,
    INTEGERS,
    ITEM_BYTES,
    NUM_VECTORS,
    PANEL,
    SHORTS,
    VECTOR,
    VECTOR_BYTES,
    WIDTH,
    branch,
    declare,
    fma,
    lane_numbers,
    load,
    load_one,
    loop,
    prefetch,
    row_address,
    splat,
    store,
    zeros,
)

MAX_ROWS = 6 if WIDTH == 8 else 12
UNROLL = 4


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
    ahead: Any,  # address of what will be read next: it is fetched meanwhile
    pace: Any,  # bytes of that for each row of B
    k: Any,
    rows: Any,  # 1 to MAX_ROWS
    kind: Any,  # FLOAT32, FLOAT16 or BFLOAT16
) -> Any:
    """C = A × B + start, each sum in the order of k, by fused multiply-adds in float32."""
    return _by_rows_and_kind(13, _tile_function)


def _tile_function(module: Any, num_rows: int, stored: int) -> Any:
    name = f"tokenmill_tile_{num_rows}_{stored}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 11), name)
    function.linkage = "internal"
    build = ir.IRBuilder(function.append_basic_block())
    a, lda, b, ldb, c, ldc, start, lds, ahead, pace, k = function.args
    left = [row_address(build, a, lda, i) for i in range(num_rows)]
    step = build.mul(ldb, I64(ITEM_BYTES[stored]))
    parts = [(i, part) for i in range(num_rows) for part in range(NUM_VECTORS)]
    state = [I64(0), b, ahead, *_start(build, start, lds, parts)]
    sums = _sum_up(build, left, step, pace, k, state, stored)[3:]
    _store_sums(build, sums, c, ldc, parts)
    build.ret_void()
    return function


def _sum_up(
    build: Any, left: list[Any], step: Any, pace: Any, k: Any, state: list[Any], stored: int
) -> list[Any]:
    """Go through k rows of B, `step` bytes from one to the next.

    The state: bytes into the rows of A, addresses in B and of what is fetched, the sums.
    """

    def multiply(num_each: int, state: list[Any]) -> list[Any]:
        offset_in_a, row_of_b, ahead, *sums = state
        for _ in range(num_each):
            prefetch(build, ahead)
            columns = [
                load(build, build.add(row_of_b, I64(part * WIDTH * ITEM_BYTES[stored])), stored)
                for part in range(NUM_VECTORS)
            ]
            for i, row_of_a in enumerate(left):
                number = splat(build, load_one(build, build.add(row_of_a, offset_in_a)))
                for part in range(NUM_VECTORS):
                    n = NUM_VECTORS * i + part
                    sums[n] = fma(build, number, columns[part], sums[n])
            offset_in_a = build.add(offset_in_a, I64(4))
            row_of_b, ahead = build.add(row_of_b, step), build.add(ahead, pace)
        return [offset_in_a, row_of_b, ahead, *sums]

    unrolled = build.sdiv(k, I64(UNROLL))
    state = loop(build, unrolled, state, lambda _index, x: multiply(UNROLL, x))
    return loop(build, build.srem(k, I64(UNROLL)), state, lambda _index, x: multiply(1, x))


def _store_sums(
    build: Any, sums: list[Any], c: Any, ldc: Any, parts: list[tuple[int, int]]
) -> None:
    for (i, part), total in zip(parts, sums, strict=True):
        store(build, total, build.add(row_address(build, c, ldc, i), I64(VECTOR_BYTES * part)))


@intrinsic
def tile_over(
    context: Any,
    a: Any,  # address of A, float32 [rows, k]
    lda: Any,  # floats from one row of A to the next
    panels: Any,  # address of int64: where each 16 rows of B lie, and what to fetch beyond the last
    offset: Any,  # bytes from there to the columns that are wanted
    ldb: Any,  # numbers from one row of B to the next
    c: Any,  # address of C, float32 [rows, 16], changed
    ldc: Any,  # floats from one row of C to the next
    ahead: Any,  # panels from the one that is read to the one that is fetched
    k: Any,
    rows: Any,  # 1 to MAX_ROWS
    kind: Any,  # FLOAT32, FLOAT16 or BFLOAT16
) -> Any:
    """C = A × B as `tile` computes it, of a B that lies in pieces."""
    return _by_rows_and_kind(11, _tile_over_function)


def _tile_over_function(module: Any, num_rows: int, stored: int) -> Any:
    name = f"tokenmill_tile_over_{num_rows}_{stored}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 9), name)
    function.linkage = "internal"
    build = ir.IRBuilder(function.append_basic_block())
    a, lda, panels, offset, ldb, c, ldc, ahead, k = function.args
    left = [row_address(build, a, lda, i) for i in range(num_rows)]
    step = build.mul(ldb, I64(ITEM_BYTES[stored]))
    parts = [(i, part) for i in range(num_rows) for part in range(NUM_VECTORS)]

    def panel_at(index: Any) -> Any:
        address = build.add(panels, build.mul(index, I64(8)))
        return build.add(build.load(build.inttoptr(address, I64.as_pointer())), offset)

    def one_panel(index: Any, count: Any, state: list[Any]) -> list[Any]:
        offset_in_a, *sums = state
        begin = [offset_in_a, panel_at(index), panel_at(build.add(index, ahead)), *sums]
        offset_in_a, _, _, *sums = _sum_up(build, left, step, step, count, begin, stored)
        return [offset_in_a, *sums]

    whole = build.sdiv(k, I64(PANEL))
    state = [I64(0), *[zeros()] * len(parts)]
    state = loop(build, whole, state, lambda index, x: one_panel(index, I64(PANEL), x))
    state = one_panel(whole, build.srem(k, I64(PANEL)), state)
    _store_sums(build, state[1:], c, ldc, parts)
    build.ret_void()
    return function


def _by_rows_and_kind(num_arguments: int, function_of: Any) -> tuple[Any, Any]:
    """A signature of so many int64, the last two rows and kind, and the call of their function."""
    signature = types.void(*(types.int64,) * num_arguments)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        *arguments, rows, kind = args
        after = build.append_basic_block()
        choice = build.add(build.mul(kind, I64(MAX_ROWS + 1)), rows)
        switch = build.switch(choice, after)
        for stored in ITEM_BYTES:
            for num_rows in range(1, MAX_ROWS + 1):
                block = build.append_basic_block()
                switch.add_case(I64(stored * (MAX_ROWS + 1) + num_rows), block)
                build.position_at_end(block)
                build.call(function_of(build.module, num_rows, stored), arguments)
                build.branch(after)
        build.position_at_end(after)
        return _context.get_dummy_value()

    return signature, emit


def _start(build: Any, start: Any, lds: Any, parts: list[tuple[int, int]]) -> list[Any]:
    """What a tile's products are added to: a vector for each part of each row."""

    def given() -> list[Any]:
        rows = [row_address(build, start, lds, i) for i, _ in parts]
        offsets = [I64(VECTOR_BYTES * part) for _, part in parts]
        return [
            load(build, build.add(row, offset), FLOAT32)
            for row, offset in zip(rows, offsets, strict=True)
        ]

    is_given = build.icmp_signed("!=", start, I64(0))
    return branch(build, is_given, [zeros()] * len(parts), given)


@intrinsic
def tile_int8(
    context: Any,
    a: Any,  # address of A: of each row its scale, float32, then k int16
    lda: Any,  # floats' worth from one row of A to the next
    b: Any,  # address of B: 16 scales, float32, then int8 [k / 2, 16, 2]
    c: Any,  # address of C, float32 [rows, 16], changed
    ldc: Any,  # floats from one row of C to the next
    start: Any,  # as of `tile`
    lds: Any,
    ahead: Any,  # as of `tile`
    pace: Any,  # bytes of that for each pair of B's rows
    k: Any,  # even
    rows: Any,  # 1 to MAX_ROWS
) -> Any:
    """C = A × B + start, of integers: exact until the sums, int32, are scaled."""
    signature = types.void(*(types.int64,) * 11)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        *arguments, rows = args
        after = build.append_basic_block()
        switch = build.switch(rows, after)
        for num_rows in range(1, MAX_ROWS + 1):
            block = build.append_basic_block()
            switch.add_case(I64(num_rows), block)
            build.position_at_end(block)
            build.call(_tile_int8_function(build.module, num_rows), arguments)
            build.branch(after)
        build.position_at_end(after)
        return _context.get_dummy_value()

    return signature, emit


def _tile_int8_function(module: Any, num_rows: int) -> Any:
    name = f"tokenmill_tile_int8_{num_rows}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 10), name)
    function.linkage = "internal"
    build = ir.IRBuilder(function.append_basic_block())
    a, lda, b, c, ldc, start, lds, ahead, pace, k = function.args
    rows_of_a = [row_address(build, a, lda, i) for i in range(num_rows)]
    parts = [(i, part) for i in range(num_rows) for part in range(NUM_VECTORS)]
    no_sum = ir.Constant(INTEGERS, [0] * WIDTH)

    def multiply(num_each: int, state: list[Any]) -> list[Any]:
        offset_in_a, pairs_of_b, ahead, *sums = state
        for _ in range(num_each):
            prefetch(build, ahead)
            columns = [
                _load_int8(build, build.add(pairs_of_b, I64(part * 2 * WIDTH)))
                for part in range(NUM_VECTORS)
            ]
            for i in range(num_rows):
                address = build.add(rows_of_a[i], offset_in_a)
                pair = build.load(build.inttoptr(address, I32.as_pointer()))
                pair.align = 4
                numbers = build.bitcast(splat(build, pair), SHORTS)
                for part in range(NUM_VECTORS):
                    n = NUM_VECTORS * i + part
                    product = _multiply_pairs(build, numbers, columns[part])
                    sums[n] = build.add(sums[n], product)
            offset_in_a = build.add(offset_in_a, I64(4))
            pairs_of_b = build.add(pairs_of_b, I64(2 * PANEL))
            ahead = build.add(ahead, pace)
        return [offset_in_a, pairs_of_b, ahead, *sums]

    num_pairs = build.sdiv(k, I64(2))
    state = [I64(4), build.add(b, I64(4 * PANEL)), ahead, *[no_sum] * len(parts)]
    unrolled = build.sdiv(num_pairs, I64(UNROLL))
    state = loop(build, unrolled, state, lambda _index, x: multiply(UNROLL, x))
    rest = build.srem(num_pairs, I64(UNROLL))
    state = loop(build, rest, state, lambda _index, x: multiply(1, x))

    before = _start(build, start, lds, parts)
    scales = [
        load(build, build.add(b, I64(VECTOR_BYTES * part)), FLOAT32) for part in range(NUM_VECTORS)
    ]
    for n, (i, part) in enumerate(parts):
        scale = build.fmul(splat(build, load_one(build, rows_of_a[i])), scales[part])
        total = fma(build, build.sitofp(state[3 + n], VECTOR), scale, before[n])
        store(build, total, build.add(row_address(build, c, ldc, i), I64(VECTOR_BYTES * part)))
    build.ret_void()
    return function


def _load_int8(build: Any, address: Any) -> Any:
    """Pairs of int8 for each lane, as int16."""
    bytes_type = ir.VectorType(ir.IntType(8), 2 * WIDTH)
    loaded = build.load(build.inttoptr(address, bytes_type.as_pointer()))
    loaded.align = 1
    return build.sext(loaded, SHORTS)


def _multiply_pairs(build: Any, x: Any, y: Any) -> Any:
    """x[2i] × y[2i] + x[2i + 1] × y[2i + 1], int16 to int32."""
    if platform.machine() in ("x86_64", "AMD64"):
        name = "llvm.x86.avx2.pmadd.wd" if WIDTH == 8 else "llvm.x86.avx512.pmaddw.d.512"
        return build.call(declare(build, name, INTEGERS, SHORTS, SHORTS), [x, y])
    wide = ir.VectorType(I32, 2 * WIDTH)
    product = build.mul(build.sext(x, wide), build.sext(y, wide))
    none = ir.Constant(wide, ir.Undefined)
    even, odd = (
        build.shuffle_vector(product, none, lane_numbers(list(range(first, 2 * WIDTH, 2))))
        for first in (0, 1)
    )
    return build.add(even, odd)
