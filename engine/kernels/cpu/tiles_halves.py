"""Tiles of matrix products whose numbers are float16: see `halves`.

A lane of 32 bits holds two inputs of one output: their products are summed apart, in float16, for a
stretch, and then added to totals in float32. These lie in memory, for the registers are all taken;
they are read there as float16 and made float32 by the units that load.
"""

import functools
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from engine.kernels.cpu.emit import (
    F32,
    FLOAT16,
    FLOAT32,
    I32,
    I64,
    PANEL,
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
    store,
    zeros,
)
from engine.kernels.cpu.halves import HALVES, STRETCH
from engine.kernels.cpu.tiles import (
    MAX_PANELS,
    MAX_PANELS_FEW,
    by_variant,
    internal_function,
    panel_addresses,
    rows_and_panels,
    starting_sums,
    store_sums,
    sum_up,
)

_PIECE = PANEL // 2  # pairs of rows of B that lie together in the KV cache
PIECES = STRETCH // _PIECE  # of a stretch


@intrinsic
def tile_halves(
    context: Any,
    a: Any,  # address of A, rows as `halve_row` makes them
    lda: Any,  # floats' worth from one row of A to the next
    b: Any,  # address of B's first panel, as `pack_halves` makes it
    b_apart: Any,  # as of `tile`, as all that follow
    c: Any,
    ldc: Any,
    start: Any,
    start_apart: Any,
    lds: Any,
    ahead: Any,
    ahead_apart: Any,
    pace: Any,  # bytes of each for each pair of A
    pairs: Any,
    rows: Any,
    panels: Any,
) -> Any:
    """C = A × B + start; stretches of the sum are added in their order."""
    return by_variant(15, rows_and_panels(MAX_PANELS), _tile_halves_function)


@intrinsic
def tile_half_keys(
    context: Any,
    a: Any,  # these and all that follow as of `tile_halves`
    lda: Any,
    b: Any,  # but B's panels have no scales
    b_apart: Any,
    c: Any,
    ldc: Any,
    start: Any,
    start_apart: Any,
    lds: Any,
    ahead: Any,
    ahead_apart: Any,
    pace: Any,
    pairs: Any,
    rows: Any,
    panels: Any,
) -> Any:
    """C = A × B + start."""
    function_of = functools.partial(_tile_halves_function, scaled=False)
    return by_variant(15, rows_and_panels(MAX_PANELS), function_of)


def _tile_halves_function(
    module: Any, num_rows: int, num_panels: int, *, scaled: bool = True
) -> Any:
    num_sums = num_rows * num_panels

    def fill(build: Any, args: Any) -> None:
        a, lda, b, b_apart, c, ldc, start, start_apart, lds, ahead, ahead_apart, pace, pairs = args
        left = [row_address(build, a, lda, i) for i in range(num_rows)]
        right = panel_addresses(build, b, b_apart, num_panels)
        memory = _Totals(build, num_sums)
        state = [I64(0), *right, *panel_addresses(build, ahead, ahead_apart, num_panels)]

        def one_stretch(index: Any, places: list[Any]) -> list[Any]:
            left_over = build.sub(pairs, build.mul(index, I64(STRETCH)))
            is_last = build.icmp_signed("<", left_over, I64(STRETCH))
            count = build.select(is_last, left_over, I64(STRETCH))
            state = [*places, *_no_sums(num_sums)]
            made = _sum_halves(build, left, I64(4 * PANEL), pace, count, state, num_panels)
            memory.add(made[len(places) :])
            return made[: len(places)]

        count = build.sdiv(build.add(pairs, I64(STRETCH - 1)), I64(STRETCH))
        loop(build, count, state, one_stretch)
        totals = memory.joined()
        scales_at = build.mul(pairs, I64(4 * PANEL))
        of_panels = right
        if scaled:
            of_panels = [load(build, build.add(panel, scales_at), FLOAT32) for panel in right]
        given = starting_sums(build, start, start_apart, lds, num_rows, num_panels)
        sums = []
        for i, row in enumerate(left):
            of_row = splat(build, load_one(build, build.add(row, build.mul(pairs, I64(4)))))
            for j, of_panel in enumerate(of_panels):
                n = num_panels * i + j
                scale = build.fmul(of_row, of_panel) if scaled else of_row
                sums.append(fma(build, totals[n], scale, given[n]))
        store_sums(build, sums, c, ldc, num_rows, num_panels)

    name = f"tile_halves_{num_rows}_{num_panels}_{int(scaled)}"
    return internal_function(module, name, 13, fill)


@intrinsic
def tile_over_halves(
    context: Any,
    a: Any,  # address of A, float16 [rows, 2 × pairs], without scales
    lda: Any,  # floats' worth from one row of A to the next
    pieces: Any,  # address of int64: where each 8 pairs of rows of B lie, and what to fetch beyond
    offset: Any,  # bytes from there to the columns that are wanted
    ldb: Any,  # pairs from one row of B to the next
    c: Any,  # address of C, float32 [rows, 16 × panels], changed
    ldc: Any,  # floats from one row of C to the next
    ahead: Any,  # pieces from the one that is read to the one that is fetched
    num_pieces: Any,
    skipped: Any,  # pieces of the first stretch that come before them
    scale: Any,  # bits of a float32, what the product is multiplied by
    rows: Any,  # 1 to MAX_ROWS
    panels: Any,  # 1 to MAX_PANELS, or MAX_PANELS_FEW of few rows: columns side by side
) -> Any:
    """C = scale × A × B, of a B that lies in pieces; so many a stretch, whichever come first."""
    return by_variant(13, rows_and_panels(MAX_PANELS_FEW), _tile_over_halves_function)


def _tile_over_halves_function(module: Any, num_rows: int, num_panels: int) -> Any:
    num_sums = num_rows * num_panels

    def fill(build: Any, args: Any) -> None:
        a, lda, pieces, offset, ldb, c, ldc, ahead, num_pieces, skipped, scale = args
        left = [row_address(build, a, lda, i) for i in range(num_rows)]
        step, memory = build.mul(ldb, I64(4)), _Totals(build, num_sums)

        def columns_at(index: Any) -> list[Any]:
            address = build.add(pieces, build.mul(index, I64(8)))
            piece = build.load(build.inttoptr(address, I64.as_pointer()))
            return panel_addresses(build, build.add(piece, offset), I64(4 * PANEL), num_panels)

        def one_stretch(index: Any, state: list[Any]) -> list[Any]:
            begin = build.sub(build.mul(index, I64(PIECES)), skipped)
            end = build.add(begin, I64(PIECES))
            first = build.select(build.icmp_signed(">", begin, I64(0)), begin, I64(0))
            is_last = build.icmp_signed("<", num_pieces, end)
            count = build.sub(build.select(is_last, num_pieces, end), first)

            def one_piece(index: Any, state: list[Any]) -> list[Any]:
                place = build.add(first, index)
                fetched = columns_at(build.add(place, ahead))
                begin = [state[0], *columns_at(place), *fetched, *state[1:]]
                made = _sum_halves(build, left, step, step, I64(_PIECE), begin, num_panels)
                return [made[0], *made[1 + 2 * num_panels :]]

            made = loop(build, count, [*state, *_no_sums(num_sums)], one_piece)
            memory.add(made[1:])
            return made[:1]

        count = build.add(build.add(num_pieces, skipped), I64(PIECES - 1))
        count = build.sdiv(count, I64(PIECES))
        loop(build, count, [I64(0)], one_stretch)
        wide = splat(build, build.bitcast(build.trunc(scale, I32), F32))
        store_sums(
            build, [build.fmul(x, wide) for x in memory.joined()], c, ldc, num_rows, num_panels
        )

    return internal_function(module, f"tile_over_halves_{num_rows}_{num_panels}", 11, fill)


def _no_sums(count: int) -> list[Any]:
    return [ir.Constant(HALVES, [0.0] * 2 * WIDTH)] * count


def _sum_halves(
    build: Any, left: list[Any], step: Any, pace: Any, count: Any, state: list[Any], num_panels: int
) -> list[Any]:
    """`sum_up` of float16."""
    how = _columns_at(build), _number_at(build), _add(build)
    return sum_up(build, left, step, pace, count, state, num_panels, how)


def _columns_at(build: Any) -> Any:
    def load_column(address: Any) -> list[Any]:
        loaded = build.load(build.inttoptr(address, HALVES.as_pointer()))
        loaded.align = 4
        return [loaded]

    return load_column


def _number_at(build: Any) -> Any:
    """A pair for all lanes."""
    return lambda address: build.bitcast(splat(build, load_integers(build, address, I32)), HALVES)


def _add(build: Any) -> Any:
    function = declare(build, f"llvm.fma.v{2 * WIDTH}f16", HALVES, HALVES, HALVES, HALVES)
    return lambda total, number, column: build.call(function, [number, column, total])


class _Totals:
    """Sums in float32, each of two vectors, on the stack."""

    def __init__(self, build: Any, num_sums: int) -> None:
        self._build, self._num_sums = build, num_sums
        # not Numba's own way to get room, which would clear it
        floats = build.alloca(F32, size=2 * WIDTH * num_sums)
        halves = build.alloca(F32, size=WIDTH * num_sums)
        floats.align = halves.align = VECTOR_BYTES
        self._floats, self._halves = build.ptrtoint(floats, I64), build.ptrtoint(halves, I64)
        for n in range(2 * num_sums):
            store(build, zeros(), self._float_at(n))

    def _float_at(self, n: int) -> Any:
        return self._build.add(self._floats, I64(VECTOR_BYTES * n))

    def add(self, sums: list[Any]) -> None:
        """Add what was summed in float16."""
        build = self._build
        for n, each in enumerate(sums):
            at = build.add(self._halves, I64(VECTOR_BYTES * n))
            build.store(each, build.inttoptr(at, HALVES.as_pointer())).align = VECTOR_BYTES
        self._keep_in_memory()
        for n in range(2 * self._num_sums):
            at = build.add(self._halves, I64(VECTOR_BYTES // 2 * n))
            total = build.fadd(load(build, self._float_at(n), FLOAT32), load(build, at, FLOAT16))
            store(build, total, self._float_at(n))

    def _keep_in_memory(self) -> None:
        """What was stored is loaded from there, not taken from the register apart."""
        kind = ir.FunctionType(ir.VoidType(), [I64])
        barrier = ir.InlineAsm(kind, "", "r,~{memory}", side_effect=True)
        self._build.call(barrier, [self._halves])

    def joined(self) -> list[Any]:
        """Of each sum its lanes' pairs, added."""
        build, sums = self._build, []
        for n in range(self._num_sums):
            low, high = (load(build, self._float_at(2 * n + i), FLOAT32) for i in range(2))
            even, odd = (
                build.shuffle_vector(low, high, lane_numbers(list(range(i, 2 * WIDTH, 2))))
                for i in range(2)
            )
            sums.append(build.fadd(even, odd))
        return sums
