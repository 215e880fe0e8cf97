"""A tile of a matrix product with 8-bit weights, by integers: see `tiles`."""

import platform
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from engine.kernels.cpu.emit import (
    FLOAT32,
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
    load_one,
    row_address,
    splat,
)
from engine.kernels.cpu.machine import FEATURES
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


@intrinsic
def tile_int8(
    context: Any,
    a: Any,  # address of A: of each row its scale, float32, then k int16
    lda: Any,  # floats' worth from one row of A to the next
    b: Any,  # address of B's first panel: 16 scales, float32, then int8 [k / 2, 16, 2]
    b_apart: Any,  # as of `tile`, as all that follow
    c: Any,
    ldc: Any,
    start: Any,
    start_apart: Any,
    lds: Any,
    ahead: Any,
    ahead_apart: Any,
    pace: Any,  # bytes of each for each pair of B's rows
    k: Any,  # even
    rows: Any,
    panels: Any,
) -> Any:
    """C = A × B + start, of integers: exact until the sums, int32, are scaled."""
    return by_variant(15, rows_and_panels(MAX_PANELS), _tile_int8_function)


def _tile_int8_function(module: Any, num_rows: int, num_panels: int) -> Any:
    def fill(build: Any, args: Any) -> None:
        a, lda, b, b_apart, c, ldc, start, start_apart, lds, ahead, ahead_apart, pace, k = args
        left = [row_address(build, a, lda, i) for i in range(num_rows)]
        right = panel_addresses(build, b, b_apart, num_panels)
        fetched = panel_addresses(build, ahead, ahead_apart, num_panels)
        places = places_in_c(num_rows, num_panels)
        totals = _sum_up(build, left, right, fetched, pace, build.sdiv(k, I64(2)))
        before = starting_sums(build, start, start_apart, lds, num_rows, num_panels)
        scales = {
            (j, at): load(build, build.add(right[j], I64(at)), FLOAT32)
            for j in range(num_panels)
            for at in range(0, 4 * PANEL, VECTOR_BYTES)
        }
        sums = []
        for n, (i, j, at) in enumerate(places):
            scale = build.fmul(splat(build, load_one(build, left[i])), scales[j, at])
            sums.append(fma(build, build.sitofp(totals[n], VECTOR), scale, before[n]))
        store_sums(build, sums, c, ldc, num_rows, num_panels)

    return internal_function(module, f"tile_int8_{num_rows}_{num_panels}", 13, fill)


def _sum_up(
    build: Any, left: list[Any], right: list[Any], fetched: list[Any], pace: Any, num_pairs: Any
) -> list[Any]:
    """Go through the pairs of rows of B; returns the sums, int32."""

    def columns_at(pairs: Any) -> list[Any]:
        offsets = [I64(part * 2 * WIDTH) for part in range(NUM_VECTORS)]
        return [_load_int8(build, build.add(pairs, offset)) for offset in offsets]

    def number_at(address: Any) -> Any:
        pair = build.load(build.inttoptr(address, I32.as_pointer()))
        pair.align = 4
        return splat(build, pair)

    def add(total: Any, numbers: Any, column: Any) -> Any:
        return _add_products(build, total, numbers, column)

    num_panels = len(right)
    none = ir.Constant(INTEGERS, [0] * WIDTH)
    first = [build.add(address, I64(4 * PANEL)) for address in right]
    state = [I64(4), *first, *fetched, *[none] * (len(left) * num_panels * NUM_VECTORS)]
    how = columns_at, number_at, add
    state = sum_up(build, left, I64(2 * PANEL), pace, num_pairs, state, num_panels, how)
    return state[1 + 2 * num_panels :]


def _load_int8(build: Any, address: Any) -> Any:
    """Pairs of int8 for each lane, as int16."""
    bytes_type = ir.VectorType(ir.IntType(8), 2 * WIDTH)
    loaded = build.load(build.inttoptr(address, bytes_type.as_pointer()))
    loaded.align = 1
    return build.sext(loaded, SHORTS)


def _add_products(build: Any, total: Any, numbers: Any, column: Any) -> Any:
    """total + x[2i] × y[2i] + x[2i + 1] × y[2i + 1] of each lane's pairs of int16, to int32."""
    if WIDTH == 16 and "avx512vnni" in FEATURES:
        name = "llvm.x86.avx512.vpdpwssd.512"
        function = declare(build, name, INTEGERS, INTEGERS, SHORTS, SHORTS)
        return build.call(function, [total, build.bitcast(numbers, SHORTS), column])
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
