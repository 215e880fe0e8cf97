"""One tiny random model of each decoder family of transformers, and those that are refused."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

WINDOW = 7
SIZE = {  # each family takes what it knows of it
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MLA = {
    "head_dim": ...,
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
GROUPED_EXPERTS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
# model_type -> what differs from SIZE; `...` leaves a setting out
TIER_2 = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "codegen": {"rotary_dim": 4},
    "cohere": {},
    "cohere2": {"layer_types": MIXED},
    "deepseek_v2": MLA | GROUPED_EXPERTS,
    "deepseek_v3": MLA | GROUPED_EXPERTS,
    "dots1": GROUPED_EXPERTS | {"layer_types": MIXED, "n_shared_experts": 1},
    "ernie4_5": {},
    "exaone4": {"layer_types": MIXED},
    "gemma": {},
    "gemma2": {"layer_types": MIXED, "attn_logit_softcapping": 2.0},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 151,
        "hidden_size_per_layer_input": 8,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": GROUPED_EXPERTS,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": {"layer_types": MIXED},
    "gptj": {"rotary_dim": 4},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 3.0},
    "granitemoe": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "minicpm3": MLA,
    "minimax_m2": {},
    "mixtral": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"layer_types": MIXED},
    "olmoe": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48},
    "persimmon": {},
    "phi": {},
    "phimoe": {"sliding_window": None},
    "qwen2_moe": {},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "stablelm": {},
    "starcoder2": {},
}


def _config(model_type: str, **changes: object) -> PreTrainedConfig:
    default = AutoConfig.for_model(model_type)
    known = {"head_dim", *default.to_dict(), *default.attribute_map}
    settings = {key: value for key, value in SIZE.items() if key in known} | changes
    settings = {key: value for key, value in settings.items() if value is not ...}
    return AutoConfig.for_model(model_type, **settings, attn_implementation="eager")


def build(model_type: str, **changes: object) -> PreTrainedModel:
    config = _config(model_type, **changes)
    return _drawn(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def build_with_vision(model_type: str) -> PreTrainedModel:
    text, vision, tied = TEXT_PARTS[model_type]
    config = AutoConfig.for_model(
        model_type,
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    return _drawn(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)], config)


def _drawn(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(len(config.model_type))
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # biases, norms and sinks begin as 0 and 1, and would hide that they are left out
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.3
    return model


def write_config(model_type: str, folder: Path, **changes: object) -> str:
    """Save a family's config.json beside weights that nobody will read; the class it names."""
    config = _config(model_type, **changes)
    name = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    config.architectures = [name]
    config.save_pretrained(folder)
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    return name


def write(model_type: str, folder: Path, **changes: object) -> PreTrainedModel:
    """Save a family's model to a folder; the model, in float32, is what it must be equal to."""
    model = build(model_type, **changes)
    model.save_pretrained(folder)
    return model


TEXT = {  # of a decoder inside a model of images
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# model_type -> the text part's settings, the vision part's, and whether one matrix is used twice
TEXT_PARTS = {
    "gemma3": (
        TEXT | {"layer_types": MIXED, "sliding_window": WINDOW},
        VISION | {"model_type": "siglip_vision_model"},
        True,
    ),
    "gemma4": (TEXT | TIER_2["gemma4_text"] | {"sliding_window": WINDOW}, VISION, True),
    "internvl": (TEXT | {"model_type": "qwen2", "head_dim": 8}, VISION, False),
    "llava": (TEXT | {"model_type": "llama"}, VISION, False),
    "mistral3": (
        TEXT | {"model_type": "mistral", "sliding_window": WINDOW},
        VISION | {"model_type": "pixtral"},
        False,
    ),
}
# why a family is refused, as docs/models.md says it -> what the error says
REASONS = {
    "attends in code of its own": "must ask transformers' attention interface.* 0 calls",
    "asks for attention twice a layer": "must ask transformers' attention interface.* 4 calls",
    "has layers with a state of their own": "layer type '(conv|linear_attention)'",
    "attends in chunks": "layer type 'chunked_attention'",
    "does not attend to just the tokens before": "logits over a paged cache differ",
}
# model_type -> what differs from SIZE, and the reason
REFUSED = {
    "bert": ({"is_decoder": False}, "does not attend to just the tokens before"),
    "bloom": ({}, "attends in code of its own"),
    "diffllama": ({}, "asks for attention twice a layer"),
    "doge": ({}, "does not attend to just the tokens before"),
    "falcon": ({"head_dim": ...}, "attends in code of its own"),
    "gpt_neo": (
        {"attention_types": [[["global", "local", "global"], 1]]},
        "attends in code of its own",
    ),
    "lfm2": (
        {"layer_types": ["conv", "full_attention", "conv"]},
        "has layers with a state of their own",
    ),
    "llama4_text": ({}, "attends in chunks"),
    "mamba": ({}, "has layers with a state of their own"),
    "minimax": ({}, "has layers with a state of their own"),
    "mpt": ({}, "attends in code of its own"),
    "qwen3_next": ({}, "has layers with a state of their own"),
    "recurrent_gemma": ({}, "has layers with a state of their own"),
    "rwkv": ({}, "attends in code of its own"),
    "xglm": ({}, "attends in code of its own"),
}
