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
CPU = torch.device("cpu")


def test_a_pool_of_bytes_holds_as_many_blocks_as_fit():
    held = sum(layer.nbytes for layer in KVCache(SHAPE, 7, CPU).layers)
    assert SHAPE.block_bytes * 7 == held
    assert SHAPE.num_blocks(held) == 7
    assert SHAPE.num_blocks(held - 1) == 6


def test_less_memory_than_one_block_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=f"{SHAPE.block_bytes}.*got {SHAPE.block_bytes - 1}"):
        SHAPE.num_blocks(SHAPE.block_bytes - 1)


def test_a_new_pool_holds_zeros():
    assert all(not layer.any() for layer in KVCache(SHAPE, 50, CPU).layers)


def test_blocks_are_copied_in_every_layer():
    cache = KVCache(SHAPE, 6, CPU)
    for layer in cache.layers:
        layer.normal_()
    before = [layer.clone() for layer in cache.layers]
    cache.copy_blocks([], REFERENCE)
    cache.copy_blocks([(0, 4), (4, 1), (0, 2)], REFERENCE)
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer, old[[0, 4, 0, 3, 0, 5]])
