"""A tile of a matrix product, [rows, K] × [K, 16 × panels]: all the float arithmetic there is.

With AVX2, up to six rows times the two vectors of a panel are summed at once: with the vectors of
the right side and one number of the left they fill 15 of the 16 registers, and keep both
multiply-add units busy (after Goto and van de Geijn 2008). With AVX-512 a panel is one vector, and
two of them times twelve rows, or four times six, leave 8 of the 32 registers.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from engine.kernels.cpu.emit import (
    FLOAT32,
    I64,
    ITEM_BYTES,
    NUM_VECTORS,
    PAIRS,
    PANEL,
    VECTOR_BYTES,
    WIDTH,
    branch,
    fma,
    load,
    load_one,
    loop,
    prefetch,
    row_address,
    splat,
    store,
    zeros,
)
from engine.kernels.cpu.pairs import add_products, load_pair, load_pairs

MAX_ROWS = 6 if WIDTH == 8 else 12
MAX_PANELS = 1 if WIDTH == 8 else 2  # of a tile of so many rows
MAX_PANELS_FEW = 1 if WIDTH == 8 else 4  # of `tile_over`, of no more than FEW_ROWS
FEW_ROWS = 6
STRETCH = 288  # so many products are summed before they are added to the sum of those before
MANY_SUMS = 12  # so many are added to in each step that the loop itself costs little


@intrinsic(prefer_literal=True)
def tile(
    context: Any,
    a: Any,  # address of A, float32 [rows, k]
    lda: Any,  # floats from one row of A to the next
    b: Any,  # address of B's first panel, [k, 16] stored as `kind` says
    b_apart: Any,  # bytes from there to the second panel
    ldb: Any,  # numbers from one row of B to the next
    c: Any,  # address of C, float32 [rows, 16 × panels], changed
    ldc: Any,  # floats from one row of C to the next
    start: Any,  # address of what is added, float32 like C: C itself, a bias; 0: nothing
    start_apart: Any,  # bytes from the first panel's to the second's
    lds: Any,  # floats from one row of that to the next; 0: the same for all
    ahead: Any,  # address of what will be read next: it is fetched meanwhile
    ahead_apart: Any,  # bytes from the first panel's to the second's
    pace: Any,  # bytes of each for each row of B
    k: Any,
    rows: Any,  # 1 to MAX_ROWS
    panels: Any,  # 1 to MAX_PANELS
    kind: Any,  # literal: FLOAT32, FLOAT16, BFLOAT16 or INT8
) -> Any:
    """C = start + A × B, each sum in the order of k, by fused multiply-adds in float32."""
    return by_variant(16, rows_and_panels(MAX_PANELS), _tile_function, kind)


def _tile_function(module: Any, num_rows: int, num_panels: int, stored: int) -> Any:
    def fill(build: Any, args: Any) -> None:
        a, lda, b, b_apart, ldb, c, ldc, start, start_apart, lds, ahead, ahead_apart, pace, k = args
        left = [row_address(build, a, lda, i) for i in range(num_rows)]
        step = build.mul(ldb, I64(ITEM_BYTES[stored]))
        sums = starting_sums(build, start, start_apart, lds, num_rows, num_panels)
        state = [
            I64(0),
            *panel_addresses(build, b, b_apart, num_panels),
            *panel_addresses(build, ahead, ahead_apart, num_panels),
            *sums,
        ]
        state = _sum_up(build, left, step, pace, k, state, num_panels, stored)
        store_sums(build, state[1 + 2 * num_panels :], c, ldc, num_rows, num_panels)

    return internal_function(module, f"tile_{num_rows}_{num_panels}_{stored}", 14, fill)


@intrinsic(prefer_literal=True)
def tile_by_stretches(
    context: Any,
    a: Any,  # these and all that follow as of `tile`
    lda: Any,
    b: Any,
    b_apart: Any,
    ldb: Any,
    c: Any,
    ldc: Any,
    start: Any,
    start_apart: Any,
    lds: Any,
    ahead: Any,
    ahead_apart: Any,
    pace: Any,
    k: Any,
    rows: Any,
    panels: Any,
    kind: Any,
) -> Any:
    """C = A × B + start, of long sums, whose rounding errors are kept small.

    Products are summed by stretches, and these are added up; what they are added to comes last,
    for each addition to a large number loses what is small.
    """
    return by_variant(16, rows_and_panels(MAX_PANELS), _tile_by_stretches_function, kind)


def _tile_by_stretches_function(module: Any, num_rows: int, num_panels: int, stored: int) -> Any:
    def fill(build: Any, args: Any) -> None:
        a, lda, b, b_apart, ldb, c, ldc, start, start_apart, lds, ahead, ahead_apart, pace, k = args
        left = [row_address(build, a, lda, i) for i in range(num_rows)]
        step = build.mul(ldb, I64(ITEM_BYTES[stored]))
        nothing = [zeros()] * (num_rows * num_panels * NUM_VECTORS)
        places = [
            I64(0),
            *panel_addresses(build, b, b_apart, num_panels),
            *panel_addresses(build, ahead, ahead_apart, num_panels),
        ]

        def one_stretch(index: Any, state: list[Any]) -> list[Any]:
            at, totals = state[: len(places)], state[len(places) :]
            left_over = build.sub(k, build.mul(index, I64(STRETCH)))
            is_last = build.icmp_signed("<", left_over, I64(STRETCH))
            count = build.select(is_last, left_over, I64(STRETCH))
            made = _sum_up(build, left, step, pace, count, [*at, *nothing], num_panels, stored)
            sums = made[len(places) :]
            added = [build.fadd(x, y) for x, y in zip(totals, sums, strict=True)]
            return [*made[: len(places)], *added]

        count = build.sdiv(build.add(k, I64(STRETCH - 1)), I64(STRETCH))
        state = loop(build, count, [*places, *nothing], one_stretch)
        given = starting_sums(build, start, start_apart, lds, num_rows, num_panels)
        sums = [build.fadd(x, y) for x, y in zip(state[len(places) :], given, strict=True)]
        store_sums(build, sums, c, ldc, num_rows, num_panels)

    return internal_function(
        module, f"tile_by_stretches_{num_rows}_{num_panels}_{stored}", 14, fill
    )


def _sum_up(
    build: Any,
    left: list[Any],
    step: Any,
    pace: Any,
    k: Any,
    state: list[Any],
    num_panels: int,
    stored: int,
) -> list[Any]:
    """`sum_up` over k rows of B, stored as the kind says."""

    def columns_at(row: Any) -> list[Any]:
        offsets = [I64(part * WIDTH * ITEM_BYTES[stored]) for part in range(NUM_VECTORS)]
        at = [build.add(row, offset) for offset in offsets]
        return [
            load_pairs(build, each) if stored == PAIRS else load(build, each, stored) for each in at
        ]

    def number_at(address: Any) -> Any:
        if stored == PAIRS:
            return load_pair(build, address)
        return splat(build, load_one(build, address))

    def add(total: Any, number: Any, column: Any) -> Any:
        if stored == PAIRS:
            return add_products(build, total, number, column)
        return fma(build, number, column, total)

    return sum_up(build, left, step, pace, k, state, num_panels, (columns_at, number_at, add))


def sum_up(
    build: Any,
    left: list[Any],  # addresses of the rows of A
    step: Any,
    pace: Any,
    count: Any,
    state: list[Any],
    num_panels: int,
    how: tuple[Callable[[Any], list[Any]], Callable[[Any], Any], Callable[[Any, Any, Any], Any]],
    at_once: int = 2,  # steps of the loop's body, where many sums are added to
) -> list[Any]:
    """Go through `count` steps of A's columns and B's rows; returns the last state.

    The state: bytes into the rows of A, addresses in the panels of B and of what is fetched, the
    sums. A step is 4 bytes of A, `step` of each panel, and `pace` of what is fetched. `how` loads a
    row of a panel, loads a number of A into all lanes, and adds their product to a sum.
    """
    columns_at, number_at, add = how

    def multiply(num_each: int, state: list[Any]) -> list[Any]:
        offset_in_a, rest = state[0], state[1:]
        at, ahead = rest[:num_panels], rest[num_panels : 2 * num_panels]
        sums = rest[2 * num_panels :]
        for _ in range(num_each):
            for address in ahead:
                prefetch(build, address)
            columns = [column for row in at for column in columns_at(row)]
            for i, row_of_a in enumerate(left):
                number = number_at(build.add(row_of_a, offset_in_a))
                for j, column in enumerate(columns):
                    n = len(columns) * i + j
                    sums[n] = add(sums[n], number, column)
            offset_in_a = build.add(offset_in_a, I64(4))
            at = [build.add(address, step) for address in at]
            ahead = [build.add(address, pace) for address in ahead]
        return [offset_in_a, *at, *ahead, *sums]

    num_sums = len(state) - 1 - 2 * num_panels
    if num_sums < MANY_SUMS:
        at_once = 4
    whole, rest = build.sdiv(count, I64(at_once)), build.srem(count, I64(at_once))
    state = loop(build, whole, state, lambda _index, x: multiply(at_once, x))
    return loop(build, rest, state, lambda _index, x: multiply(1, x))


@intrinsic(prefer_literal=True)
def tile_over(
    context: Any,
    a: Any,  # address of A, float32 [rows, k]
    lda: Any,  # floats from one row of A to the next
    pieces: Any,  # address of int64: where each 16 rows of B lie, or 8 of PAIRS, and what to
    # fetch beyond the last
    offset: Any,  # bytes from there to the columns that are wanted
    ldb: Any,  # numbers from one row of B to the next
    c: Any,  # address of C, float32 [rows, 16 × panels], changed
    ldc: Any,  # floats from one row of C to the next
    ahead: Any,  # pieces from the one that is read to the one that is fetched
    k: Any,
    rows: Any,  # 1 to MAX_ROWS
    panels: Any,  # 1 to MAX_PANELS, or MAX_PANELS_FEW of few rows: columns side by side
    kind: Any,  # literal: FLOAT32, FLOAT16, BFLOAT16 or INT8
) -> Any:
    """C = A × B as `tile` computes it, of a B that lies in pieces of 16 rows."""
    return by_variant(11, rows_and_panels(MAX_PANELS_FEW), _tile_over_function, kind)


def _tile_over_function(module: Any, num_rows: int, num_panels: int, stored: int) -> Any:
    apart = I64(PANEL * ITEM_BYTES[stored])
    each = PANEL // 2 if stored == PAIRS else PANEL  # rows of a piece

    def fill(build: Any, args: Any) -> None:
        a, lda, pieces, offset, ldb, c, ldc, ahead, k = args
        left = [row_address(build, a, lda, i) for i in range(num_rows)]
        step = build.mul(ldb, I64(ITEM_BYTES[stored]))

        def columns_at(index: Any) -> list[Any]:
            address = build.add(pieces, build.mul(index, I64(8)))
            piece = build.load(build.inttoptr(address, I64.as_pointer()))
            return panel_addresses(build, build.add(piece, offset), apart, num_panels)

        def one_piece(index: Any, count: Any, state: list[Any]) -> list[Any]:
            offset_in_a, *sums = state
            fetched = columns_at(build.add(index, ahead))
            begin = [offset_in_a, *columns_at(index), *fetched, *sums]
            state = _sum_up(build, left, step, step, count, begin, num_panels, stored)
            return [state[0], *state[1 + 2 * num_panels :]]

        whole = build.sdiv(k, I64(each))
        state = [I64(0), *[zeros()] * (num_rows * num_panels * NUM_VECTORS)]
        state = loop(build, whole, state, lambda index, x: one_piece(index, I64(each), x))
        state = one_piece(whole, build.srem(k, I64(each)), state)
        store_sums(build, state[1:], c, ldc, num_rows, num_panels)

    return internal_function(module, f"tile_over_{num_rows}_{num_panels}_{stored}", 9, fill)


def rows_and_panels(max_panels: int) -> list[tuple[int, int]]:
    """What tiles there are: those whose sums fit into the registers."""
    return [
        (rows, panels)
        for panels in (1, 2, 4)
        if panels <= max_panels
        for rows in range(1, (FEW_ROWS if panels > MAX_PANELS else MAX_ROWS) + 1)
    ]


def by_variant(
    num_arguments: int,
    variants: list[tuple[int, int]],
    function_of: Callable[..., Any],
    *literals: Any,  # types of what follows, known when it is compiled
) -> tuple[Any, Any]:
    """A signature of so many int64, rows and panels the last, and the call of their function."""
    signature = types.void(*(types.int64,) * num_arguments, *literals)
    known = [each.literal_value for each in literals]

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        *arguments, rows, panels = args[:num_arguments]
        after = build.append_basic_block()
        switch = build.switch(build.add(build.mul(panels, I64(16)), rows), after)
        for num_rows, num_panels in variants:
            block = build.append_basic_block()
            switch.add_case(I64(16 * num_panels + num_rows), block)
            build.position_at_end(block)
            build.call(function_of(build.module, num_rows, num_panels, *known), arguments)
            build.branch(after)
        build.position_at_end(after)
        return _context.get_dummy_value()

    return signature, emit


def internal_function(
    module: Any, name: str, num_arguments: int, fill: Callable[[Any, Any], None]
) -> Any:
    """A module's own function of so many int64, filled once."""
    name = f"tokenmill_{name}"
    if name not in module.globals:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * num_arguments), name)
        function.linkage = "internal"
        build = ir.IRBuilder(function.append_basic_block())
        fill(build, function.args)
        build.ret_void()
    return module.globals[name]


def panel_addresses(build: Any, first: Any, apart: Any, num_panels: int) -> list[Any]:
    return [build.add(first, build.mul(apart, I64(j))) for j in range(num_panels)]


def places_in_c(num_rows: int, num_panels: int) -> list[tuple[int, int, int]]:
    """Of each sum: its row, its panel, and its bytes into that."""
    return [
        (i, j, VECTOR_BYTES * part)
        for i in range(num_rows)
        for j in range(num_panels)
        for part in range(NUM_VECTORS)
    ]


def starting_sums(
    build: Any, start: Any, apart: Any, lds: Any, num_rows: int, num_panels: int
) -> list[Any]:
    """What a tile's products are added to."""
    places = places_in_c(num_rows, num_panels)

    def given() -> list[Any]:
        panels = panel_addresses(build, start, apart, num_panels)
        return [
            load(build, build.add(row_address(build, panels[j], lds, i), I64(at)), FLOAT32)
            for i, j, at in places
        ]

    is_given = build.icmp_signed("!=", start, I64(0))
    return branch(build, is_given, [zeros()] * len(places), given)


def store_sums(
    build: Any, sums: list[Any], c: Any, ldc: Any, num_rows: int, num_panels: int
) -> None:
    for (i, j, at), total in zip(places_in_c(num_rows, num_panels), sums, strict=True):
        row = row_address(build, c, ldc, i)
        store(build, total, build.add(row, I64(4 * PANEL * j + at)))
