"""What a checkpoint folder's files say about its tokenizer, gathered from the four that say it.

Knows no text and no ids beyond the named tokens'.

    TokenizerError      a file is missing or cannot be used; the message names it
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from engine.config_defaults import sizes_by_default

# a named token of tokenizer_config.json; also a variable of the chat template
_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerError(ValueError):
    """A checkpoint folder's tokenizer files cannot be used; the message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """All of a tokenizer that its folder holds."""

    rust: RustTokenizer
    vocab_size: int  # of the model's embedding, which may be larger than the vocabulary
    max_model_len: int
    eos_token_ids: frozenset[int]
    named_tokens: Mapping[str, str]  # bos_token and so on: their text
    chat_template: str | None
    tool_template: str | None  # instead of it, for chats with tools

    @classmethod
    def read(cls, folder: Path) -> "TokenizerFiles":
        """Raises TokenizerError."""
        model_config = _read_json(folder / "config.json", required=True)
        model_config = model_config.get("text_config") or model_config
        if "vocab_size" not in model_config or _length_name(model_config) not in model_config:
            model_config = sizes_by_default(folder) | model_config
        generation_config = _read_json(folder / "generation_config.json")
        config = _read_json(folder / "tokenizer_config.json")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} is missing")
        try:
            rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        rust.no_truncation()
        rust.no_padding()
        named = {
            name: text for name in _NAMED_TOKENS if (text := _content(config.get(name))) is not None
        }
        _add_missing_tokens(rust, config, named)
        templates = _chat_templates(folder, config)
        return cls(
            rust=rust,
            vocab_size=_positive_int(model_config, "vocab_size", folder),
            max_model_len=_positive_int(model_config, _length_name(model_config), folder),
            eos_token_ids=_eos_token_ids(rust, generation_config, model_config, named),
            named_tokens=named,
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
        )


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise TokenizerError(f"{path} is missing")
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return value


def _content(token: Any) -> str | None:
    """The text of a token in tokenizer_config.json: a string, or an object with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _positive_int(config: dict[str, Any], name: str, folder: Path) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise TokenizerError(f"{folder / 'config.json'}: {name} must be at least 1, got {value!r}")
    return value


def _length_name(config: dict[str, Any]) -> str:
    """GPT-2 and what came of it (GPT-J, CodeGen, GPTBigCode) have a name of their own for it."""
    return "n_positions" if "n_positions" in config else "max_position_embeddings"


def _add_missing_tokens(
    rust: RustTokenizer, config: dict[str, Any], named: Mapping[str, str]
) -> None:
    """Add what tokenizer_config.json names and tokenizer.json lacks, in the order of ids."""
    known = {token.content for token in rust.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for _, flags in sorted(listed.items(), key=lambda item: int(item[0])):
        if flags["content"] not in known:
            rust.add_tokens([AddedToken(**flags)])
            known.add(flags["content"])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    for text in [*named.values(), *map(_content, extra)]:
        if text is not None and text not in known:
            rust.add_special_tokens([text])
            known.add(text)


def _eos_token_ids(
    rust: RustTokenizer,
    generation_config: dict[str, Any],
    model_config: dict[str, Any],
    named: Mapping[str, str],
) -> frozenset[int]:
    """The ids that end a generation: the generation config's, and the tokenizer's own.

    Both, because chat checkpoints are known to name the end of a turn in only one of the two.
    """
    listed = generation_config.get("eos_token_id", model_config.get("eos_token_id"))
    ids = {listed} if isinstance(listed, int) else set(listed or ())
    if "eos_token" in named:
        ids.add(rust.token_to_id(named["eos_token"]))
    return frozenset(ids)


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name, as transformers reads them: a file goes before what the config holds."""
    listed = config.get("chat_template")
    templates = {"default": listed} if isinstance(listed, str) else {}
    if isinstance(listed, list):
        templates = {entry["name"]: entry["template"] for entry in listed}
    path = folder / "chat_template.jinja"
    if path.is_file():
        templates = {"default": path.read_text("utf-8")}
    for path in (folder / "additional_chat_templates").glob("*.jinja"):
        templates[path.stem] = path.read_text("utf-8")
    return templates
