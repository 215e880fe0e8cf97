"""A tile of a matrix product whose numbers are float16: see `halves`.

A lane of 32 bits holds two inputs of one output: their products are summed apart, in float16, for a
stretch, and then added to totals in float32. These lie in memory, for the registers are all taken;
they are read there as float16 and made float32 by the units that load.
"""

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
    by_variant,
    internal_function,
    panel_addresses,
    rows_and_panels,
    starting_sums,
    store_sums,
    sum_up,
)


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


def _tile_halves_function(module: Any, num_rows: int, num_panels: int) -> Any:
    num_sums = num_rows * num_panels

    def fill(build: Any, args: Any) -> None:
        a, lda, b, b_apart, c, ldc, start, start_apart, lds, ahead, ahead_apart, pace, pairs = args
        left = [row_address(build, a, lda, i) for i in range(num_rows)]
        right = panel_addresses(build, b, b_apart, num_panels)
        memory = _Totals(build, num_sums)
        nothing = [ir.Constant(HALVES, [0.0] * 2 * WIDTH)] * num_sums
        state = [I64(0), *right, *panel_addresses(build, ahead, ahead_apart, num_panels)]

        def one_stretch(index: Any, places: list[Any]) -> list[Any]:
            left_over = build.sub(pairs, build.mul(index, I64(STRETCH)))
            is_last = build.icmp_signed("<", left_over, I64(STRETCH))
            count = build.select(is_last, left_over, I64(STRETCH))
            how = _columns_at(build), _number_at(build), _add(build)
            step = I64(4 * PANEL)
            made = sum_up(build, left, step, pace, count, [*places, *nothing], num_panels, how)
            memory.add(made[len(places) :])
            return made[: len(places)]

        count = build.sdiv(build.add(pairs, I64(STRETCH - 1)), I64(STRETCH))
        loop(build, count, state, one_stretch)
        totals = memory.joined()
        scales_at = build.mul(pairs, I64(4 * PANEL))
        of_panels = [load(build, build.add(panel, scales_at), FLOAT32) for panel in right]
        given = starting_sums(build, start, start_apart, lds, num_rows, num_panels)
        sums = []
        for i, row in enumerate(left):
            of_row = splat(build, load_one(build, build.add(row, build.mul(pairs, I64(4)))))
            for j, of_panel in enumerate(of_panels):
                n = num_panels * i + j
                sums.append(fma(build, totals[n], build.fmul(of_row, of_panel), given[n]))
        store_sums(build, sums, c, ldc, num_rows, num_panels)

    return internal_function(module, f"tile_halves_{num_rows}_{num_panels}", 13, fill)


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
