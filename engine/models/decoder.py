"""The decoder of the Llama family: Llama, Mistral, Phi-3, Qwen2 and Qwen3 are settings of it.

Pre-norm transformer (Touvron et al. 2023) over a flat batch [T]: tokens of many sequences end to
end, told apart by the attention metadata alone. Knows nothing of sequences or phases.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.memory import allocate
from engine.kernels.registry import Kernels
from engine.kv_cache import LayerShape
from engine.layers.attention import Attention, AttentionMetadata
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.models.settings import DecoderSettings
from engine.weights import Checkpoint

# buffers that old checkpoints saved, and the output matrix of a model that uses its input one
IGNORED = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
IGNORED_WHEN_TIED = re.compile(IGNORED.pattern + r"|lm_head\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP


class Decoder:
    """A loaded model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: DecoderSettings,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        """Raises a TensorError when the checkpoint and its settings disagree."""
        loader = DecoderLoader(checkpoint, settings, dtype, device, kernels)
        self.vocab_size = settings.vocab_size
        self.max_position_embeddings = settings.max_position_embeddings
        kept = LayerShape(num_kv_heads=settings.num_kv_heads, head_dim=settings.head_dim)
        self.kv_layers = (kept,) * settings.num_layers
        self.embedding = Embedding(
            loader.tensor("model.embed_tokens.weight", settings.vocab_size, settings.hidden_size)
        )
        self.rotary = RotaryEmbedding(
            settings.rotary_dim, settings.rope_theta, settings.rope_scaling, device
        )
        self.layers = [loader.layer(i) for i in range(settings.num_layers)]
        self.norm = loader.norm("model.norm", settings.hidden_size)
        if settings.tie_word_embeddings:
            self.lm_head = Linear(self.embedding.weight)
        else:
            self.lm_head = Linear(
                loader.tensor("lm_head.weight", settings.vocab_size, settings.hidden_size)
            )
        checkpoint.check_all_taken(IGNORED_WHEN_TIED if settings.tie_word_embeddings else IGNORED)

    def forward(
        self,
        token_ids: Tensor,  # [T] int64, in [0, vocab)
        positions: Tensor,  # [T] int64, of each token in its own sequence
        metadata: AttentionMetadata,
        kv_caches: Sequence[Tensor],  # of each layer, changed
        logit_rows: Tensor,  # [R] int64, the tokens of the batch whose logits are wanted
    ) -> Tensor:  # [R, vocab] float32
        cos, sin = self.rotary(positions)
        residual = self.embedding(token_ids)
        hidden = self.layers[0].attention_norm(residual)
        for i, layer in enumerate(self.layers):
            if i > 0:
                hidden = layer.attention_norm.add(hidden, residual)
            hidden = layer.attention(hidden, cos, sin, kv_caches[i], metadata)
            if i == len(self.layers) - 1:
                # past the last attention no token looks at another: the rest is for the wanted ones
                hidden, residual = hidden[logit_rows], residual[logit_rows]
            hidden = layer.mlp(layer.mlp_norm.add(hidden, residual))
        return self.lm_head(self.norm.add(hidden, residual)).float()


class DecoderLoader:
    """Takes a decoder's tensors out of a checkpoint: to device and type, and fused."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: DecoderSettings,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self.checkpoint = checkpoint
        self.settings = settings
        self.dtype = dtype
        self.device = device
        self.kernels = kernels

    def layer(self, index: int) -> DecoderLayer:
        s = self.settings
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        query_rows, kv_rows = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        qkv = {
            f"{attention}.q_proj": query_rows,
            f"{attention}.k_proj": kv_rows,
            f"{attention}.v_proj": kv_rows,
        }
        gate_up = dict.fromkeys((f"{mlp}.gate_proj", f"{mlp}.up_proj"), s.intermediate_size)
        if s.fused:
            qkv = {f"{attention}.qkv_proj": query_rows + 2 * kv_rows}
            gate_up = {f"{mlp}.gate_up_proj": 2 * s.intermediate_size}
        down = {f"{mlp}.down_proj": s.hidden_size}
        return DecoderLayer(
            attention_norm=self.norm(f"{prefix}.input_layernorm", s.hidden_size),
            attention=Attention(
                qkv=self.linear(qkv, s.hidden_size, s.qkv_bias),
                out=self.linear({f"{attention}.o_proj": s.hidden_size}, query_rows, s.out_bias),
                query_norm=self.norm(f"{attention}.q_norm", s.head_dim) if s.qk_norm else None,
                key_norm=self.norm(f"{attention}.k_norm", s.head_dim) if s.qk_norm else None,
                num_heads=s.num_heads,
                num_kv_heads=s.num_kv_heads,
                head_dim=s.head_dim,
                rotary_dim=s.rotary_dim,
                sliding_window=s.sliding_windows[index],
                kernels=self.kernels,
            ),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm", s.hidden_size),
            mlp=GatedMLP(
                self.linear(gate_up, s.hidden_size, s.mlp_bias),
                self.linear(down, s.intermediate_size, s.mlp_bias),
                self.kernels,
            ),
        )

    def linear(self, parts: dict[str, int], num_inputs: int, has_bias: bool) -> Linear:
        """Projections of one input, as name -> rows, stacked into one."""
        num_outputs = sum(parts.values())
        # taken before there is room for them: their shapes are the file's, the settings only say so
        taken = [
            self.checkpoint.take(f"{name}.weight", (rows, num_inputs))
            for name, rows in parts.items()
        ]
        weight = allocate((num_outputs, num_inputs), self.dtype, self.device)
        bias = allocate((num_outputs,), self.dtype, self.device) if has_bias else None
        start = 0
        for (name, rows), part in zip(parts.items(), taken, strict=True):
            weight[start : start + rows].copy_(part)
            if bias is not None:
                bias[start : start + rows].copy_(self.checkpoint.take(f"{name}.bias", (rows,)))
            start += rows
        return Linear(weight, bias)

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(
            self.tensor(f"{name}.weight", size), self.settings.rms_norm_eps, self.kernels
        )

    def tensor(self, name: str, *shape: int) -> Tensor:
        taken = self.checkpoint.take(name, shape)
        return allocate(shape, self.dtype, self.device).copy_(taken)
