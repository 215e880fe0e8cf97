"""Tiles of matrix products by AMX: 16 rows × 16 columns of sums in each of its registers.

The right sides are `tiles`' panels: a panel of bfloat16 pairs, and one of numbers in 8 bits by
fours, is what a register takes, 64 bytes a row.
"""

from collections.abc import Callable
from typing import Any

from numba.extending import intrinsic

from engine.kernels.cpu import amx
from engine.kernels.cpu.emit import (
    BFLOAT16,
    FLOAT32,
    I64,
    INTEGERS,
    PANEL,
    VECTOR,
    branch,
    fma,
    load,
    load_integers,
    load_one,
    loop,
    prefetch,
    room,
    splat,
    store,
    zeros,
)
from engine.kernels.cpu.tiles import by_variant, internal_function, panel_addresses
from engine.kernels.cpu.tiles_int8 import GROUP

BLOCK = 32  # bfloat16 numbers of a row that are multiplied at once
BLOCK_BYTES = 64 * amx.TILE_ROWS  # of B
ROWS_AT_ONCE = 2 * amx.TILE_ROWS
PANELS_AT_ONCE = 2
GROUPS_AT_ONCE = 4  # of numbers in 8 bits

_FIRST_OF_A, _FIRST_OF_B = 4, 6  # registers; those before are sums


@intrinsic
def tile_bfloat16(
    context: Any,
    a: Any,  # address of A, rows as `pair_row` makes them
    lda: Any,  # floats' worth from one row of A to the next
    b: Any,  # address of B's first panel, as `pack_pairs` makes it
    b_apart: Any,  # bytes from there to the second panel
    c: Any,  # address of C, float32 [rows, 16 × panels], changed
    ldc: Any,  # floats from one row of C to the next
    start: Any,  # address of what is added, float32 like C: C itself, a bias; 0: nothing
    start_apart: Any,  # bytes from the first panel's to the second's
    lds: Any,  # floats from one row of that to the next; 0: the same for all
    ahead: Any,  # address of what will be read next: it is fetched meanwhile
    ahead_apart: Any,  # bytes from the first panel's to the second's
    lines: Any,  # of 64 bytes of each for each block
    blocks: Any,  # of 32 numbers of a row of A
    times: Any,  # so often, each time of the rows that follow
    num_rows: Any,  # 1 to 32, of each time
    row_tiles: Any,  # 1, or 2 of more than 16 rows
    panels: Any,  # 1 or 2
) -> Any:
    """C = A × B + start: products of bfloat16, summed in float32 in the order of k."""
    variants = [(rows, panels) for rows in (1, 2) for panels in (1, 2)]
    return by_variant(17, variants, _tile_bfloat16_function)


def _tile_bfloat16_function(module: Any, row_tiles: int, num_panels: int) -> Any:
    def fill(build: Any, args: Any) -> None:
        a, lda, b, b_apart, c, ldc, start, start_apart, lds = args[:9]
        ahead, ahead_apart, lines, blocks, times, num_rows = args[9:]
        sums = [(i, j) for i in range(row_tiles) for j in range(num_panels)]
        rows = rows_of_tiles(build, num_rows, row_tiles)
        shapes = {PANELS_AT_ONCE * i + j: (rows[i], amx.TILE_BYTES) for i, j in sums}
        shapes |= {_FIRST_OF_A + i: (rows[i], amx.TILE_BYTES) for i in range(row_tiles)}
        full = I64(amx.TILE_ROWS), amx.TILE_BYTES
        shapes |= {_FIRST_OF_B + j: full for j in range(num_panels)}
        amx.configure(build, room(build, 64), shapes)
        made = room(build, 64 * amx.TILE_ROWS)
        right = panel_addresses(build, b, b_apart, num_panels)
        fetched = panel_addresses(build, ahead, ahead_apart, num_panels)
        apart_in_a = build.mul(lda, I64(4))

        def one_time(index: Any, fetched: list[Any]) -> list[Any]:
            row = build.mul(index, num_rows)
            first, put, given = (
                build.add(at, build.mul(build.mul(row, apart), I64(4)))
                for at, apart in ((a, lda), (c, ldc), (start, lds))
            )
            for i, j in sums:
                amx.zero_tile(build, PANELS_AT_ONCE * i + j)

            def one_block(index: Any, state: list[Any]) -> list[Any]:
                at = build.mul(index, I64(BLOCK_BYTES))
                for j in range(num_panels):
                    amx.load_tile(build, _FIRST_OF_B + j, build.add(right[j], at), I64(64))
                for i in range(row_tiles):
                    place = build.add(first, build.mul(index, I64(2 * BLOCK)))
                    place = build.add(place, build.mul(apart_in_a, I64(amx.TILE_ROWS * i)))
                    amx.load_tile(build, _FIRST_OF_A + i, place, apart_in_a)
                    for j in range(num_panels):
                        total = PANELS_AT_ONCE * i + j
                        amx.add_bfloat16_products(build, total, _FIRST_OF_A + i, _FIRST_OF_B + j)
                return fetch_lines(build, state, lines)

            fetched = loop(build, blocks, fetched, one_block)
            is_given = build.icmp_signed("!=", start, I64(0))
            _put_sums(build, rows, num_panels, put, ldc, made, is_given, given, start_apart, lds)
            return fetched

        loop(build, times, fetched, one_time)
        amx.release(build)

    return internal_function(module, f"tile_bfloat16_{row_tiles}_{num_panels}", 15, fill)


def rows_of_tiles(build: Any, num_rows: Any, row_tiles: int) -> list[Any]:
    """Of so many rows, those in each of one or two registers."""
    if row_tiles == 1:
        return [num_rows]
    full = I64(amx.TILE_ROWS)
    return [full, build.sub(num_rows, full)]


def fetch_lines(build: Any, addresses: list[Any], lines: Any) -> list[Any]:
    """Fetch so many lines at each address; returns the addresses after them."""

    def one_line(_index: Any, state: list[Any]) -> list[Any]:
        for address in state:
            prefetch(build, address)
        return [build.add(address, I64(64)) for address in state]

    return loop(build, lines, addresses, one_line)


def _put_sums(
    build: Any,
    rows: list[Any],
    num_panels: int,
    c: Any,
    ldc: Any,
    made: Any,  # address of [16, 16] float32 to work in
    is_given: Any,
    start: Any,
    start_apart: Any,
    lds: Any,
) -> None:
    """Store the sums; where something is added, it is added last."""
    apart = build.mul(ldc, I64(4))
    added, plain, after = (build.append_basic_block() for _ in range(3))
    build.cbranch(is_given, added, plain)
    places = [(i, j) for i in range(len(rows)) for j in range(num_panels)]
    build.position_at_end(plain)
    for i, j in places:
        first = build.add(c, build.mul(apart, I64(amx.TILE_ROWS * i)))
        amx.store_tile(build, PANELS_AT_ONCE * i + j, build.add(first, I64(4 * PANEL * j)), apart)
    build.branch(after)
    build.position_at_end(added)
    for i, j in places:
        amx.store_tile(build, PANELS_AT_ONCE * i + j, made, I64(64))
        first = build.add(c, I64(4 * PANEL * j))
        given = build.add(start, build.mul(start_apart, I64(j)))

        def one_row(index: Any, state: list[Any], i=i, first=first, given=given) -> list[Any]:
            row = build.mul(build.add(index, I64(amx.TILE_ROWS * i)), I64(4))
            total = load(build, build.add(made, build.mul(index, I64(64))), FLOAT32)
            other = load(build, build.add(given, build.mul(row, lds)), FLOAT32)
            store(build, build.fadd(total, other), build.add(first, build.mul(row, ldc)))
            return state

        loop(build, rows[i], [], one_row)
    build.branch(after)
    build.position_at_end(after)


@intrinsic
def tile_int8_amx(
    context: Any,
    a: Any,  # address of A, rows as `quantize_row` makes them
    lda: Any,  # this and what follows as of `tile_bfloat16`
    b: Any,  # address of B's first panel, as `pack_int8` makes it
    b_apart: Any,
    c: Any,
    ldc: Any,
    start: Any,
    start_apart: Any,
    lds: Any,
    ahead: Any,
    ahead_apart: Any,
    lines: Any,  # of 64 bytes of each for each four groups
    groups: Any,  # of 32 numbers of a row of A
    times: Any,
    num_rows: Any,  # 1 to 16, of each time
    row_tiles: Any,  # 1
    panels: Any,  # 1 or 2
) -> Any:
    """C = A × B + start; each group's sums, int32, are scaled and added in float32, in order."""
    return by_variant(17, [(1, 1), (1, 2)], _tile_int8_function)


def _tile_int8_function(module: Any, _row_tiles: int, num_panels: int) -> Any:
    def fill(build: Any, args: Any) -> None:
        a, lda, b, b_apart, c, ldc, start, start_apart, lds = args[:9]
        ahead, ahead_apart, lines, groups, times, num_rows = args[9:]
        shapes = dict.fromkeys(range(GROUPS_AT_ONCE), (num_rows, amx.TILE_BYTES))
        shapes |= {_FIRST_OF_A + n: (num_rows, GROUP) for n in range(2)}
        shapes |= {_FIRST_OF_B + n: (I64(GROUP // 4), amx.TILE_BYTES) for n in range(2)}
        amx.configure(build, room(build, 64), shapes)
        made = room(build, 64 * amx.TILE_ROWS * GROUPS_AT_ONCE)
        sums = room(build, 64 * amx.TILE_ROWS)
        apart_in_a, apart_in_c = build.mul(lda, I64(4)), build.mul(ldc, I64(4))
        scales_at = build.mul(groups, I64(GROUP))  # of a row; of a panel it is 16 times that
        fetched = panel_addresses(build, ahead, ahead_apart, num_panels)
        right = panel_addresses(build, b, b_apart, num_panels)
        given = panel_addresses(build, start, start_apart, num_panels)
        whole = build.sdiv(groups, I64(GROUPS_AT_ONCE))
        done = build.mul(whole, I64(GROUPS_AT_ONCE))
        is_given = build.icmp_signed("!=", start, I64(0))

        def one_time(index: Any, fetched: list[Any]) -> list[Any]:
            row = build.mul(index, num_rows)
            left = build.add(a, build.mul(row, apart_in_a))
            for j in range(num_panels):
                sides = left, apart_in_a, right[j], scales_at
                _for_rows(build, num_rows, lambda r: store(build, zeros(), _row(build, sums, r)))

                def some_groups(n: Any, state: list[Any], sides: Any = sides) -> list[Any]:
                    first = build.mul(n, I64(GROUPS_AT_ONCE))
                    _add_groups(build, sides, first, GROUPS_AT_ONCE, num_rows, made, sums)
                    return fetch_lines(build, state, lines)

                def one_group(n: Any, state: list[Any], sides: Any = sides) -> list[Any]:
                    _add_groups(build, sides, build.add(done, n), 1, num_rows, made, sums)
                    return state

                [next_line] = loop(build, whole, [fetched[j]], some_groups)
                fetched = [*fetched[:j], next_line, *fetched[j + 1 :]]
                loop(build, build.sub(groups, done), [], one_group)
                put = build.add(build.add(c, I64(4 * PANEL * j)), build.mul(row, apart_in_c))
                first = build.add(given[j], build.mul(row, build.mul(lds, I64(4))))

                def one_row(r: Any, put: Any = put, first: Any = first) -> None:
                    total = load(build, _row(build, sums, r), FLOAT32)
                    at = build.add(first, build.mul(r, build.mul(lds, I64(4))))
                    [total] = branch(
                        build,
                        is_given,
                        [total],
                        lambda: [build.fadd(total, load(build, at, FLOAT32))],
                    )
                    store(build, total, build.add(put, build.mul(r, apart_in_c)))

                _for_rows(build, num_rows, one_row)
            return fetched

        loop(build, times, fetched, one_time)
        amx.release(build)

    return internal_function(module, f"tile_int8_amx_{num_panels}", 15, fill)


def _add_groups(
    build: Any,
    sides: tuple[Any, Any, Any, Any],
    first: Any,
    count: int,
    num_rows: Any,
    made: Any,
    sums: Any,
) -> None:
    """Add the products of some groups, from `first` on, to the sums."""
    left, apart_in_a, right, scales_at = sides
    numbers = build.add(left, build.mul(first, I64(GROUP)))
    panel = build.add(right, build.mul(first, I64(PANEL * GROUP)))
    for n in range(count):
        a, b = _FIRST_OF_A + n % 2, _FIRST_OF_B + n % 2
        amx.zero_tile(build, n)
        amx.load_tile(build, b, build.add(panel, I64(PANEL * GROUP * n)), I64(amx.TILE_BYTES))
        amx.load_tile(build, a, build.add(numbers, I64(GROUP * n)), apart_in_a)
        amx.add_int8_products(build, n, a, b)
    for n in range(count):
        at = build.add(made, I64(64 * amx.TILE_ROWS * n))
        amx.store_tile(build, n, at, I64(amx.TILE_BYTES))
    scales = build.add(right, build.mul(scales_at, I64(PANEL)))
    scales = build.add(scales, build.mul(first, I64(2 * PANEL)))
    columns = [load(build, build.add(scales, I64(2 * PANEL * n)), BFLOAT16) for n in range(count)]
    row_scales = build.add(build.add(left, scales_at), build.mul(first, I64(4)))

    def one_row(row: Any) -> None:
        at = _row(build, sums, row)
        total = load(build, at, FLOAT32)
        own = build.add(row_scales, build.mul(row, apart_in_a))
        for n, column in enumerate(columns):
            scale = splat(build, load_one(build, build.add(own, I64(4 * n))))
            place = build.add(_row(build, made, row), I64(64 * amx.TILE_ROWS * n))
            product = build.sitofp(load_integers(build, place, INTEGERS), VECTOR)
            total = fma(build, product, build.fmul(scale, column), total)
        store(build, total, at)

    _for_rows(build, num_rows, one_row)


def _row(build: Any, memory: Any, row: Any) -> Any:
    return build.add(memory, build.mul(row, I64(64)))


def _for_rows(build: Any, num_rows: Any, do: Callable[[Any], None]) -> None:
    def one(row: Any, state: list[Any]) -> list[Any]:
        do(row)
        return state

    loop(build, num_rows, [], one)
