"""What a Hugging Face config.json says about a decoder of the Llama family.

Llama (SmolLM too), Mistral, Phi-3, Gemma 3 and Qwen's are settings of one decoder; the differences
stand here and in `rope`. A setting that the decoder does not compute is refused by name, never
ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.checkpoint_files import shown
from engine.layers.rotary import LongRopeScaling
from engine.models.config_values import count, flag, positive
from engine.models.rope import RopeSettings, read_ropes
from engine.weights import MalformedCheckpointError, UnsupportedModelError

MAX_LAYERS = 10_000  # what is made of each before its tensors are looked at is small
MAX_EXPERTS = 10_000  # likewise of a layer's experts
MAX_HEAD_DIM = 1 << 16  # likewise of a head

FAMILY_OF = {
    "Gemma3ForCausalLM": "gemma3_text",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
ONE_WINDOW = ("mistral", "phi3", "qwen3_moe")  # families with the same for all layers, or none
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSettings:
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of each
    norm_topk_prob: bool  # the weights of a token's experts are divided by their sum
    layers: frozenset[int]  # that have experts


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings:
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of layers without experts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens
    rms_norm_eps: float
    rotary_dim: int  # the part of each head that is turned
    rope: RopeSettings
    local_rope: RopeSettings  # of layers with a window
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool  # of attention's output projection
    mlp_bias: bool
    qk_norm: bool
    fused: bool  # the checkpoint has q, k and v, and gate and up, in one tensor each
    sliding_windows: tuple[int | None, ...]  # of each layer; None: the whole sequence
    activation: str  # of the gate: silu, or gelu in its approximation by tanh
    attention_scale: float
    embedding_scale: float
    norm_offset: float  # what a norm multiplies by is its weight and this
    norms_behind: bool  # attention and feed-forward are normed before they join the stream
    logit_softcap: float | None
    experts: ExpertSettings | None

    def check_split(self, num_ranks: int) -> None:
        """Raises UnsupportedModelError where so many ranks cannot share the model."""
        counts = [
            ("attention heads", self.num_heads),
            ("intermediate size", self.intermediate_size),
        ]
        if self.num_kv_heads >= num_ranks:
            counts.append(("KV heads", self.num_kv_heads))
        if self.experts is not None:
            counts.append(("experts' intermediate size", self.experts.intermediate_size))
        for what, number in counts:
            if number % num_ranks:
                raise UnsupportedModelError(
                    f"tensor_parallel is {num_ranks}, which does not divide the model's {what}: "
                    f"{number}"
                )
        if num_ranks > self.num_kv_heads and num_ranks % self.num_kv_heads:
            raise UnsupportedModelError(
                f"tensor_parallel is {num_ranks}, which is no multiple of the model's "
                f"{self.num_kv_heads} KV heads"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "DecoderSettings":
        """Read a config.json. Raises UnsupportedModelError or MalformedCheckpointError."""
        family = _family(config)
        gemma = family == "gemma3_text"
        activation = _activation(config, family)
        num_layers = count(config, "num_hidden_layers", most=MAX_LAYERS)
        hidden_size = count(config, "hidden_size")
        num_heads, num_kv_heads, head_dim = _heads(config, family, hidden_size)
        rope, local_rope = read_ropes(config, family)
        attention_bias = family not in ("mistral", "phi3") and flag(config, "attention_bias")
        scale_of, softcap = head_dim, None
        if gemma:
            _refuse_of_gemma(config)
            scale_of = count(config, "query_pre_attn_scalar", 256)
            if config.get("final_logit_softcapping") is not None:
                softcap = positive(config, "final_logit_softcapping")
        return cls(
            vocab_size=count(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=count(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=rope.longest,
            rms_norm_eps=positive(config, "rms_norm_eps", 1e-5 if family == "phi3" else 1e-6),
            rotary_dim=_rotary_dim(head_dim, rope, local_rope),
            rope=rope,
            local_rope=local_rope,
            tie_word_embeddings=flag(config, "tie_word_embeddings", gemma),
            qkv_bias=attention_bias or family == "qwen2",
            out_bias=attention_bias and family != "qwen2",
            mlp_bias=family == "llama" and flag(config, "mlp_bias"),
            qk_norm=family in ("gemma3_text", "qwen3", "qwen3_moe"),
            fused=family == "phi3",
            sliding_windows=_sliding_windows(config, family, num_layers),
            activation=activation,
            attention_scale=scale_of**-0.5,
            embedding_scale=hidden_size**0.5 if gemma else 1.0,
            norm_offset=1.0 if gemma else 0.0,
            norms_behind=gemma,
            logit_softcap=softcap,
            experts=_experts(config, num_layers) if family == "qwen3_moe" else None,
        )


def _family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise MalformedCheckpointError(f"architectures must name one class, got {architectures!r}")
    family = FAMILY_OF.get(architectures[0]) if isinstance(architectures[0], str) else None
    if family is None:
        raise UnsupportedModelError(
            f"unknown architecture {architectures[0]!r}; known are {', '.join(FAMILY_OF)}"
        )
    if config.get("model_type", family) != family:
        raise UnsupportedModelError(
            f"model_type {config['model_type']!r} does not go with architecture "
            f"{architectures[0]!r}"
        )
    return family


def _activation(config: Mapping[str, Any], family: str) -> str:
    name, default = "hidden_act", "silu"
    if family == "gemma3_text":
        name, default = "hidden_activation", "gelu_pytorch_tanh"
    known = [each for each in ACTIVATIONS if family != "qwen3_moe" or ACTIVATIONS[each] == "silu"]
    given = config.get(name, default)
    if given not in known:
        raise UnsupportedModelError(f"{name} must be of {', '.join(known)}, got {shown(given)}")
    return ACTIVATIONS[given]


def _heads(config: Mapping[str, Any], family: str, hidden_size: int) -> tuple[int, int, int]:
    """How many ask, how many are kept, and their size."""
    num_heads = count(config, "num_attention_heads")
    absent = {"mistral": 8, "gemma3_text": 4, "qwen3_moe": 4}.get(family, num_heads)
    num_kv_heads = count(config, "num_key_value_heads", absent, num_heads)
    if num_heads % num_kv_heads:
        raise MalformedCheckpointError(
            f"num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    split = max(1, hidden_size // num_heads)
    absent = {"qwen3": 128, "gemma3_text": 256}.get(family, split)
    head_dim = count(config, "head_dim", absent, split, most=MAX_HEAD_DIM)
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim must be even, got {head_dim}")
    return num_heads, num_kv_heads, head_dim


def _rotary_dim(head_dim: int, *ropes: RopeSettings) -> int:
    """The part of each head that is turned, in every layer."""
    rotary_dim = int(head_dim * ropes[0].partial_rotary_factor)
    if rotary_dim % 2 or rotary_dim == 0:
        raise UnsupportedModelError(f"the turned part of a head must be even, got {rotary_dim}")
    for rope in ropes:
        if isinstance(rope.scaling, LongRopeScaling):
            num_factors = len(rope.scaling.short_factor)
            if num_factors != rotary_dim // 2:
                raise MalformedCheckpointError(
                    f"short_factor must have {rotary_dim // 2} numbers, got {num_factors}"
                )
    return rotary_dim


def _refuse_of_gemma(config: Mapping[str, Any]) -> None:
    # transformers' class reads it and computes without
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedModelError(
            f"attn_logit_softcapping must be null, got {shown(config['attn_logit_softcapping'])}"
        )
    if flag(config, "use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention must be false")


def _experts(config: Mapping[str, Any], num_layers: int) -> ExpertSettings | None:
    """Which layers have experts, and how many. transformers 5 writes their number as local."""
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    num_experts = count(config, name, 128, least=0, most=MAX_EXPERTS)
    if config.get("num_experts", num_experts) != num_experts:
        raise MalformedCheckpointError(
            f"num_experts and num_local_experts differ: {shown(config['num_experts'])}, "
            f"{num_experts}"
        )
    step = count(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise MalformedCheckpointError(f"mlp_only_layers must be a list, got {shown(dense)}")
    layers = frozenset(range(step - 1, num_layers, step)) - {
        count({"mlp_only_layers": each}, "mlp_only_layers", least=0) for each in dense
    }
    if not layers or num_experts == 0:
        return None
    num_per_tok = count(config, "num_experts_per_tok", 8)
    if num_per_tok > num_experts:
        raise MalformedCheckpointError(
            f"num_experts_per_tok must be at most {num_experts}, got {num_per_tok}"
        )
    return ExpertSettings(
        num_experts=num_experts,
        num_experts_per_tok=num_per_tok,
        intermediate_size=count(config, "moe_intermediate_size", 768),
        norm_topk_prob=flag(config, "norm_topk_prob"),
        layers=layers,
    )


def _sliding_windows(
    config: Mapping[str, Any], family: str, num_layers: int
) -> tuple[int | None, ...]:
    """Mistral, Phi-3: one window for all layers. Qwen: a switch, and the layers it applies to.

    Gemma 3: all layers but every sixth.
    """
    if family == "llama" or (family == "phi3" and "sliding_window" not in config):
        window = None
    elif family in ("mistral", "phi3", "gemma3_text") or flag(config, "use_sliding_window"):
        window = _window(config)
    else:
        window = None
    if config.get("layer_types") is not None:
        types = config["layer_types"]
        if not isinstance(types, list) or len(types) < num_layers:
            raise MalformedCheckpointError(
                f"layer_types must list {num_layers} layers, got {types!r:.200}"
            )
        types = types[:num_layers]
    elif family == "gemma3_text":
        pattern = count(config, "sliding_window_pattern", 6)
        types = [
            "sliding_attention" if (i + 1) % pattern else "full_attention"
            for i in range(num_layers)
        ]
    elif family in ONE_WINDOW:
        types = ["full_attention" if window is None else "sliding_attention"] * num_layers
    else:
        first = num_layers
        if window is not None:
            first = min(num_layers, count(config, "max_window_layers", 28, least=0))
        types = ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    known = {"full_attention": None, "sliding_attention": window}
    for kind in types:
        if not isinstance(kind, str) or kind not in known:
            raise UnsupportedModelError(f"layer_types has {kind!r}; known are {', '.join(known)}")
        if kind == "sliding_attention" and window is None:
            raise MalformedCheckpointError(
                "layer_types has sliding_attention, but there is no window"
            )
        if kind == "full_attention" and family in ONE_WINDOW and window is not None:
            raise UnsupportedModelError(
                f"layer_types mixes layers, which {family} does not compute"
            )
    return tuple(known[kind] for kind in types)


def _window(config: Mapping[str, Any]) -> int | None:
    if config.get("sliding_window", 4096) is None:
        return None
    return count(config, "sliding_window", 4096)
