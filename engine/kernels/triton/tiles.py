"""How large the pieces are that one program of attention works on. A table, not a search.

A search at run time (`triton.autotune`) would time kernels while requests wait, and choose anew in
each process: results would differ in their last bits from one start to the next.

- **One token's rows** (decode) wait for memory alone: the matrix units' least, 16 rows, and so many
  keys that the three programs that a processor has registers for keep about 96 KiB on their way.
- **Many rows** (prefill) are bound by the matrix units: 128 rows use a key 128 times once it is in
  shared memory. On Ampere a warp also holds its queries in registers, beside the sums of its rows:
  from 128 wide on, 64 rows are what 255 registers a thread leave room for.
- **Three stages**, because a key's address is itself read from memory, from the block table: while
  one tile is multiplied the next is on its way, and the addresses of the one after it.
- **float32** has no matrix unit of its own precision; it is there to be right, in small tiles.

All of it was chosen by what the compiler says of registers and shared memory; none of it has been
timed yet.
"""

from dataclasses import dataclass

from engine.kernels.triton.devices import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    rows: int  # queries' heads that share one read of keys, at least 16: the matrix units' least
    keys: int
    num_warps: int
    num_stages: int = 3


# by the padded width of a head
FEW_ROWS = {
    64: Tiles(rows=16, keys=128, num_warps=4),
    128: Tiles(rows=16, keys=64, num_warps=4),
    256: Tiles(rows=16, keys=32, num_warps=4),
}
# by generation, then by width
MANY_ROWS = {
    8: {
        64: Tiles(rows=128, keys=64, num_warps=8),
        128: Tiles(rows=64, keys=64, num_warps=8),
        256: Tiles(rows=64, keys=32, num_warps=8),
    },
    9: {
        64: Tiles(rows=128, keys=64, num_warps=8),
        128: Tiles(rows=128, keys=64, num_warps=8),
        256: Tiles(rows=128, keys=32, num_warps=8),
    },
    10: {
        64: Tiles(rows=128, keys=64, num_warps=8),
        128: Tiles(rows=128, keys=64, num_warps=8),
        # more rows of this width, and Triton 3.7's compiler for Blackwell runs out of registers
        256: Tiles(rows=32, keys=32, num_warps=4),
    },
}
# over keys and values in 8 bits, which become numbers in registers
MANY_ROWS_IN_8_BITS = {
    9: {256: Tiles(rows=64, keys=16, num_warps=8)},
    10: {256: Tiles(rows=32, keys=32, num_warps=8)},
}
FLOAT32 = {
    64: Tiles(rows=32, keys=32, num_warps=4),
    128: Tiles(rows=16, keys=32, num_warps=4),
    256: Tiles(rows=16, keys=16, num_warps=4),
}
WIDEST_HEAD = max(FEW_ROWS)


def choose_tiles(
    *,
    many: bool,  # rows, more than one token's
    width: int,  # of a head, padded to a power of two
    itemsize: int,  # of a query's number
    scaled: bool,  # keys and values are in 8 bits
    device: Device,
) -> Tiles:
    """For heads no wider than WIDEST_HEAD."""
    width = max(width, min(FEW_ROWS))
    if itemsize == 4:
        return FLOAT32[width]
    if not many:
        return FEW_ROWS[width]
    small = MANY_ROWS_IN_8_BITS.get(device.generation, {}) if scaled else {}
    return small.get(width, MANY_ROWS[device.generation][width])
