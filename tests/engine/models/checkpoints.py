"""Tiny checkpoints of each family with random weights, written by transformers."""

from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 211
SIZE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}
LAYERS_3 = SIZE | {"num_hidden_layers": 3}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZE),
    "llama, tied, with biases and wide heads": lambda: LlamaConfig(
        **SIZE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=16
    ),
    "llama, stretched like 3.1": lambda: LlamaConfig(
        **SIZE,
        head_dim=16,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama, stretched linearly": lambda: LlamaConfig(
        **SIZE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "llama, to be stretched past its context": lambda: LlamaConfig(
        **SIZE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    ),
    "qwen2, stretched by yarn": lambda: Qwen2Config(
        **SIZE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama, stretched by yarn with settings of its own": lambda: LlamaConfig(
        **SIZE,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    ),
    "phi3": lambda: Phi3Config(**SIZE, pad_token_id=0),
    "phi3, window of 11, part of each head turned by longrope, tied": lambda: Phi3Config(
        **SIZE,
        pad_token_id=0,
        sliding_window=11,
        tie_word_embeddings=True,
        original_max_position_embeddings=128,
        partial_rotary_factor=0.75,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.5, 3.0],
            "long_factor": [2.0, 7.0, 9.0],
        },
    ),
    "mistral, window of 11": lambda: MistralConfig(**SIZE, sliding_window=11),
    "mistral, no window": lambda: MistralConfig(**SIZE, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZE, tie_word_embeddings=False),
    "qwen2, tied": lambda: Qwen2Config(**SIZE, tie_word_embeddings=True),
    "qwen2, window of 9 in the second layer": lambda: Qwen2Config(
        **SIZE, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SIZE, head_dim=10),
    "qwen3, tied, with biases": lambda: Qwen3Config(
        **SIZE, head_dim=8, tie_word_embeddings=True, attention_bias=True
    ),
    "gemma3, windows of 9 in two of three layers": lambda: Gemma3TextConfig(
        **LAYERS_3, head_dim=16, pad_token_id=0, sliding_window=9, layer_types=MIXED
    ),
    "gemma3, stretched, soft caps, a scale of its own, untied, with biases": lambda: (
        Gemma3TextConfig(
            **LAYERS_3,
            head_dim=10,
            pad_token_id=0,
            sliding_window=5,
            layer_types=MIXED,
            attention_bias=True,
            tie_word_embeddings=False,
            query_pre_attn_scalar=31,
            final_logit_softcapping=3.0,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 100.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            },
        )
    ),
    "gemma3, global angles stretched by yarn, local ones slowed": lambda: Gemma3TextConfig(
        **LAYERS_3,
        head_dim=16,
        pad_token_id=0,
        sliding_window=9,
        layer_types=MIXED,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "linear", "rope_theta": 10.0, "factor": 2.0},
        },
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZE, **EXPERTS, norm_topk_prob=True),
    "qwen3_moe, a layer without experts, windows, weights as they are, tied": lambda: (
        Qwen3MoeConfig(
            **LAYERS_3,
            **EXPERTS,
            head_dim=10,
            mlp_only_layers=[1],
            use_sliding_window=True,
            sliding_window=11,
            tie_word_embeddings=True,
            attention_bias=True,
        )
    ),
    "qwen3_moe, experts in every second layer": lambda: Qwen3MoeConfig(
        **LAYERS_3, **EXPERTS, decoder_sparse_step=2
    ),
}
CLASSES = {
    Gemma3TextConfig: Gemma3ForCausalLM,
    LlamaConfig: LlamaForCausalLM,
    MistralConfig: MistralForCausalLM,
    Phi3Config: Phi3ForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
    Qwen3MoeConfig: Qwen3MoeForCausalLM,
}


def write_checkpoint(name: str, folder: Path) -> PreTrainedModel:
    """Save a family's model to a folder; the model, in float32, is what it must be equal to."""
    config = CONFIGS[name]()
    torch.manual_seed(len(name))
    model = CLASSES[type(config)](config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # biases and norms begin as 0 and 1, and would hide that they are left out
            if key.endswith("bias") or "norm" in key:
                parameter += torch.randn_like(parameter) * 0.3
    model.save_pretrained(folder)
    return model
