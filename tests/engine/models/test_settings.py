"""What is read from a config.json, in the forms of several years, and what is refused by name."""

import json

import pytest

from engine.layers.rotary import LinearScaling
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
    theta = built.rope_parameters.get("full_attention", built.rope_parameters)["rope_theta"]
    assert found.rope.theta == theta
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
    assert DecoderSettings.from_config(config("llama", **changes)).rope.theta == 500_000.0


def test_the_stretching_of_llama_3_is_read_from_both_forms():
    new = config("llama", rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    old = config("llama", rope_parameters=..., rope_scaling=LLAMA3, rope_theta=5e5)
    settings = DecoderSettings.from_config(new)
    assert settings == DecoderSettings.from_config(old)
    assert settings.rope.theta == 500_000.0
    assert settings.rope.scaling.original_max_position_embeddings == 64


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
    assert (llama.rope.theta, llama.num_kv_heads, llama.head_dim) == (10_000.0, 6, 8)
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


GEMMA = "gemma3, windows of 9 in two of three layers"


def test_gemma_3_is_read_as_it_was_first_written_too():
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    old = {
        "rope_parameters": ...,
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "layer_types": ...,
        "sliding_window_pattern": 2,
    }
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    settings = DecoderSettings.from_config(config(GEMMA, rope_parameters=new, layer_types=kinds))
    assert settings == DecoderSettings.from_config(config(GEMMA, **old))
    assert (settings.rope.theta, settings.rope.scaling) == (5e5, LinearScaling(factor=8.0))
    assert (settings.local_rope.theta, settings.local_rope.scaling) == (2e4, None)
    both = {"rope_parameters": new, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    settings = DecoderSettings.from_config(config(GEMMA, **both))
    assert settings.rope.scaling == LinearScaling(factor=4.0)


def test_absent_settings_of_gemma_3_and_of_experts_are_those_of_transformers():
    absent = ("rope_parameters", "num_key_value_heads", "head_dim", "rms_norm_eps", "layer_types",
              "query_pre_attn_scalar", "sliding_window", "hidden_activation", "attention_bias",
              "tie_word_embeddings", "max_position_embeddings")  # fmt: skip
    changes = dict.fromkeys(absent, ...) | {"num_attention_heads": 8, "num_hidden_layers": 7}
    gemma = DecoderSettings.from_config(config(GEMMA, **changes))
    assert (gemma.rope.theta, gemma.local_rope.theta) == (1e6, 1e4)
    assert (gemma.num_kv_heads, gemma.head_dim, gemma.attention_scale) == (4, 256, 1 / 16)
    assert (gemma.activation, gemma.tie_word_embeddings) == ("gelu", True)
    assert gemma.sliding_windows == (4096,) * 5 + (None, 4096)
    assert gemma.max_position_embeddings == 131072
    absent = ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
              "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step")  # fmt: skip
    experts = DecoderSettings.from_config(config("qwen3_moe", **dict.fromkeys(absent, ...))).experts
    assert (experts.num_experts, experts.num_experts_per_tok) == (128, 8)
    assert (experts.intermediate_size, experts.norm_topk_prob) == (768, False)
    assert experts.layers == {0, 1}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"decoder_sparse_step": 2}, {1, 3}),
        ({"mlp_only_layers": [0, 3]}, {1, 2}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {3}),
        ({"num_local_experts": ..., "num_experts": 7}, {0, 1, 2, 3}),
    ],
)
def test_each_layer_has_experts_or_none(changes, layers):
    changed = config("qwen3_moe", num_hidden_layers=4, **changes)
    assert DecoderSettings.from_config(changed).experts.layers == layers


@pytest.mark.parametrize(
    "changes",
    [{"num_local_experts": 0}, {"mlp_only_layers": [0, 1]}, {"decoder_sparse_step": 3}],
    ids=str,
)
def test_a_model_whose_layers_have_no_experts_is_a_plain_one(changes):
    assert DecoderSettings.from_config(config("qwen3_moe", **changes)).experts is None


@pytest.mark.parametrize(
    ("name", "changes", "error", "named"),
    [
        (GEMMA, {"hidden_activation": "gelu"}, UnsupportedModelError, "hidden_activation.*'gelu'"),
        (GEMMA, {"attn_logit_softcapping": 2.0}, UnsupportedModelError, "attn_logit.*2.0"),
        (GEMMA, {"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional"),
        (GEMMA, {"rope_parameters": {"rope_theta": 1e4}}, UnsupportedModelError, "rope_theta"),
        (GEMMA, {"rope_parameters": [1]}, UnsupportedModelError, "rope_parameters"),
        (GEMMA, {"final_logit_softcapping": 0}, MalformedCheckpointError, "final_logit.*0"),
        (GEMMA, {"query_pre_attn_scalar": 0}, MalformedCheckpointError, "query_pre_attn_scalar"),
        (GEMMA, {"sliding_window": None}, MalformedCheckpointError, "no window"),
        ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}, UnsupportedModelError, "hidden_act"),
        (
            "qwen3_moe",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            UnsupportedModelError,
            "mixes",
        ),
        ("qwen3_moe", {"num_experts": 4}, MalformedCheckpointError, "num_local_experts differ.*4"),
        ("qwen3_moe", {"num_experts_per_tok": 6}, MalformedCheckpointError, "at most 5.*6"),
        ("qwen3_moe", {"mlp_only_layers": 1}, MalformedCheckpointError, "mlp_only_layers.*1"),
        ("qwen3_moe", {"mlp_only_layers": ["a"]}, MalformedCheckpointError, "mlp_only_layers.*'a'"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, MalformedCheckpointError, "decoder_sparse_step"),
    ],
)
def test_odd_settings_of_gemma_3_and_of_experts_are_refused_by_name(name, changes, error, named):
    with pytest.raises(error, match=named):
        DecoderSettings.from_config(config(name, **changes))


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
