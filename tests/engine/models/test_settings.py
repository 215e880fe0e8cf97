"""What is read from a config.json, in the forms of several years, and what is refused by name."""

import json

import pytest

from engine.models.settings import DecoderSettings
from engine.weights import MalformedCheckpointError, UnsupportedModelError
from tests.engine.models.checkpoints import CLASSES, CONFIGS

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}


def config(name, **changes):
    """config.json as transformers writes it; a change to `...` takes the key away."""
    built = CONFIGS[name]()
    read = json.loads(built.to_json_string()) | {"architectures": [CLASSES[type(built)].__name__]}
    return {key: value for key, value in (read | changes).items() if value is not ...}


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_are_those_that_transformers_reads(name):
    built = CONFIGS[name]()
    found = DecoderSettings.from_config(config(name))
    assert found.num_layers == built.num_hidden_layers
    assert (found.num_heads, found.num_kv_heads) == (6, 2)
    assert found.head_dim == (getattr(built, "head_dim", None) or 8)
    assert found.rope_theta == built.rope_parameters["rope_theta"]
    assert found.tie_word_embeddings == built.tie_word_embeddings
    assert found.rms_norm_eps == built.rms_norm_eps


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("llama", {}, (None, None)),
        ("mistral, no window", {}, (None, None)),
        ("mistral, window of 11", {}, (11, 11)),
        ("mistral, window of 11", {"sliding_window": ...}, (4096, 4096)),
        ("qwen2", {"sliding_window": 5}, (None, None)),
        ("qwen2, window of 9 in the second layer", {}, (None, 9)),
        ("qwen2, window of 9 in the second layer", {"layer_types": ...}, (None, 9)),
        (
            "qwen2, window of 9 in the second layer",
            {"layer_types": ..., "max_window_layers": 0},
            (9, 9),
        ),
        (
            "qwen2, window of 9 in the second layer",
            {"layer_types": ["sliding_attention", "full_attention"]},
            (9, None),
        ),
    ],
)
def test_each_layer_has_its_window(name, changes, windows):
    assert DecoderSettings.from_config(config(name, **changes)).sliding_windows == windows


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}},
        {"rope_parameters": ..., "rope_theta": 5e5},
        {"rope_parameters": ..., "rope_theta": 500000, "rope_scaling": None},
        {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
    ids=str,
)
def test_the_base_of_the_angles_is_read_from_every_form(changes):
    assert DecoderSettings.from_config(config("llama", **changes)).rope_theta == 500_000.0


def test_the_stretching_of_llama_3_is_read_from_both_forms():
    new = config("llama", rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    old = config("llama", rope_parameters=..., rope_scaling=LLAMA3, rope_theta=5e5)
    settings = DecoderSettings.from_config(new)
    assert settings == DecoderSettings.from_config(old)
    assert settings.rope_theta == 500_000.0
    assert settings.rope_scaling.original_max_position_embeddings == 64


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({"rope_parameters": LONGROPE}, 64),
        ({"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}, 32),
        ({"rope_parameters": LONGROPE | {"original_max_position_embeddings": 512}}, 256),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 256),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 256),
    ],
    ids=str,
)
def test_a_sequence_ends_where_the_angles_of_its_cached_keys_would_change(changes, longest):
    settings = DecoderSettings.from_config(config("llama", **changes))
    assert settings.max_position_embeddings == longest


def test_phi_3_says_longrope_by_its_first_name_too():
    named = [
        config("phi3", rope_parameters=LONGROPE | {"rope_type": name}, sliding_window=9)
        for name in ("longrope", "su")
    ]
    first, second = map(DecoderSettings.from_config, named)
    assert first == second
    assert first.sliding_windows == (9, 9)
    with pytest.raises(UnsupportedModelError, match="yarn"):
        DecoderSettings.from_config(config("phi3", rope_parameters={"rope_type": "yarn"}))


def test_absent_settings_have_the_defaults_of_their_family():
    absent = ("rope_parameters", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act")
    changes = dict.fromkeys((*absent, "tie_word_embeddings", "attention_bias"), ...)
    llama = DecoderSettings.from_config(config("llama", **changes))
    assert (llama.rope_theta, llama.num_kv_heads, llama.head_dim) == (10_000.0, 6, 8)
    assert (llama.rms_norm_eps, llama.tie_word_embeddings, llama.qkv_bias) == (1e-6, False, False)
    assert DecoderSettings.from_config(config("qwen3", **changes)).head_dim == 128
    phi3 = DecoderSettings.from_config(config("phi3", **changes, sliding_window=...))
    assert (phi3.rms_norm_eps, phi3.sliding_windows) == (1e-5, (None, None))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": [7]}, "7"),
        ({"model_type": "mistral"}, "model_type 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act.*'gelu'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type.*'proportional'"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_type.*'su'"),
        (
            {"rope_parameters": ..., "rope_scaling": {"type": "linear", "beta_fast": 2.0}},
            "beta_fast",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "finetuned": True}}, "finetuned"),
        ({"rope_parameters": {"rope_type": ["default"]}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 7}, "head_dim.*7"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention", {}]}, "layer_types"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        DecoderSettings.from_config(config("llama", **changes))


def test_a_mistral_with_mixed_layers_is_refused():
    mixed = {"layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(UnsupportedModelError, match="mixes"):
        DecoderSettings.from_config(config("mistral, window of 11", **mixed))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ...}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size.*-1"),
        ({"num_hidden_layers": True}, "num_hidden_layers.*True"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers.*'2'"),
        ({"intermediate_size": 2**40}, "intermediate_size"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta.*'big'"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "factor.*None"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor.*None"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_theta.*1"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor.*None"),
        ({"rope_parameters": LONGROPE | {"short_factor": [1.0] * 3}}, "short_factor.*4.*3"),
        ({"rope_parameters": LONGROPE | {"short_factor": [1.0, 0.0]}}, "short_factor.*0.0"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "window"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes, named):
    with pytest.raises(MalformedCheckpointError, match=named):
        DecoderSettings.from_config(config("llama", **changes))
