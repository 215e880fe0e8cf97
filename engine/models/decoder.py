"""The decoder of the Llama family: Mistral, Phi-3, Gemma 3, Qwen2 and Qwen3 are settings of it.

Pre-norm transformer (Touvron et al. 2023) over a flat batch [T]: tokens of many sequences end to
end, told apart by the attention metadata alone. Knows nothing of sequences or phases.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.memory import allocate
from engine.kernels.packed_weight import PackedWeight, stack
from engine.kernels.registry import Kernels
from engine.kv_cache import LayerShape
from engine.layers.attention import Attention, AttentionMetadata
from engine.layers.embedding import Embedding
from engine.layers.linear import AnyLinear, Linear, PackedLinear, quantized
from engine.layers.mlp import Experts, GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.models.quantization import StoredQuantization
from engine.models.settings import DecoderSettings
from engine.weights import Checkpoint, UnsupportedModelError

# buffers that old checkpoints saved, and the output matrix of a model that uses its input one
IGNORED = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
IGNORED_WHEN_TIED = re.compile(IGNORED.pattern + r"|lm_head\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    attention_norm: RMSNorm
    attention: Attention
    attention_out_norm: RMSNorm | None  # Gemma's, before what was made joins the stream
    mlp_norm: RMSNorm
    mlp: GatedMLP | Experts
    mlp_out_norm: RMSNorm | None


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
        quantization: str = "none",  # of weights that are not stored in few bits: int8, int4, fp8
    ) -> None:
        """Raises a TensorError when the checkpoint and its settings disagree."""
        loader = DecoderLoader(checkpoint, settings, dtype, device, kernels, quantization)
        self.vocab_size = settings.vocab_size
        self.max_position_embeddings = settings.max_position_embeddings
        kept = LayerShape(num_kv_heads=settings.num_kv_heads, head_dim=settings.head_dim)
        self.kv_layers = (kept,) * settings.num_layers
        self.embedding = Embedding(
            loader.tensor("model.embed_tokens.weight", settings.vocab_size, settings.hidden_size),
            settings.embedding_scale,
        )
        self.rotary, self.local_rotary = rotary_embeddings(settings, device)
        self.layers = [loader.layer(i) for i in range(settings.num_layers)]
        self.norm = loader.norm("model.norm", settings.hidden_size)
        if settings.tie_word_embeddings:
            self.lm_head = Linear(self.embedding.weight)
        else:
            self.lm_head = Linear(
                loader.tensor("lm_head.weight", settings.vocab_size, settings.hidden_size)
            )
        self.logit_softcap = settings.logit_softcap
        checkpoint.check_all_taken(IGNORED_WHEN_TIED if settings.tie_word_embeddings else IGNORED)

    def forward(
        self,
        token_ids: Tensor,  # [T] int64, in [0, vocab)
        positions: Tensor,  # [T] int64, of each token in its own sequence
        metadata: AttentionMetadata,
        kv_caches: Sequence[Tensor],  # of each layer, changed
        logit_rows: Tensor,  # [R] int64, the tokens of the batch whose logits are wanted
    ) -> Tensor:  # [R, vocab] float32
        angles = self.rotary(positions)
        local = angles if self.local_rotary is self.rotary else self.local_rotary(positions)
        residual = self.embedding(token_ids)
        hidden = self.layers[0].attention_norm(residual)
        for i, layer in enumerate(self.layers):
            if i > 0:
                hidden = layer.attention_norm.add(hidden, residual)
            cos, sin = angles if layer.attention.sliding_window is None else local
            hidden = layer.attention(hidden, cos, sin, kv_caches[i], metadata)
            if i == len(self.layers) - 1:
                # past the last attention no token looks at another: the rest is for the wanted ones
                hidden, residual = hidden[logit_rows], residual[logit_rows]
            if layer.attention_out_norm is not None:
                hidden = layer.attention_out_norm(hidden)
            hidden = layer.mlp(layer.mlp_norm.add(hidden, residual))
            if layer.mlp_out_norm is not None:
                hidden = layer.mlp_out_norm(hidden)
        logits = self.lm_head(self.norm.add(hidden, residual)).float()
        return capped(logits, self.logit_softcap)


def rotary_embeddings(
    settings: DecoderSettings, device: torch.device
) -> tuple[RotaryEmbedding, RotaryEmbedding]:
    """Of layers without a window, and of those with one: mostly one and the same."""
    ropes = (settings.rope, settings.local_rope)
    whole, local = (
        RotaryEmbedding(settings.rotary_dim, rope.theta, rope.scaling, device) for rope in ropes
    )
    return whole, whole if ropes[0] == ropes[1] else local


def capped(
    logits: Tensor,  # [R, vocab] float32, changed
    cap: float | None,
) -> Tensor:  # [R, vocab]
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class DecoderLoader:
    """Takes a decoder's tensors out of a checkpoint: to device and type, and fused."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: DecoderSettings,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        quantization: str = "none",  # unpacked: what is stored in few bits is kept whole
    ) -> None:
        self.checkpoint = checkpoint
        self.stored = StoredQuantization.from_config(checkpoint.config)
        self.quantization = quantization
        self.settings = settings
        self.dtype = dtype
        self.device = device
        self.kernels = kernels

    def layer(self, index: int) -> DecoderLayer:
        s = self.settings
        prefix = f"model.layers.{index}"
        after, behind = f"{prefix}.post_attention_layernorm", s.norms_behind
        before_mlp = f"{prefix}.pre_feedforward_layernorm" if behind else after
        after_mlp = f"{prefix}.post_feedforward_layernorm"
        sparse = s.experts is not None and index in s.experts.layers
        return DecoderLayer(
            attention_norm=self.norm(f"{prefix}.input_layernorm", s.hidden_size),
            attention=self.attention(f"{prefix}.self_attn", s.sliding_windows[index]),
            attention_out_norm=self.norm(after, s.hidden_size) if behind else None,
            mlp_norm=self.norm(before_mlp, s.hidden_size),
            mlp=self.experts(f"{prefix}.mlp") if sparse else self.mlp(f"{prefix}.mlp"),
            mlp_out_norm=self.norm(after_mlp, s.hidden_size) if behind else None,
        )

    def attention(self, prefix: str, sliding_window: int | None) -> Attention:
        s = self.settings
        query_rows, kv_rows = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        qkv = {
            f"{prefix}.q_proj": query_rows,
            f"{prefix}.k_proj": kv_rows,
            f"{prefix}.v_proj": kv_rows,
        }
        if s.fused:
            qkv = {f"{prefix}.qkv_proj": query_rows + 2 * kv_rows}
        return Attention(
            qkv=self.linear(qkv, s.hidden_size, s.qkv_bias),
            out=self.linear({f"{prefix}.o_proj": s.hidden_size}, query_rows, s.out_bias),
            query_norm=self.norm(f"{prefix}.q_norm", s.head_dim) if s.qk_norm else None,
            key_norm=self.norm(f"{prefix}.k_norm", s.head_dim) if s.qk_norm else None,
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            rotary_dim=s.rotary_dim,
            scale=s.attention_scale,
            sliding_window=sliding_window,
            kernels=self.kernels,
        )

    def mlp(self, prefix: str) -> GatedMLP:
        s = self.settings
        gate_up = dict.fromkeys((f"{prefix}.gate_proj", f"{prefix}.up_proj"), s.intermediate_size)
        if s.fused:
            gate_up = {f"{prefix}.gate_up_proj": 2 * s.intermediate_size}
        return GatedMLP(
            self.linear(gate_up, s.hidden_size, s.mlp_bias),
            self.linear({f"{prefix}.down_proj": s.hidden_size}, s.intermediate_size, s.mlp_bias),
            self.kernels.gelu_mul if s.activation == "gelu" else self.kernels.silu_mul,
        )

    def experts(self, prefix: str) -> Experts:
        s = self.settings
        assert s.experts is not None
        if self.stored is not None or self.quantization not in ("none", "unpacked"):
            raise UnsupportedModelError("experts in few bits are not computed")
        router = self.linear({f"{prefix}.gate": s.experts.num_experts}, s.hidden_size, False)
        prefix = f"{prefix}.experts"
        count, size = s.experts.num_experts, s.experts.intermediate_size
        if f"{prefix}.gate_up_proj" in self.checkpoint.names:
            gate_up = self.tensor(f"{prefix}.gate_up_proj", count, 2 * size, s.hidden_size)
            down = self.tensor(f"{prefix}.down_proj", count, s.hidden_size, size)
        else:
            each = [f"{prefix}.{expert}" for expert in range(count)]
            pairs = [f"{expert}.{name}" for expert in each for name in ("gate_proj", "up_proj")]
            gate_up = self.stacked(pairs, size, s.hidden_size).view(count, 2 * size, -1)
            down = self.stacked([f"{expert}.down_proj" for expert in each], s.hidden_size, size)
        return Experts(
            router,
            gate_up,
            down,
            num_per_token=s.experts.num_experts_per_tok,
            normalized=s.experts.norm_topk_prob,
            kernels=self.kernels,
        )

    def stacked(self, names: list[str], *shape: int) -> Tensor:  # [len(names), *shape]
        """Weights of one shape."""
        taken = [self.checkpoint.take(f"{name}.weight", shape) for name in names]
        stack = allocate((len(names), *shape), self.dtype, self.device)
        for place, part in zip(stack, taken, strict=True):
            place.copy_(part)
        return stack

    def linear(self, parts: dict[str, int], num_inputs: int, has_bias: bool) -> AnyLinear:
        """Projections of one input, as name -> rows, stacked into one."""
        bias = self.bias(parts) if has_bias else None
        if self.stored is not None and self.stored.holds(self.checkpoint, list(parts)):
            packed = self.packed(self.stored, parts, num_inputs, has_bias)
            if self.quantization != "unpacked":
                return PackedLinear(packed.to(self.device), bias, self.kernels)
            return Linear(packed.dequantized(self.dtype).to(self.device), bias)
        weight = self.weight(parts, num_inputs)
        if self.quantization in ("none", "unpacked"):
            return Linear(weight, bias)
        try:
            return quantized(weight, bias, self.quantization, self.kernels)
        except ValueError as error:
            raise UnsupportedModelError(f"{', '.join(parts)}: {error}") from error

    def weight(self, parts: dict[str, int], num_inputs: int) -> Tensor:  # [rows of all, in]
        # taken before there is room for them: their shapes are the file's, the settings only say so
        taken = [
            self.checkpoint.take(f"{name}.weight", (rows, num_inputs))
            for name, rows in parts.items()
        ]
        weight = allocate((sum(parts.values()), num_inputs), self.dtype, self.device)
        for place, part in zip(torch.split(weight, list(parts.values())), taken, strict=True):
            place.copy_(part)
        return weight

    def bias(self, parts: dict[str, int]) -> Tensor:  # [rows of all]
        bias = allocate((sum(parts.values()),), self.dtype, self.device)
        places = torch.split(bias, list(parts.values()))
        for place, (name, rows) in zip(places, parts.items(), strict=True):
            place.copy_(self.checkpoint.take(f"{name}.bias", (rows,)))
        return bias

    def packed(
        self, stored: StoredQuantization, parts: dict[str, int], num_inputs: int, has_bias: bool
    ) -> PackedWeight:
        """What the checkpoint has in few bits. Files of GPTQ may have biases of nothing beside."""
        for name, rows in parts.items():
            beside = not has_bias and f"{name}.bias" in self.checkpoint.names
            if beside and self.checkpoint.take(f"{name}.bias", (rows,)).any():
                raise UnsupportedModelError(f"{name} has a bias, which the model has no use of")
        taken = [
            stored.take(self.checkpoint, name, rows, num_inputs) for name, rows in parts.items()
        ]
        try:
            return stack(taken)
        except ValueError as error:
            raise UnsupportedModelError(f"{', '.join(parts)}: {error}") from error

    def norm(self, name: str, size: int) -> RMSNorm:
        weight = self.tensor(f"{name}.weight", size)
        if self.settings.norm_offset:
            # in float32: a half type would round the sum
            weight = weight.float() + self.settings.norm_offset
        return RMSNorm(weight, self.settings.rms_norm_eps, self.kernels)

    def tensor(self, name: str, *shape: int) -> Tensor:
        taken = self.checkpoint.take(name, shape)
        return allocate(shape, self.dtype, self.device).copy_(taken)
