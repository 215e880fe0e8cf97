"""The two products of attention over a stretch of keys, of bfloat16 by AMX.

Keys lie in pieces of 16 as panels [D / 2, 16, 2], values as [16 / 2, D, 2]: see `kv_blocks`.
"""

from typing import Any

from numba.extending import intrinsic

from engine.kernels.cpu import amx
from engine.kernels.cpu.emit import I64, PANEL, loop, prefetch, room
from engine.kernels.cpu.tiles import by_variant, internal_function
from engine.kernels.cpu.tiles_amx import BLOCK, BLOCK_BYTES, fetch_lines, rows_of_tiles

_PAIR_ROWS = PANEL // 2  # of a piece's values
_VARIANTS = [(1, 1), (2, 1)]


@intrinsic
def score_keys(
    context: Any,
    queries: Any,  # address of bfloat16 [rows, D]
    pieces: Any,  # address of int64: where each 16 keys lie, and `ahead` more
    num_pieces: Any,
    blocks: Any,  # D / 32
    scores: Any,  # address of float32 [rows, 16 × num_pieces], changed
    lds: Any,  # floats from one row of scores to the next
    ahead: Any,  # pieces from the one that is read to the one that is fetched
    values_at: Any,  # bytes from a piece of keys to its values, fetched past the last keys
    num_rows: Any,  # 1 to 32
    row_tiles: Any,  # 1, or 2 of more than 16 rows
    _one: Any,
) -> Any:
    """Queries × keys, summed in float32."""
    return by_variant(11, _VARIANTS, _score_function)


def _score_function(module: Any, row_tiles: int, _one: int) -> Any:
    totals, left, right = (0, 1), (2, 3), 4

    def fill(build: Any, args: Any) -> None:
        queries, pieces, num_pieces, blocks, scores, lds, ahead, values_at, num_rows = args
        rows = rows_of_tiles(build, num_rows, row_tiles)
        shapes = {tile[i]: (rows[i], 64) for tile in (totals, left) for i in range(row_tiles)}
        shapes[right] = (I64(amx.TILE_ROWS), 64)
        amx.configure(build, room(build, 64), shapes)
        query_bytes = build.mul(blocks, I64(2 * BLOCK))
        score_bytes = build.mul(lds, I64(4))
        lines = build.mul(blocks, I64(BLOCK_BYTES // 64))

        def one_piece(index: Any, state: list[Any]) -> list[Any]:
            piece = _piece_at(build, pieces, index)
            later = build.add(index, ahead)
            past = build.icmp_signed(">=", later, num_pieces)
            later = build.select(past, build.sub(later, num_pieces), later)
            offset = build.select(past, values_at, I64(0))
            fetch_lines(build, [build.add(_piece_at(build, pieces, later), offset)], lines)
            for i in range(row_tiles):
                amx.zero_tile(build, totals[i])

            def one_block(block: Any, inner: list[Any]) -> list[Any]:
                at = build.add(piece, build.mul(block, I64(BLOCK_BYTES)))
                amx.load_tile(build, right, at, I64(64))
                for i in range(row_tiles):
                    first = build.add(queries, build.mul(block, I64(2 * BLOCK)))
                    first = build.add(first, build.mul(query_bytes, I64(amx.TILE_ROWS * i)))
                    amx.load_tile(build, left[i], first, query_bytes)
                    amx.add_bfloat16_products(build, totals[i], left[i], right)
                return inner

            loop(build, blocks, [], one_block)
            for i in range(row_tiles):
                first = build.add(scores, build.mul(score_bytes, I64(amx.TILE_ROWS * i)))
                first = build.add(first, build.mul(index, I64(4 * PANEL)))
                amx.store_tile(build, totals[i], first, score_bytes)
            return state

        loop(build, num_pieces, [], one_piece)
        amx.release(build)

    return internal_function(module, f"score_keys_{row_tiles}", 9, fill)


@intrinsic
def weigh_values(
    context: Any,
    weights: Any,  # address of bfloat16 [rows, 16 × num_pieces]
    ldw: Any,  # bytes from one row of weights to the next
    pieces: Any,  # address of int64: where each 16 values lie, less `offset`, and `ahead` more
    offset: Any,  # bytes
    num_pieces: Any,
    head_dim: Any,  # D, a multiple of 32
    made: Any,  # address of float32 [rows, D], changed
    ldm: Any,  # floats from one row of that to the next
    ahead: Any,  # pieces from the one that is read to the one that is fetched
    num_rows: Any,  # 1 to 32
    row_tiles: Any,  # 1, or 2 of more than 16 rows
    _one: Any,
) -> Any:
    """Weights × values, summed in float32 in the order of the keys."""
    return by_variant(12, _VARIANTS, _weigh_function)


def _weigh_function(module: Any, row_tiles: int, _one: int) -> Any:
    num_panels = 2  # side by side: D is a multiple of 32
    left, right = (4, 5), (6, 7)

    def fill(build: Any, args: Any) -> None:
        weights, ldw, pieces, offset, num_pieces, head_dim, made, ldm, ahead, num_rows = args
        rows = rows_of_tiles(build, num_rows, row_tiles)
        sums = [(i, j) for i in range(row_tiles) for j in range(num_panels)]
        shapes = {2 * i + j: (rows[i], 64) for i, j in sums}
        shapes |= {left[i]: (rows[i], 2 * PANEL) for i in range(row_tiles)}
        shapes |= {tile: (I64(_PAIR_ROWS), 64) for tile in right}
        amx.configure(build, room(build, 64), shapes)
        made_bytes, pair_bytes = build.mul(ldm, I64(4)), build.mul(head_dim, I64(4))

        def two_panels(part: Any, state: list[Any]) -> list[Any]:
            within = build.add(offset, build.mul(part, I64(64 * num_panels)))
            for i, j in sums:
                amx.zero_tile(build, 2 * i + j)

            def one_piece(index: Any, inner: list[Any]) -> list[Any]:
                piece = build.add(_piece_at(build, pieces, index), within)
                later = build.add(_piece_at(build, pieces, build.add(index, ahead)), within)
                for row in range(_PAIR_ROWS):
                    place = build.add(later, build.mul(pair_bytes, I64(row)))
                    prefetch(build, place)
                    prefetch(build, build.add(place, I64(64)))
                for j in range(num_panels):
                    place = build.add(piece, I64(64 * j))
                    amx.load_tile(build, right[j], place, pair_bytes)
                for i in range(row_tiles):
                    place = build.add(weights, build.mul(ldw, I64(amx.TILE_ROWS * i)))
                    place = build.add(place, build.mul(index, I64(2 * PANEL)))
                    amx.load_tile(build, left[i], place, ldw)
                    for j in range(num_panels):
                        amx.add_bfloat16_products(build, 2 * i + j, left[i], right[j])
                return inner

            loop(build, num_pieces, [], one_piece)
            for i, j in sums:
                place = build.add(made, build.mul(made_bytes, I64(amx.TILE_ROWS * i)))
                place = build.add(place, build.mul(part, I64(64 * num_panels)))
                amx.store_tile(build, 2 * i + j, build.add(place, I64(64 * j)), made_bytes)
            return state

        loop(build, build.sdiv(head_dim, I64(num_panels * PANEL)), [], two_panels)
        amx.release(build)

    return internal_function(module, f"weigh_values_{row_tiles}", 10, fill)


def _piece_at(build: Any, pieces: Any, index: Any) -> Any:
    address = build.add(pieces, build.mul(index, I64(8)))
    return build.load(build.inttoptr(address, I64.as_pointer()))
