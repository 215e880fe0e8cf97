"""What a Hugging Face config.json says about a decoder of the Llama family.

Llama (SmolLM too), Mistral, Qwen2 and Qwen3 are settings of one decoder; the differences stand here
and nowhere else. A setting that the decoder does not compute is refused by name, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.layers.rotary import Llama3Scaling
from engine.weights import MalformedCheckpointError, UnsupportedModelError

FAMILY_OF = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
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
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool  # of attention's output projection
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # of each layer; None: the whole sequence

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "DecoderSettings":
        """Read a config.json. Raises UnsupportedModelError or MalformedCheckpointError."""
        family = _family(config)
        for name in ("quantization_config", "compression_config"):
            if config.get(name):
                raise UnsupportedModelError(f"{name} is not supported: {config[name]!r:.200}")
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedModelError(f"hidden_act must be silu, got {activation!r}")
        num_layers = _count(config, "num_hidden_layers")
        num_heads = _count(config, "num_attention_heads")
        default_kv_heads = 8 if family == "mistral" else num_heads
        num_kv_heads = _count(config, "num_key_value_heads", default_kv_heads, num_heads)
        if num_heads % num_kv_heads:
            raise MalformedCheckpointError(
                f"num_attention_heads ({num_heads}) must be a multiple of "
                f"num_key_value_heads ({num_kv_heads})"
            )
        hidden_size = _count(config, "hidden_size")
        split = max(1, hidden_size // num_heads)
        head_dim = _count(config, "head_dim", 128 if family == "qwen3" else split, split)
        if head_dim % 2:
            raise UnsupportedModelError(f"head_dim must be even, got {head_dim}")
        rope_theta, rope_scaling = _rope(config)
        attention_bias = family != "mistral" and _flag(config, "attention_bias")
        return cls(
            vocab_size=_count(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_count(config, "max_position_embeddings"),
            rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=attention_bias or family == "qwen2",
            out_bias=attention_bias and family != "qwen2",
            mlp_bias=family == "llama" and _flag(config, "mlp_bias"),
            qk_norm=family == "qwen3",
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
    """Mistral: one window for all layers. Qwen: a switch, and the layers it applies to."""
    if family == "llama":
        window = None
    elif family == "mistral":
        window = _window(config)
    else:
        window = _window(config) if _flag(config, "use_sliding_window") else None
    if config.get("layer_types") is not None:
        types = config["layer_types"]
        if not isinstance(types, list) or len(types) < num_layers:
            raise MalformedCheckpointError(
                f"layer_types must list {num_layers} layers, got {types!r:.200}"
            )
        types = types[:num_layers]
    elif family == "mistral":
        types = ["full_attention" if window is None else "sliding_attention"] * num_layers
    else:
        first = num_layers
        if window is not None:
            first = min(num_layers, _count(config, "max_window_layers", 28, least=0))
        types = ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    known = {"full_attention": None, "sliding_attention": window}
    for kind in types:
        if not isinstance(kind, str) or kind not in known:
            raise UnsupportedModelError(f"layer_types has {kind!r}; known are {', '.join(known)}")
        if kind == "sliding_attention" and window is None:
            raise MalformedCheckpointError(
                "layer_types has sliding_attention, but there is no window"
            )
        if kind == "full_attention" and family == "mistral" and window is not None:
            raise UnsupportedModelError("layer_types mixes layers, which Mistral does not compute")
    return tuple(known[kind] for kind in types)


def _window(config: Mapping[str, Any]) -> int | None:
    if config.get("sliding_window", 4096) is None:
        return None
    return _count(config, "sliding_window", 4096)


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Base and stretching of the angles, from transformers 5's key or the older two."""
    read: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if given is not None and not isinstance(given, dict):
            raise MalformedCheckpointError(f"{name} must be an object, got {given!r:.200}")
        read |= given or {}
    for name in ("rope_theta", "partial_rotary_factor"):
        read.setdefault(name, config.get(name))
    if read.pop("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModelError("partial_rotary_factor must be 1: heads are turned as a whole")
    theta = _positive(read, "rope_theta", 10000.0)
    old_kind = read.pop("type", "default")
    kind = read.pop("rope_type", old_kind)
    unknown = read.keys() - {"rope_theta"}
    scaling = None
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=_positive(read, "factor"),
            low_freq_factor=_positive(read, "low_freq_factor"),
            high_freq_factor=_positive(read, "high_freq_factor"),
            original_max_position_embeddings=_count(read, "original_max_position_embeddings"),
        )
        unknown -= set(Llama3Scaling.__slots__)
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise MalformedCheckpointError(
                f"high_freq_factor must be over low_freq_factor, got {scaling}"
            )
    elif kind != "default":
        raise UnsupportedModelError(f"rope_type must be default or llama3, got {kind!r}")
    if unknown:
        raise UnsupportedModelError(f"rope settings that are not known: {sorted(unknown)}")
    return theta, scaling


def _count(
    config: Mapping[str, Any],
    name: str,
    missing: int | None = None,  # what an absent key means
    null: int | None = None,  # what a null means
    *,
    least: int = 1,
) -> int:
    value = config.get(name, missing)
    if value is None:
        value = null
    if type(value) is not int or not least <= value < 2**31:
        raise MalformedCheckpointError(
            f"{name} must be an integer of at least {least}, got {value!r}"
        )
    return value


def _positive(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise MalformedCheckpointError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise MalformedCheckpointError(f"{name} must be true or false, got {value!r}")
    return value
