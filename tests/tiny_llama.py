"""A Llama checkpoint small enough to be written and served within a second, without torch.

Its weights are random, so its text is noise; all that a service does with a model (loading,
tokenising, templates, batching, counting, stopping) works on it as on a real one.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 384
HIDDEN_SIZE = 64
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 16
INTERMEDIATE_SIZE = 128
MAX_MODEL_LEN = 512

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog and runs into the garden",
    "a job is a row, a message is the number of a job on its way to a worker",
    "the engine knows sequences, tokens and blocks, and it has never heard of a queue",
    "what is the capital of the country, and how many people live there?",
    "once upon a time there was a miller who ground tokens instead of grain",
)


def write_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    num_layers: int = NUM_LAYERS,
    special_tokens: tuple[str, ...] = SPECIAL_TOKENS,
) -> Path:
    """Write the checkpoint to `folder` (made if missing); the same seed writes the same weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(seed, num_layers), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(special_tokens).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(folder / "config.json", _config(num_layers))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_MODEL_LEN,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
        },
    )
    return folder


def _config(num_layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def _weights(seed: int, num_layers: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        # 1/sqrt(columns) keeps activations near 1, so that logits differ clearly between tokens
        return generator.normal(0.0, columns**-0.5, (rows, columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": generator.normal(size=(VOCAB_SIZE, HIDDEN_SIZE)).astype(
            np.float32
        ),
        "model.norm.weight": np.ones(HIDDEN_SIZE, np.float32),
        "lm_head.weight": matrix(VOCAB_SIZE, HIDDEN_SIZE),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": np.ones(HIDDEN_SIZE, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(HIDDEN_SIZE, np.float32),
            prefix + "self_attn.q_proj.weight": matrix(NUM_HEADS * HEAD_DIM, HIDDEN_SIZE),
            prefix + "self_attn.k_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            prefix + "self_attn.v_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN_SIZE, NUM_HEADS * HEAD_DIM),
            prefix + "mlp.gate_proj.weight": matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            prefix + "mlp.up_proj.weight": matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN_SIZE, INTERMEDIATE_SIZE),
        }
    return weights


def _tokenizer(special_tokens: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def _write_json(file: Path, value: dict[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
