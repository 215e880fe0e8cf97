"""What a config.json says about rotary positions, in the forms of several years.

Read as transformers reads it (`modeling_rope_utils`); what it does not say, or this engine does not
compute, is refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.checkpoint_files import shown
from engine.layers.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from engine.models.config_values import count, flag, positive
from engine.weights import MalformedCheckpointError, UnsupportedModelError

SETTINGS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}  # fmt: skip
OLD_CONTEXT = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    theta: float
    partial_rotary_factor: float  # the part of each head that is turned
    scaling: RopeScaling | None
    longest: int  # tokens of a sequence whose cached keys stay right as it grows


def read_ropes(config: Mapping[str, Any], family: str) -> tuple[RopeSettings, RopeSettings]:
    """Of layers without a window, and of those with one: two in Gemma 3 alone.

    Raises UnsupportedModelError or MalformedCheckpointError.
    """
    if family != "gemma3_text":
        rope = _rope(config, family)
        return rope, rope
    given = config.get("rope_parameters") or {}
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(given, dict) or not given.keys() <= {*kinds}:
        raise UnsupportedModelError(
            f"rope_parameters must be of {' and '.join(kinds)}, got {shown(given)}"
        )
    both = {
        name: config[name] for name in ("max_position_embeddings", OLD_CONTEXT) if name in config
    }
    both.setdefault("max_position_embeddings", 131072)
    # of Gemma 3 the older key goes before the newer one
    new, old = given.get("full_attention"), config.get("rope_scaling")
    whole = {"rope_theta": config.get("rope_theta", 1e6), "rope_scaling": new}
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    ropes = (
        _rope(both | whole | {"rope_parameters": old}, family),
        _rope(both | local | {"rope_parameters": given.get("sliding_attention")}, family),
    )
    longest = min(rope.longest for rope in ropes)
    return replace(ropes[0], longest=longest), replace(ropes[1], longest=longest)


def _rope(config: Mapping[str, Any], family: str) -> RopeSettings:
    read = _gathered(config)
    partial = positive(read, "partial_rotary_factor", 1.0)
    if partial != 1.0 and (family != "phi3" or partial > 1.0):
        raise UnsupportedModelError(
            f"partial_rotary_factor must be 1: heads are turned as a whole, got {partial}"
        )
    theta = positive(read, "rope_theta", 10000.0)
    kind = read.get("rope_type", read.get("type", "default"))
    if family == "phi3" and kind == "su":
        kind = "longrope"
    if not isinstance(kind, str) or kind not in SETTINGS or (family, kind) == ("phi3", "yarn"):
        raise UnsupportedModelError(f"rope_type must be of {', '.join(SETTINGS)}, got {kind!r}")
    general = {"rope_type", "type", "rope_theta", "partial_rotary_factor", OLD_CONTEXT}
    if unknown := read.keys() - general - set(SETTINGS[kind]):
        raise UnsupportedModelError(f"rope settings that are not known: {sorted(unknown)}")
    longest = count(config, "max_position_embeddings")
    old_context = count(read, OLD_CONTEXT, longest, longest)
    scaling: RopeScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(factor=positive(read, "factor"))
    elif kind == "llama3":
        scaling = _llama3(read, old_context)
    elif kind == "yarn":
        scaling = _yarn(read, theta, longest, old_context)
    elif kind == "longrope":
        scaling = _longrope(read, longest, old_context)
        longest = min(longest, old_context)
    # dynamic scaling begins past max_position_embeddings, where no sequence gets
    return RopeSettings(
        theta=theta, partial_rotary_factor=partial, scaling=scaling, longest=longest
    )


def _gathered(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings from transformers 5's key, the older one, and the places before those."""
    read: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if given is not None and not isinstance(given, dict):
            raise MalformedCheckpointError(f"{name} must be an object, got {given!r:.200}")
        read |= given or {}
    for name in ("rope_theta", "partial_rotary_factor"):
        read.setdefault(name, config.get(name))
    if OLD_CONTEXT in config:
        read[OLD_CONTEXT] = config[OLD_CONTEXT]
    return read


def _llama3(read: Mapping[str, Any], old_context: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=positive(read, "factor"),
        low_freq_factor=positive(read, "low_freq_factor"),
        high_freq_factor=positive(read, "high_freq_factor"),
        original_max_position_embeddings=old_context,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise MalformedCheckpointError(
            f"high_freq_factor must be over low_freq_factor, got {scaling}"
        )
    return scaling


def _yarn(read: Mapping[str, Any], theta: float, longest: int, old_context: int) -> YarnScaling:
    if theta <= 1.0:
        raise MalformedCheckpointError(f"rope_theta must be over 1, got {theta}")
    factor = positive(read, "factor", longest / old_context)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = magnitude(1.0)
    if read.get("mscale") and read.get("mscale_all_dim"):
        attention_factor = magnitude(positive(read, "mscale"))
        attention_factor /= magnitude(positive(read, "mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        beta_fast=positive(read, "beta_fast", 32.0),
        beta_slow=positive(read, "beta_slow", 1.0),
        original_max_position_embeddings=old_context,
        truncate=flag(read, "truncate", True),
        attention_factor=positive(read, "attention_factor", attention_factor),
    )


def _longrope(read: Mapping[str, Any], longest: int, old_context: int) -> LongRopeScaling:
    factor = positive(read, "factor", longest / old_context)
    attention_factor = 1.0
    if factor > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(old_context))
    short = read.get("short_factor")
    if not isinstance(short, list) or not short:
        raise MalformedCheckpointError(f"short_factor must be a list, got {short!r:.200}")
    return LongRopeScaling(
        short_factor=tuple(positive({"short_factor": each}, "short_factor") for each in short),
        attention_factor=positive(read, "attention_factor", attention_factor),
    )
