"""Small tokenizers of the kinds that checkpoints carry, written as checkpoint folders."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ["<s>", "</s>", "[INST]", "[/INST]"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}[INST] {{ message['content'] | trim }} [/INST]{% endif %}"
    "{% endfor %}"
)
CHARACTERS = [*"▁ehtaoinsr.,!?\n<>/[]|_ISNTu", "日", "本", "語", "�"]


def byte_level() -> Tokenizer:
    """GPT-2's kind: tokens spell bytes; a character of several bytes is several tokens."""
    vocabulary = {text: i for i, text in enumerate(SPECIAL + sorted(ByteLevel.alphabet()))}
    merges = [("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer)


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: words begin with ▁; a character outside the vocabulary is its bytes."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS]
    vocabulary = {text: i for i, text in enumerate(pieces)}
    # the last merge spells a special token, as some converted vocabularies do
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("<", "s"), ("<s", ">")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_added(tokenizer)


def unigram() -> Tokenizer:
    """SentencePiece's other kind: pieces have scores, and a special token is a piece as well."""
    pieces = ["<unk>", *SPECIAL, *CHARACTERS, "▁the", "▁t", "he"]
    tokenizer = Tokenizer(models.Unigram([(text, -float(i)) for i, text in enumerate(pieces)], 0))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_added(tokenizer)


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "unigram": unigram}


def write(folder: Path, tokenizer: Tokenizer, *, template: str | None = TEMPLATE, **config) -> Path:
    """A checkpoint folder without weights, enough for both our loader and transformers'."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    model_config = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size() + 3,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.token_to_id("</s>"),
    }
    (folder / "config.json").write_text(json.dumps(model_config))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer
