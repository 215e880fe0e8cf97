from dataclasses import replace

import pytest
import torch

from engine.kernels.registry import REFERENCE
from engine.kv_cache import KVCache, KVCacheShape, LayerShape

SHAPE = KVCacheShape(
    layers=(
        LayerShape(num_kv_heads=2, head_dim=5),
        LayerShape(num_kv_heads=1, head_dim=8),
        LayerShape(num_kv_heads=2, head_dim=5),
    ),
    block_size=4,
    dtype=torch.bfloat16,
)
IN_8_BITS = replace(SHAPE, dtype=torch.int8)
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [SHAPE, IN_8_BITS])
def test_a_pool_of_bytes_holds_as_many_blocks_as_fit(shape):
    held = sum(layer.nbytes for layer in KVCache(shape, 7, CPU).layers)
    assert shape.block_bytes * 7 == held
    assert shape.num_blocks(held) == 7
    assert shape.num_blocks(held - 1) == 6


def test_in_8_bits_a_scale_of_4_bytes_is_counted_for_each_key_and_value_of_a_head():
    # of a token: five heads of 5, 8 and 5 numbers, keys and values
    assert IN_8_BITS.block_bytes == 4 * 2 * (2 * (5 + 4) + (8 + 4) + 2 * (5 + 4))


def test_less_memory_than_one_block_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=f"{SHAPE.block_bytes}.*got {SHAPE.block_bytes - 1}"):
        SHAPE.num_blocks(SHAPE.block_bytes - 1)


def test_a_new_pool_holds_zeros():
    assert all(not layer.any() for layer in KVCache(SHAPE, 50, CPU).layers)


@pytest.mark.parametrize("shape", [SHAPE, IN_8_BITS])
def test_blocks_are_copied_in_every_layer(shape):
    cache = KVCache(shape, 6, CPU)
    for layer in cache.layers:
        layer.random_(-100, 100)
    before = [layer.clone() for layer in cache.layers]
    cache.copy_blocks([], REFERENCE)
    cache.copy_blocks([(0, 4), (4, 1), (0, 2)], REFERENCE)
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer, old[[0, 4, 0, 3, 0, 5]])
