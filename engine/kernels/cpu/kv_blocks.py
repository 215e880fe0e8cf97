"""How keys and values lie in a layer's blocks, and a token's way into its slot.

A block of one head holds its keys, then its values, in pieces of 16 tokens each: of keys they are
transposed, [D, 16], of values as they are, [16, D]. Both are right-hand sides of tiles, read in
place. Of bfloat16 that are multiplied as pairs these are [D / 2, 16, 2] and [8, D, 2]. Of numbers
in 8 bits, a piece ends with the 16 float32 that its tokens' are multiplied by.
"""

import numpy as np
from numba import njit

from engine.kernels.cpu.emit import BFLOAT16, FLOAT16, FLOAT32, INT8, PAIRS, PANEL
from engine.kernels.cpu.vectors import largest_magnitude, store_number

LEVELS = np.float32(127.0)
LEAST = np.float32(1e-35)  # what is all smaller is kept as zeros: its scale would lose digits


@njit(nogil=True, cache=True)
def piece_bytes(shape):
    """From one piece to the next."""
    scales = 4 * PANEL if shape.kv_kind == INT8 else 0
    return PANEL * shape.head_dim * shape.kv_bytes + scales


@njit(nogil=True, cache=True)
def values_after_keys(shape):
    """Bytes from a piece of keys to the same tokens' values."""
    return shape.block_size // PANEL * piece_bytes(shape)


@njit(nogil=True, cache=True)
def key_panel_at(cache, block_table, key, kv_head, shape):
    """Address of the 16 keys around a place in a sequence, [D, 16]; block_table is its row."""
    block = block_table[key // shape.block_size]
    head = (block * shape.num_kv_heads + kv_head) * 2 * values_after_keys(shape)
    return cache + head + key % shape.block_size // PANEL * piece_bytes(shape)


@njit(nogil=True, cache=True)
def store_token(cache, slot, kv_head, key, value, shape):
    """Write one token's key and value, float32 [D], of one head into its slot."""
    block, place = slot // shape.block_size, slot % shape.block_size
    head = (block * shape.num_kv_heads + kv_head) * 2 * values_after_keys(shape)
    keys = cache + head + place // PANEL * piece_bytes(shape)
    values = keys + values_after_keys(shape)
    lane, dim = place % PANEL, shape.head_dim
    if shape.kv_kind == FLOAT32:
        for d in range(dim):
            store_number(key[d], keys + (d * PANEL + lane) * 4, 0)
            store_number(value[d], values + (lane * dim + d) * 4, 0)
    elif shape.kv_kind == FLOAT16:
        for d in range(dim):
            store_number(key[d], keys + (d * PANEL + lane) * 2, 1)
            store_number(value[d], values + (lane * dim + d) * 2, 1)
    elif shape.kv_kind == BFLOAT16:
        for d in range(dim):
            store_number(key[d], keys + (d * PANEL + lane) * 2, 2)
            store_number(value[d], values + (lane * dim + d) * 2, 2)
    elif shape.kv_kind == PAIRS:
        for d in range(dim):
            store_number(key[d], keys + (d // 2 * PANEL + lane) * 4 + d % 2 * 2, 2)
            store_number(value[d], values + (lane // 2 * dim + d) * 4 + lane % 2 * 2, 2)
    else:
        scale = PANEL * dim + 4 * lane
        store_int8(key, dim, keys + lane, PANEL, keys + scale)
        store_int8(value, dim, values + lane * dim, 1, values + scale)


@njit(nogil=True, cache=True)
def store_int8(x, count, numbers, apart, scale):
    """Numbers in 8 bits, so many bytes apart, and at `scale` what they are multiplied by.

    The largest becomes ±127, all are rounded to the nearest. What is not a number, or infinite,
    makes the scale no number.
    """
    largest = largest_magnitude(x.ctypes.data, count)
    poison = largest - largest
    factor = np.float32(0.0)
    if largest >= LEAST and poison == 0:
        factor = LEVELS / largest
    store_number(largest / LEVELS + poison if largest >= LEAST else poison, scale, 0)
    for i in range(count):
        store_number(x[i] * factor if factor > 0 else np.float32(0.0), numbers + i * apart, 3)
