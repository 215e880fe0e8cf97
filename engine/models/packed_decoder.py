"""The lean decoder on a CPU: the layers of `Decoder`, packed for compiled kernels.

Sizes that are no multiple of a panel's columns are filled up with zeros, which add nothing to any
sum. A layer is packed as soon as it is loaded, so that no model is held twice.
"""

import logging
import time
from collections.abc import Sequence

import numba
import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu import MAX_THREADS, stack
from engine.kernels.cpu.attention import AttentionShape, plan_attention
from engine.kernels.cpu.matmul import KINDS, pack, padded
from engine.kernels.cpu.vectors import MAX_ROWS, PANEL
from engine.kernels.memory import allocate
from engine.kernels.registry import REFERENCE
from engine.kv_cache import LayerShape
from engine.layers.attention import AttentionMetadata
from engine.layers.rotary import RotaryEmbedding
from engine.models.decoder import (
    IGNORED,
    IGNORED_WHEN_TIED,
    DecoderLayer,
    DecoderLoader,
)
from engine.models.settings import DecoderSettings
from engine.weights import Checkpoint

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


class PackedDecoder:
    """A `Model` whose step is three calls: embed, all layers, logits."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: DecoderSettings,
        *,
        block_size: int,  # a multiple of 16
        weight_dtype: torch.dtype,  # float32, float16 or bfloat16: how weights are kept
        kv_dtype: torch.dtype,  # likewise keys and values; all arithmetic is in float32
    ) -> None:
        """Raises a TensorError when the checkpoint and its settings disagree."""
        assert block_size % PANEL == 0
        s = settings
        loader = DecoderLoader(checkpoint, s, torch.float32, CPU, REFERENCE)
        self.vocab_size = s.vocab_size
        self.max_position_embeddings = s.max_position_embeddings
        self.rotary = RotaryEmbedding(s.rotary_dim, s.rope_theta, s.rope_scaling, CPU)
        head_dim = padded(s.head_dim)
        kept = LayerShape(num_kv_heads=s.num_kv_heads, head_dim=head_dim)
        self.kv_layers = (kept,) * s.num_layers
        self._settings = s
        self._weight_dtype = weight_dtype
        self._held: list[Tensor] = []  # what addresses point to
        self._shape = stack.StackShape(
            hidden_size=s.hidden_size,
            head_dim=s.head_dim,
            eps=np.float32(s.rms_norm_eps),
            scale=np.float32(s.head_dim**-0.5),
            attention=AttentionShape(
                num_heads=s.num_heads,
                num_kv_heads=s.num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                kv_kind=KINDS[kv_dtype],
                kv_bytes=kv_dtype.itemsize,
            ),
            weight_kind=KINDS[weight_dtype],
            weight_bytes=weight_dtype.itemsize,
        )
        self._layers = np.zeros((s.num_layers, stack.NUM_COLUMNS), np.int64)
        for i, row in enumerate(self._layers):
            self._pack_layer(loader.layer(i), row)
            row[stack.WINDOW] = s.sliding_windows[i] or 0
        self._norm = self._keep(loader.norm("model.norm", s.hidden_size).weight)
        embedding = loader.tensor("model.embed_tokens.weight", s.vocab_size, s.hidden_size)
        self._embedding = self._lm_head = self._pack(embedding)
        if not s.tie_word_embeddings:
            lm_head = loader.tensor("lm_head.weight", s.vocab_size, s.hidden_size)
            self._lm_head = self._pack(lm_head)
        checkpoint.check_all_taken(IGNORED_WHEN_TIED if s.tie_word_embeddings else IGNORED)
        self._buffers = self._make_buffers(PANEL)
        self._warm_up(kv_dtype)

    def forward(
        self,
        token_ids: Tensor,  # [T] int64, in [0, vocab)
        positions: Tensor,  # [T] int64, of each token in its own sequence
        metadata: AttentionMetadata,
        kv_caches: Sequence[Tensor],  # of each layer, changed
        logit_rows: Tensor,  # [R] int64, the tokens of the batch whose logits are wanted
    ) -> Tensor:  # [R, vocab] float32
        num_tokens, num_rows = len(token_ids), len(logit_rows)
        if len(self._buffers.residual) < num_tokens:
            self._buffers = self._make_buffers(num_tokens)
        shape, buffers, workers = self._shape, self._buffers, len(self._buffers.tiles)
        numba.set_num_threads(workers)  # of the calling thread
        cos, sin = self.rotary(positions)
        cu_query_lens = metadata.cu_query_lens.numpy().astype(np.int64)
        seq_lens = metadata.seq_lens.numpy().astype(np.int64)
        for row, cache in zip(self._layers, kv_caches, strict=True):
            row[stack.KV_CACHE] = cache.data_ptr()
        size, kind, item = shape.hidden_size, shape.weight_kind, shape.weight_bytes
        stack.embed(token_ids.numpy(), self._embedding, buffers.residual, size, kind, item)
        stack.run_layers(
            self._layers,
            shape,
            buffers,
            cos.numpy(),
            sin.numpy(),
            metadata.slot_mapping.numpy(),
            metadata.block_tables.numpy().astype(np.int64),
            cu_query_lens,
            seq_lens,
            logit_rows.numpy(),
            plan_attention(cu_query_lens, seq_lens, shape.attention, workers),
        )
        logits = torch.empty((num_rows, padded(self.vocab_size)))
        stack.head(
            buffers.residual, self._norm, shape.eps, buffers.hidden, self._lm_head,
            logits.numpy(), num_rows, size, kind, item, workers,
        )  # fmt: skip
        return logits[:, : self.vocab_size]

    def _warm_up(self, kv_dtype: torch.dtype) -> None:
        """Compile what is not yet on disk: one token, in a cache of one block."""
        started = time.monotonic()
        block_size, first = self._shape.attention.block_size, torch.zeros(1, dtype=torch.int64)
        self.forward(
            first,
            first,
            AttentionMetadata(
                cu_query_lens=torch.tensor([0, 1], dtype=torch.int32),
                seq_lens=torch.ones(1, dtype=torch.int32),
                slot_mapping=first,
                block_tables=torch.zeros((1, 1), dtype=torch.int32),
            ),
            [
                allocate((1, kept.num_kv_heads, 2, block_size, kept.head_dim), kv_dtype, CPU)
                for kept in self.kv_layers
            ],
            first,
        )
        logger.info("kernels ready: seconds=%.1f", time.monotonic() - started)

    def _make_buffers(self, num_tokens: int) -> stack.Buffers:
        s, attention = self._settings, self._shape.attention
        hidden_size, width = padded(s.hidden_size), padded(s.intermediate_size)
        num_heads, num_kv_heads, head_dim = s.num_heads, s.num_kv_heads, attention.head_dim
        num_threads = min(torch.get_num_threads(), MAX_THREADS)

        def rows(*shape: int) -> np.ndarray:
            return allocate((num_tokens, *shape), torch.float32, CPU).numpy()

        return stack.Buffers(
            residual=rows(hidden_size),
            hidden=rows(hidden_size),
            heads=rows(num_heads + 2 * num_kv_heads, head_dim),
            attended=rows(num_heads, head_dim),
            gated=rows(width),
            tiles=np.zeros((num_threads, 2, MAX_ROWS, PANEL), np.float32),
        )

    def _pack_layer(self, layer: DecoderLayer, row: np.ndarray) -> None:
        s = self._settings
        attention, mlp = layer.attention, layer.mlp
        head_dim = padded(s.head_dim)
        row[stack.ATTENTION_NORM] = self._keep(layer.attention_norm.weight)
        row[stack.MLP_NORM] = self._keep(layer.mlp_norm.weight)
        if attention.query_norm is not None and attention.key_norm is not None:
            row[stack.QUERY_NORM] = self._keep(attention.query_norm.weight)
            row[stack.KEY_NORM] = self._keep(attention.key_norm.weight)
        num_parts = s.num_heads + 2 * s.num_kv_heads
        row[stack.QKV] = self._pack(_fill_rows(attention.qkv.weight, num_parts, head_dim))
        row[stack.QKV_BIAS] = self._keep_bias(attention.qkv.bias, num_parts, head_dim)
        out = _fill_rows(attention.out.weight.T, s.num_heads, head_dim).T
        row[stack.OUT] = self._pack(out)
        row[stack.OUT_BIAS] = self._keep_bias(attention.out.bias, 1, padded(s.hidden_size))
        width = padded(s.intermediate_size)
        row[stack.GATE_UP] = self._pack(_fill_rows(mlp.gate_up.weight, 2, width))
        row[stack.GATE_UP_BIAS] = self._keep_bias(mlp.gate_up.bias, 2, width)
        row[stack.DOWN] = self._pack(_fill_rows(mlp.down.weight.T, 1, width).T)
        row[stack.DOWN_BIAS] = self._keep_bias(mlp.down.bias, 1, padded(s.hidden_size))

    def _pack(self, weight: Tensor) -> int:
        return self._keep(pack(weight, self._weight_dtype))

    def _keep_bias(self, bias: Tensor | None, num_parts: int, size: int) -> int:
        return 0 if bias is None else self._keep(_fill_rows(bias, num_parts, size))

    def _keep(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()


def _fill_rows(
    tensor: Tensor,  # [num_parts × rows, …]
    num_parts: int,
    size: int,
) -> Tensor:  # [num_parts × size, …]
    """Each part's rows, filled up with zeros to `size`."""
    rows = tensor.shape[0] // num_parts
    if rows == size:
        return tensor
    filled = tensor.new_zeros(num_parts, size, *tensor.shape[1:])
    filled[:, :rows] = tensor.view(num_parts, rows, *tensor.shape[1:])
    return filled.flatten(0, 1)
