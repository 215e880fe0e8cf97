"""The pool of KV blocks: its memory and its size. Who holds which block is the BlockManager's."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.memory import allocate, sent
from engine.kernels.registry import Kernels

SCALE_BYTES = 4  # a float32 beside each token's key, and value, of a head, in 8 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one layer keeps of a token."""

    num_kv_heads: int
    head_dim: int  # of a key and of a value; the larger where they differ


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """What one block of a model's cache is made of."""

    layers: tuple[LayerShape, ...]
    block_size: int  # tokens
    dtype: torch.dtype  # of 8 bits: with a scale for each token's key, and value, of a head

    def width(self, layer: LayerShape) -> int:
        """Numbers that a token's key, or value, of a head takes up, its scale included."""
        return layer.head_dim + (SCALE_BYTES if self.dtype.itemsize == 1 else 0)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        values = sum(layer.num_kv_heads * 2 * self.width(layer) for layer in self.layers)
        return values * self.block_size * self.dtype.itemsize

    def num_blocks(self, num_bytes: int, *, beside: int = 0) -> int:
        """Blocks that fit, `beside` as many of another size. ValueError when not even one does."""
        block_bytes = self.block_bytes + beside
        if num_bytes < block_bytes:
            raise ValueError(
                f"the KV cache needs at least {block_bytes} bytes for one block of "
                f"{self.block_size} tokens, got {num_bytes}"
            )
        return num_bytes // block_bytes


class KVCache:
    """Keys and values of every layer, [num_blocks, H_kv, 2, block_size, D] each.

    One head's keys and values lie side by side and a block is contiguous: on a CPU a random block
    is then read 1.7-2 times faster than with the heads or the layers innermost. In 8 bits D + 4
    stands for D: where in a block the scales lie is for the kernels to say.
    """

    def __init__(self, shape: KVCacheShape, num_blocks: int, device: torch.device) -> None:
        assert num_blocks >= 1
        self.shape = shape
        self.num_blocks = num_blocks
        # zeroed, so that even a slot read by mistake holds a number
        self.layers: list[Tensor] = [
            allocate(
                (num_blocks, layer.num_kv_heads, 2, shape.block_size, shape.width(layer)),
                shape.dtype,
                device,
            )
            for layer in shape.layers
        ]

    def copy_blocks(self, copies: Sequence[tuple[int, int]], kernels: Kernels) -> None:
        """Copy (source, destination) blocks in every layer; all sources are read first."""
        if not copies:
            return
        device = self.layers[0].device
        pairs = sent(torch.tensor(copies, dtype=torch.int64), device)
        sources, destinations = pairs.unbind(1)
        for layer in self.layers:
            kernels.copy_blocks(layer, sources, destinations)
