"""What a Hugging Face config.json says about a decoder of the Llama family.

Llama (SmolLM too), Mistral, Phi-3, Qwen2 and Qwen3 are settings of one decoder; the differences
stand here and in `rope`. A setting that the decoder does not compute is refused by name, never
ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.layers.rotary import LongRopeScaling, RopeScaling
from engine.models.config_values import count, flag, positive
from engine.models.rope import read_rope
from engine.weights import MalformedCheckpointError, UnsupportedModelError

MAX_LAYERS = 10_000  # what is made of each before its tensors are looked at is small
MAX_HEAD_DIM = 1 << 16  # likewise of a head

FAMILY_OF = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens
    rms_norm_eps: float
    rotary_dim: int  # the part of each head that is turned
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool  # of attention's output projection
    mlp_bias: bool
    qk_norm: bool
    fused: bool  # the checkpoint has q, k and v, and gate and up, in one tensor each
    sliding_windows: tuple[int | None, ...]  # of each layer; None: the whole sequence

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "DecoderSettings":
        """Read a config.json. Raises UnsupportedModelError or MalformedCheckpointError."""
        family = _family(config)
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedModelError(f"hidden_act must be silu, got {activation!r}")
        num_layers = count(config, "num_hidden_layers", most=MAX_LAYERS)
        num_heads = count(config, "num_attention_heads")
        default_kv_heads = 8 if family == "mistral" else num_heads
        num_kv_heads = count(config, "num_key_value_heads", default_kv_heads, num_heads)
        if num_heads % num_kv_heads:
            raise MalformedCheckpointError(
                f"num_attention_heads ({num_heads}) must be a multiple of "
                f"num_key_value_heads ({num_kv_heads})"
            )
        hidden_size = count(config, "hidden_size")
        split = max(1, hidden_size // num_heads)
        default_head_dim = 128 if family == "qwen3" else split
        head_dim = count(config, "head_dim", default_head_dim, split, most=MAX_HEAD_DIM)
        if head_dim % 2:
            raise UnsupportedModelError(f"head_dim must be even, got {head_dim}")
        rope = read_rope(config, family)
        rotary_dim = int(head_dim * rope.partial_rotary_factor)
        if rotary_dim % 2 or rotary_dim == 0:
            raise UnsupportedModelError(f"the turned part of a head must be even, got {rotary_dim}")
        if isinstance(rope.scaling, LongRopeScaling):
            num_factors = len(rope.scaling.short_factor)
            if num_factors != rotary_dim // 2:
                raise MalformedCheckpointError(
                    f"short_factor must have {rotary_dim // 2} numbers, got {num_factors}"
                )
        attention_bias = family not in ("mistral", "phi3") and flag(config, "attention_bias")
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
            rotary_dim=rotary_dim,
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            qkv_bias=attention_bias or family == "qwen2",
            out_bias=attention_bias and family != "qwen2",
            mlp_bias=family == "llama" and flag(config, "mlp_bias"),
            qk_norm=family == "qwen3",
            fused=family == "phi3",
            sliding_windows=_sliding_windows(config, family, num_layers),
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


def _sliding_windows(
    config: Mapping[str, Any], family: str, num_layers: int
) -> tuple[int | None, ...]:
    """Mistral, Phi-3: one window for all layers. Qwen: a switch, and the layers it applies to."""
    if family == "llama" or (family == "phi3" and "sliding_window" not in config):
        window = None
    elif family in ("mistral", "phi3"):
        window = _window(config)
    else:
        window = _window(config) if flag(config, "use_sliding_window") else None
    if config.get("layer_types") is not None:
        types = config["layer_types"]
        if not isinstance(types, list) or len(types) < num_layers:
            raise MalformedCheckpointError(
                f"layer_types must list {num_layers} layers, got {types!r:.200}"
            )
        types = types[:num_layers]
    elif family in ("mistral", "phi3"):
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
        if kind == "full_attention" and family in ("mistral", "phi3") and window is not None:
            raise UnsupportedModelError(
                f"layer_types mixes layers, which {family} does not compute"
            )
    return tuple(known[kind] for kind in types)


def _window(config: Mapping[str, Any]) -> int | None:
    if config.get("sliding_window", 4096) is None:
        return None
    return count(config, "sliding_window", 4096)
