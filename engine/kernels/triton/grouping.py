"""Pairs of token and expert, sorted by expert: whose a tile of them is, found on the device."""

import triton
import triton.language as tl


@triton.jit
def find_tile(tile, counts, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Whose a tile is: (expert, its first pair, pairs from there to the expert's last)."""
    e = tl.arange(0, WIDTH)
    pairs = tl.load(counts + e, mask=e < EXPERTS, other=0)
    tiles = tl.cdiv(pairs, ROWS)
    before = tl.cumsum(tiles) <= tile
    expert = tl.sum(before.to(tl.int32))
    first_tile = tl.sum(tl.where(before, tiles, 0))
    first_pair = tl.sum(tl.where(before, pairs, 0))
    own = tl.sum(tl.where(e == expert, pairs, 0))  # 0 past the last tile
    inside = (tile - first_tile) * ROWS
    return expert, first_pair + inside, own - inside
