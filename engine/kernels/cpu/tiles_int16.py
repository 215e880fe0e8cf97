"""A tile of a matrix product of numbers in 16 bits, by groups of 32: see `tiles` and `int16`.

A lane of 32 bits holds two inputs of one output, and VNNI adds both products to a sum of integers.
After a group these join totals in float32, which lie in memory, for the registers are all taken.
"""

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from engine.kernels.cpu.emit import (
    FLOAT32,
    I32,
    I64,
    INTEGERS,
    PANEL,
    VECTOR,
    VECTOR_BYTES,
    WIDTH,
    fma,
    load,
    load_integers,
    load_one,
    loop,
    room,
    row_address,
    splat,
    store,
    zeros,
)
from engine.kernels.cpu.int16 import GROUP_PAIRS
from engine.kernels.cpu.tiles import (
    MAX_PANELS,
    by_variant,
    internal_function,
    panel_addresses,
    rows_and_panels,
    starting_sums,
    store_sums,
    sum_up,
)
from engine.kernels.cpu.tiles_int8 import AT_ONCE


@intrinsic
def tile_int16(
    context: Any,
    a: Any,  # address of A, rows as `int16_row` makes them
    lda: Any,  # floats' worth from one row of A to the next
    b: Any,  # address of B's first panel, as `pack_int16` makes it
    b_apart: Any,  # as of `tile`, as all that follow
    c: Any,
    ldc: Any,
    start: Any,
    start_apart: Any,
    lds: Any,
    ahead: Any,
    ahead_apart: Any,
    pace: Any,  # bytes of each for each pair of A
    groups: Any,
    rows: Any,
    panels: Any,
) -> Any:
    """C = A × B + start; each group's sums, int32, are scaled and added in float32, in order."""
    return by_variant(15, rows_and_panels(MAX_PANELS), _tile_int16_function)


def _tile_int16_function(module: Any, num_rows: int, num_panels: int) -> Any:
    num_sums = num_rows * num_panels

    def fill(build: Any, args: Any) -> None:
        a, lda, b, b_apart, c, ldc, start, start_apart, lds, ahead, ahead_apart, pace, groups = args
        left = [row_address(build, a, lda, i) for i in range(num_rows)]
        right = panel_addresses(build, b, b_apart, num_panels)
        first = room(build, VECTOR_BYTES * num_sums)
        totals = [build.add(first, I64(VECTOR_BYTES * n)) for n in range(num_sums)]
        for total in totals:
            store(build, zeros(), total)
        numbers_bytes = build.mul(groups, I64(4 * GROUP_PAIRS))
        scales = [build.add(row, numbers_bytes) for row in left]
        places = [I64(0), *right, *panel_addresses(build, ahead, ahead_apart, num_panels)]

        def one_group(index: Any, places: list[Any]) -> list[Any]:
            begin = [*places, *[ir.Constant(INTEGERS, [0] * WIDTH)] * num_sums]
            step, count = I64(4 * PANEL), I64(GROUP_PAIRS)
            how = _columns_at(build), _number_at(build), _add(build)
            made = sum_up(build, left, step, pace, count, begin, num_panels, how, AT_ONCE)
            of_group = [build.add(row, build.mul(index, I64(4))) for row in scales]
            of_rows = [splat(build, load_one(build, address)) for address in of_group]
            for n, sums in enumerate(made[len(places) :]):
                before = load(build, totals[n], FLOAT32)
                scale = of_rows[n // num_panels]
                store(build, fma(build, build.sitofp(sums, VECTOR), scale, before), totals[n])
            return made[: len(places)]

        loop(build, groups, places, one_group)
        ends = [build.add(panel, build.mul(numbers_bytes, I64(PANEL))) for panel in right]
        of_panels = [load(build, address, FLOAT32) for address in ends]
        given = starting_sums(build, start, start_apart, lds, num_rows, num_panels)
        sums = []
        for n, total in enumerate(totals):
            scale = of_panels[n % num_panels]
            sums.append(fma(build, load(build, total, FLOAT32), scale, given[n]))
        store_sums(build, sums, c, ldc, num_rows, num_panels)

    return internal_function(module, f"tile_int16_{num_rows}_{num_panels}", 13, fill)


def _columns_at(build: Any) -> Any:
    return lambda address: [load_integers(build, address, INTEGERS)]


def _number_at(build: Any) -> Any:
    """A pair for all lanes."""
    return lambda address: splat(build, load_integers(build, address, I32))


def _add(build: Any) -> Any:
    """The total and the products of each lane's pairs."""
    # LLVM takes its own intrinsic apart, into products and a sum: that is twice the work
    add = ir.InlineAsm(ir.FunctionType(INTEGERS, [INTEGERS] * 3), "vpdpwssd $3, $2, $0", "=v,0,v,v")
    return lambda total, number, column: build.call(add, [total, number, column])
