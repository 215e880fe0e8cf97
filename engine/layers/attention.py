"""Self-attention over the paged KV cache."""

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.registry import Kernels
from engine.layers.linear import AnyLinear
from engine.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where the tokens of one step's flat batch [T] lie: N sequences, end to end."""

    cu_query_lens: Tensor  # [N + 1] int32, sequence n's tokens are [cu[n], cu[n + 1])
    seq_lens: Tensor  # [N] int32, tokens in the cache, this step's included
    slot_mapping: Tensor  # [T] int64, the slot each token's key and value go to
    block_tables: Tensor  # [N, max_blocks] int32, right-padded with anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention; norms of query and key as in Qwen3, the window Mistral's."""

    qkv: AnyLinear  # rows: query heads, key heads, value heads
    out: AnyLinear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # the first part of each head, which is turned
    scale: float  # of the scores
    sliding_window: int | None
    kernels: Kernels

    def __call__(
        self,
        x: Tensor,  # [T, hidden]
        cos: Tensor,  # [T, rotary_dim // 2]
        sin: Tensor,  # [T, rotary_dim // 2]
        kv_cache: Tensor,  # [num_blocks, H_kv, 2, block_size, D] of this layer, changed
        metadata: AttentionMetadata,
    ) -> Tensor:  # [T, hidden]
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        query = heads[:, : self.num_heads]
        key, value = heads[:, self.num_heads :].chunk(2, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        self.kernels.rotary_store_kv(query, key, value, cos, sin, kv_cache, metadata.slot_mapping)
        attended = self.kernels.paged_attention(
            query,
            kv_cache,
            metadata.block_tables,
            metadata.cu_query_lens,
            metadata.seq_lens,
            scale=self.scale,
            sliding_window=self.sliding_window,
        )
        return self.out(attended.flatten(1))
