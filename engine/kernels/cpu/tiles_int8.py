"""A tile of a matrix product of numbers in 8 bits, by groups of 32: see `tiles` and `quantize`.

With AMX see `tiles_amx`. With VNNI four products at a time are added to a sum of 32 bits; its left
numbers have a sign and its right ones none: weights are kept as w + 128, and sums begin with -128
times the left ones' sum.
Elsewhere there are two products of 16 bits at a time. All are exact: the sums are the same.
"""

import platform
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from engine.kernels.cpu.emit import (
    BFLOAT16,
    I32,
    I64,
    INTEGERS,
    NUM_VECTORS,
    PANEL,
    SHORTS,
    VECTOR,
    VECTOR_BYTES,
    WIDTH,
    declare,
    fma,
    lane_numbers,
    load,
    load_integers,
    load_one,
    loop,
    row_address,
    splat,
    zeros,
)
from engine.kernels.cpu.machine import FEATURES, HAS_AMX
from engine.kernels.cpu.tiles import (
    MAX_PANELS,
    by_variant,
    internal_function,
    panel_addresses,
    places_in_c,
    rows_and_panels,
    starting_sums,
    store_sums,
    sum_up,
)

# two steps in the loop's body, with what they fetch, take half as long again on an Emerald Rapids
AT_ONCE = 1
GROUP = 32  # numbers of a row that share a scale
INT8_BY_AMX = WIDTH == 16 and HAS_AMX
_VNNI = WIDTH == 16 and "avx512vnni" in FEATURES
SIDE_BY_SIDE = 4 if _VNNI or INT8_BY_AMX else 2  # inputs that lie together, in 32 bits of A
OFFSET = 128 if _VNNI and not INT8_BY_AMX else 0  # added to each number of B
GROUP_WORDS = 2 + GROUP // SIDE_BY_SIDE  # of A's rows, in 32 bits: scale, first sum, numbers
NUMBERS_BYTES = PANEL * GROUP  # of a group of B's panels
SCALES_BYTES = 2 * PANEL  # of a group, after all groups' numbers
GROUP_BYTES = SCALES_BYTES + NUMBERS_BYTES


@intrinsic
def tile_int8(
    context: Any,
    a: Any,  # address of A, rows as `quantize_row` makes them
    lda: Any,  # floats' worth from one row of A to the next
    b: Any,  # address of B's first panel, as `pack_int8` makes it
    b_apart: Any,  # as of `tile`, as all that follow
    c: Any,
    ldc: Any,
    start: Any,
    start_apart: Any,
    lds: Any,
    ahead: Any,
    ahead_apart: Any,
    pace: Any,  # bytes of each for each 32 bits of A
    groups: Any,
    rows: Any,
    panels: Any,
) -> Any:
    """C = A × B + start; each group's sums, int32, are scaled and added in float32, in order."""
    return by_variant(15, rows_and_panels(MAX_PANELS), _tile_int8_function)


def _tile_int8_function(module: Any, num_rows: int, num_panels: int) -> Any:
    def fill(build: Any, args: Any) -> None:
        a, lda, b, b_apart, c, ldc, start, start_apart, lds, ahead, ahead_apart, pace, groups = args
        left = [row_address(build, a, lda, i) for i in range(num_rows)]
        state = [
            I64(0),
            *panel_addresses(build, b, b_apart, num_panels),
            *panel_addresses(build, ahead, ahead_apart, num_panels),
            *[zeros()] * (num_rows * num_panels * NUM_VECTORS),
        ]

        first_scales = build.mul(groups, I64(NUMBERS_BYTES))
        scales = [build.add(panel, first_scales) for panel in state[1 : 1 + num_panels]]

        def one_group(index: Any, before: list[Any]) -> list[Any]:
            offset = build.mul(index, I64(SCALES_BYTES))
            own = [build.add(first, offset) for first in scales]
            return _add_group(build, left, own, pace, before, num_panels)

        state = loop(build, groups, state, one_group)
        given = starting_sums(build, start, start_apart, lds, num_rows, num_panels)
        sums = [build.fadd(x, y) for x, y in zip(state[1 + 2 * num_panels :], given, strict=True)]
        store_sums(build, sums, c, ldc, num_rows, num_panels)

    return internal_function(module, f"tile_int8_{num_rows}_{num_panels}", 13, fill)


def _add_group(
    build: Any,
    left: list[Any],
    scales_at: list[Any],
    pace: Any,
    state: list[Any],
    num_panels: int,
) -> list[Any]:
    """The state, as `sum_up` has it, after a group's products are added to its float32 sums."""

    def columns_at(row: Any) -> list[Any]:
        offsets = [I64(part * SIDE_BY_SIDE * WIDTH) for part in range(NUM_VECTORS)]
        return [_load_numbers(build, build.add(row, offset)) for offset in offsets]

    def number_at(address: Any) -> Any:
        return splat(build, load_integers(build, address, I32))

    def add(total: Any, numbers: Any, column: Any) -> Any:
        return _add_products(build, total, numbers, column)

    offset_in_a, right = state[0], state[1 : 1 + num_panels]
    ahead, sums = state[1 + num_panels : 1 + 2 * num_panels], state[1 + 2 * num_panels :]
    heads = [build.add(row, offset_in_a) for row in left]
    places = places_in_c(len(left), num_panels)
    begins = [splat(build, load_integers(build, build.add(head, I64(4)), I32)) for head in heads]
    within = [build.add(offset_in_a, I64(8)), *right, *ahead, *[begins[i] for i, _, _ in places]]
    how = columns_at, number_at, add
    words, step = I64(GROUP // SIDE_BY_SIDE), I64(SIDE_BY_SIDE * PANEL)
    within = sum_up(build, left, step, pace, words, within, num_panels, how, AT_ONCE)
    totals = within[1 + 2 * num_panels :]
    scales = {
        (j, at): load(build, build.add(scales_at[j], I64(at // 2)), BFLOAT16)
        for j in range(num_panels)
        for at in range(0, 4 * PANEL, VECTOR_BYTES)
    }
    left_scales = [splat(build, load_one(build, head)) for head in heads]
    made = []
    for n, (i, j, at) in enumerate(places):
        scale = build.fmul(left_scales[i], scales[j, at])
        made.append(fma(build, build.sitofp(totals[n], VECTOR), scale, sums[n]))
    return [*within[: 1 + 2 * num_panels], *made]


def _load_numbers(build: Any, address: Any) -> Any:
    """Of each lane the numbers that lie side by side: four bytes, or two as int16."""
    if _VNNI:
        return load_integers(build, address, INTEGERS)
    bytes_type = ir.VectorType(ir.IntType(8), 2 * WIDTH)
    loaded = build.load(build.inttoptr(address, bytes_type.as_pointer()))
    loaded.align = 1
    return build.sext(loaded, SHORTS)


def _add_products(build: Any, total: Any, numbers: Any, column: Any) -> Any:
    """total + the products of each lane's numbers."""
    if _VNNI:
        name = "llvm.x86.avx512.vpdpbusd.512"
        function = declare(build, name, INTEGERS, INTEGERS, INTEGERS, INTEGERS)
        return build.call(function, [total, column, numbers])
    return build.add(total, _multiply_pairs(build, build.bitcast(numbers, SHORTS), column))


def _multiply_pairs(build: Any, x: Any, y: Any) -> Any:
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
