"""The decoder of the Llama family: Mistral, Phi-3, Gemma 3, Qwen2 and Qwen3 are settings of it.

Pre-norm transformer (Touvron et al. 2023) over a flat batch [T]: tokens of many sequences end to
end, told apart by the attention metadata alone. Knows nothing of sequences or phases.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.collectives import ALONE, Group
from engine.kernels.memory import allocate
from engine.kernels.packed_weight import PackedWeight, quantized_fp8, stack
from engine.kernels.registry import Kernels
from engine.kv_cache import LayerShape
from engine.layers.attention import Attention, AttentionMetadata
from engine.layers.embedding import Embedding
from engine.layers.linear import AnyLinear, Fp8Linear, Linear, PackedLinear, SummedLinear, quantized
from engine.layers.mlp import Experts, GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.models.quantization import StoredQuantization
from engine.models.settings import DecoderSettings
from engine.shards import size
from engine.weights import Checkpoint, UnsupportedModelError

# buffers that old checkpoints saved, and the output matrix of a model that uses its input one
IGNORED = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
Parts = dict[str, tuple[int, list[slice]]]  # name -> rows in the file, and which are taken
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
    """A loaded model, or one rank's part of it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: DecoderSettings,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        quantization: str = "none",  # of weights that are not stored in few bits: int8, int4, fp8
        group: Group = ALONE,  # the ranks that compute the model together
    ) -> None:
        """Raises a TensorError when the checkpoint and its settings disagree.

        UnsupportedModelError where the ranks cannot share the model.
        """
        settings.check_split(group.shard.size)
        loader = DecoderLoader(checkpoint, settings, dtype, device, kernels, quantization, group)
        self.group = group
        self.vocab_size = settings.vocab_size
        self.max_position_embeddings = settings.max_position_embeddings
        num_kv_heads = size(group.shard.kv_heads(settings.num_kv_heads))
        kept = LayerShape(num_kv_heads=num_kv_heads, head_dim=settings.head_dim)
        self.kv_layers = (kept,) * settings.num_layers
        self.embedding = Embedding(
            loader.vocabulary("model.embed_tokens.weight"),
            settings.embedding_scale,
            first=group.shard.filled_part(settings.vocab_size).start,
            summed_over=group,
        )
        self.rotary, self.local_rotary = rotary_embeddings(settings, device)
        self.layers = [loader.layer(i) for i in range(settings.num_layers)]
        self.norm = loader.norm("model.norm", settings.hidden_size)
        if settings.tie_word_embeddings:
            self.lm_head = Linear(self.embedding.weight)
        else:
            self.lm_head = Linear(loader.vocabulary("lm_head.weight"))
        self.logit_softcap = settings.logit_softcap
        checkpoint.check_all_taken(IGNORED_WHEN_TIED if settings.tie_word_embeddings else IGNORED)

    def forward(
        self,
        token_ids: Tensor,  # [T] int64, in [0, vocab)
        positions: Tensor,  # [T] int64, of each token in its own sequence
        metadata: AttentionMetadata,
        kv_caches: Sequence[Tensor],  # of each layer, changed
        logit_rows: Tensor,  # [R] int64, the tokens of the batch whose logits are wanted
    ) -> Tensor:  # [R, vocab] float32; of no use on other ranks than 0
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
        logits = self.group.columns(self.lm_head(self.norm.add(hidden, residual))).float()
        return capped(logits[:, : self.vocab_size], self.logit_softcap)


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
    """Takes a decoder's tensors out of a checkpoint: to device and type, and fused.

    One of several ranks takes its own part of them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: DecoderSettings,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        quantization: str = "none",  # unpacked: what is stored in few bits is kept whole
        group: Group = ALONE,
    ) -> None:
        self.group = group
        self.shard = group.shard
        self.checkpoint = checkpoint
        self.stored = StoredQuantization.from_config(checkpoint.config)
        self.quantization = quantization
        if self.stored is not None and self.shard.size > 1:
            raise UnsupportedModelError(
                f"tensor_parallel is {self.shard.size}, but weights stored in few bits are not cut"
            )
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
        heads, kv_heads = self.shard.part(s.num_heads), self.shard.kv_heads(s.num_kv_heads)
        query, kept = _times(heads, s.head_dim), _times(kv_heads, s.head_dim)
        qkv = {
            f"{prefix}.q_proj": (query_rows, [query]),
            f"{prefix}.k_proj": (kv_rows, [kept]),
            f"{prefix}.v_proj": (kv_rows, [kept]),
        }
        if s.fused:
            key, value = _moved(kept, query_rows), _moved(kept, query_rows + kv_rows)
            qkv = {f"{prefix}.qkv_proj": (query_rows + 2 * kv_rows, [query, key, value])}
        return Attention(
            qkv=self.linear(qkv, s.hidden_size, s.qkv_bias),
            out=self.back(f"{prefix}.o_proj", query_rows, query, s.out_bias),
            query_norm=self.norm(f"{prefix}.q_norm", s.head_dim) if s.qk_norm else None,
            key_norm=self.norm(f"{prefix}.k_norm", s.head_dim) if s.qk_norm else None,
            num_heads=size(heads),
            num_kv_heads=size(kv_heads),
            head_dim=s.head_dim,
            rotary_dim=s.rotary_dim,
            scale=s.attention_scale,
            sliding_window=sliding_window,
            kernels=self.kernels,
        )

    def mlp(self, prefix: str) -> GatedMLP:
        s = self.settings
        own, whole = self.shard.part(s.intermediate_size), s.intermediate_size
        gate_up = {f"{prefix}.{name}_proj": (whole, [own]) for name in ("gate", "up")}
        if s.fused:
            gate_up = {f"{prefix}.gate_up_proj": (2 * whole, [own, _moved(own, whole)])}
        return GatedMLP(
            self.linear(gate_up, s.hidden_size, s.mlp_bias),
            self.back(f"{prefix}.down_proj", whole, own, s.mlp_bias),
            self.kernels.gelu_mul if s.activation == "gelu" else self.kernels.silu_mul,
        )

    def experts(self, prefix: str) -> Experts:
        s = self.settings
        assert s.experts is not None
        if self.stored is not None:
            raise UnsupportedModelError("experts that are stored in few bits are not computed")
        count, whole = s.experts.num_experts, s.experts.intermediate_size
        own = self.shard.part(whole)
        gate = {f"{prefix}.gate": (count, [slice(0, count)])}
        router = Linear(self.weight(gate, s.hidden_size))  # whole: small, and it decides all
        prefix = f"{prefix}.experts"
        if f"{prefix}.gate_up_proj" in self.checkpoint.names:
            shape = (count, 2 * whole, s.hidden_size)
            both = self.checkpoint.take(f"{prefix}.gate_up_proj", shape)
            gate_up = self.beside([both[:, own], both[:, _moved(own, whole)]], dim=1)
            down = self.checkpoint.take(f"{prefix}.down_proj", (count, s.hidden_size, whole))
            down = self.beside([down[..., own]])
        else:
            each = [f"{prefix}.{expert}" for expert in range(count)]
            pairs = [f"{expert}.{name}_proj" for expert in each for name in ("gate", "up")]
            rows = {pair: (whole, [own]) for pair in pairs}
            gate_up = self.weight(rows, s.hidden_size).view(count, 2 * size(own), -1)
            names = [f"{expert}.down_proj.weight" for expert in each]
            taken = [self.checkpoint.take(name, (s.hidden_size, whole)) for name in names]
            down = self.beside([tensor[:, own] for tensor in taken])
            down = down.view(count, s.hidden_size, size(own))
        return Experts(
            router,
            self.kept_experts(prefix, gate_up),
            self.kept_experts(prefix, down),
            num_per_token=s.experts.num_experts_per_tok,
            normalized=s.experts.norm_topk_prob,
            kernels=self.kernels,
            summed_over=self.group,
        )

    def kept_experts(self, prefix: str, weight: Tensor) -> Tensor | PackedWeight:
        """All experts' weights [num_experts, N, K] as a setting says."""
        if self.quantization in ("none", "unpacked"):
            return weight
        if self.quantization == "fp8":  # the weights alone: what they are multiplied with stays
            return quantized_fp8(weight.flatten(0, 1))
        kept = self.kept([prefix], weight.flatten(0, 1), None)
        assert isinstance(kept, PackedLinear)
        return kept.packed

    def linear(self, parts: Parts, num_inputs: int, has_bias: bool) -> AnyLinear:
        """Projections of one input, stacked into one."""
        bias = self.bias(parts) if has_bias else None
        if self.stored is not None and self.stored.holds(self.checkpoint, list(parts)):
            packed = self.packed(self.stored, parts, num_inputs, has_bias)
            if self.quantization != "unpacked":
                return PackedLinear(packed.to(self.device), bias, self.kernels)
            return Linear(packed.dequantized(self.dtype).to(self.device), bias)
        return self.kept(list(parts), self.weight(parts, num_inputs), bias)

    def back(self, name: str, num_inputs: int, own: slice, has_bias: bool) -> AnyLinear:
        """The projection back to the stream, of this rank's part of its inputs."""
        hidden_size = self.settings.hidden_size
        whole = {name: (hidden_size, [slice(0, hidden_size)])}
        if self.shard.size == 1:
            return self.linear(whole, num_inputs, has_bias)
        taken = self.checkpoint.take(f"{name}.weight", (hidden_size, num_inputs))
        part = self.kept([name], self.beside([taken[:, own]]), None)
        return SummedLinear(part, self.bias(whole) if has_bias else None, self.group)

    def kept(
        self, names: list[str], weight: Tensor, bias: Tensor | None
    ) -> Linear | PackedLinear | Fp8Linear:
        """A weight as a setting says."""
        if self.quantization in ("none", "unpacked"):
            return Linear(weight, bias)
        try:
            return quantized(weight, bias, self.quantization, self.kernels)
        except ValueError as error:
            raise UnsupportedModelError(f"{', '.join(names)}: {error}") from error

    def weight(self, parts: Parts, num_inputs: int) -> Tensor:  # [rows of all, in]
        # taken before there is room for them: their shapes are the file's, the settings only say so
        taken = [
            self.checkpoint.take(f"{name}.weight", (rows, num_inputs))[cut]
            for name, (rows, cuts) in parts.items()
            for cut in cuts
        ]
        return self.beside(taken)

    def bias(self, parts: Parts) -> Tensor:  # [rows of all]
        return self.beside(
            [
                self.checkpoint.take(f"{name}.bias", (rows,))[cut]
                for name, (rows, cuts) in parts.items()
                for cut in cuts
            ]
        )

    def vocabulary(self, name: str) -> Tensor:  # [this rank's share of the ids, hidden]
        """Rows past the vocabulary's end, where it does not divide, are zeros."""
        s = self.settings
        taken = self.checkpoint.take(name, (s.vocab_size, s.hidden_size))
        own, width = self.shard.filled_part(s.vocab_size), self.shard.width(s.vocab_size)
        weight = allocate((width, s.hidden_size), self.dtype, self.device)
        weight[: size(own)].copy_(taken[own])
        return weight

    def beside(self, parts: list[Tensor], dim: int = 0) -> Tensor:
        """Parts of tensors mapped from files, one after the other in memory of their own."""
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        whole = allocate(tuple(shape), self.dtype, self.device)
        start = 0
        for part in parts:
            whole.narrow(dim, start, part.shape[dim]).copy_(part)
            start += part.shape[dim]
        return whole

    def packed(
        self, stored: StoredQuantization, parts: Parts, num_inputs: int, has_bias: bool
    ) -> PackedWeight:
        """What the checkpoint has in few bits. Files of GPTQ may have biases of nothing beside."""
        for name, (rows, _) in parts.items():
            beside = not has_bias and f"{name}.bias" in self.checkpoint.names
            if beside and self.checkpoint.take(f"{name}.bias", (rows,)).any():
                raise UnsupportedModelError(f"{name} has a bias, which the model has no use of")
        taken = [
            stored.take(self.checkpoint, name, rows, num_inputs)
            for name, (rows, _) in parts.items()
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


def _times(part: slice, width: int) -> slice:
    """The same part where each is `width` wide."""
    return slice(part.start * width, part.stop * width)


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
