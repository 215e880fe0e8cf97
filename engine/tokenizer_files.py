"""What a checkpoint folder's files say about its tokenizer, gathered from the four that say it.

Knows no text and no ids beyond the named tokens'.

    TokenizerError      a file is missing or cannot be used; the message names it
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from engine.checkpoint_files import (
    FileFault,
    check_links,
    checked_path,
    read_config,
    read_object,
    read_text,
    shown,
)
from engine.config_defaults import sizes_by_default

CONFIG = "tokenizer_config.json"
MAX_TOKEN_CHARS = 1000  # of a token's text: those of published models have some dozens
MAX_TEMPLATE_BYTES = 1 << 20  # engine.template_sandbox has the limit in characters
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ADDITIONAL = "additional_special_tokens"

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
        try:
            return cls._read(folder)
        except FileFault as error:
            raise TokenizerError(str(error)) from error

    @classmethod
    def _read(cls, folder: Path) -> "TokenizerFiles":
        """Raises TokenizerError or FileFault."""
        check_links(folder)
        model_config = read_config(folder)
        model_config = model_config.get("text_config") or model_config
        if "vocab_size" not in model_config or _length_name(model_config) not in model_config:
            model_config = sizes_by_default(folder) | model_config
        generation_config = _read_if_there(folder, "generation_config.json")
        config = _read_if_there(folder, CONFIG)
        path = checked_path(folder, "tokenizer.json")
        try:
            rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        rust.no_truncation()
        rust.no_padding()
        named = {
            name: text
            for name in _NAMED_TOKENS
            if (text := _content(config.get(name), name)) is not None
        }
        _add_missing_tokens(rust, config, named)
        templates = _chat_templates(folder, config)
        return cls(
            rust=rust,
            vocab_size=_positive_int(model_config, "vocab_size", folder),
            max_model_len=_positive_int(model_config, _length_name(model_config), folder),
            eos_token_ids=_eos_token_ids(rust, folder, generation_config, model_config, named),
            named_tokens=named,
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
        )


def _read_if_there(folder: Path, name: str) -> dict[str, Any]:
    return read_object(folder, name) if os.path.lexists(folder / name) else {}


def _must(name: str, what: str, value: Any) -> TokenizerError:
    return TokenizerError(f"{CONFIG}: {name} must be {what}, got {shown(value)}")


def _content(token: Any, name: str) -> str | None:
    """The text of a token in tokenizer_config.json: a string, or an object with its flags."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not (isinstance(text, str) and len(text) <= MAX_TOKEN_CHARS):
        raise _must(name, f"a text of at most {MAX_TOKEN_CHARS} characters", text)
    return text or None


def _positive_int(config: dict[str, Any], name: str, folder: Path) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise TokenizerError(
            f"{folder / 'config.json'}: {name} must be at least 1, got {shown(value)}"
        )
    return value


def _length_name(config: dict[str, Any]) -> str:
    """GPT-2 and what came of it (GPT-J, CodeGen, GPTBigCode) have a name of their own for it."""
    return "n_positions" if "n_positions" in config else "max_position_embeddings"


def _add_missing_tokens(
    rust: RustTokenizer, config: dict[str, Any], named: Mapping[str, str]
) -> None:
    """Add what tokenizer_config.json names and tokenizer.json lacks, in the order of ids."""
    known = {token.content for token in rust.get_added_tokens_decoder().values()}
    for token in _listed_tokens(config.get("added_tokens_decoder")):
        if token.content not in known:
            rust.add_tokens([token])
            known.add(token.content)
    for text in [*named.values(), *_extra_tokens(config)]:
        if text not in known:
            rust.add_special_tokens([text])
            known.add(text)


def _listed_tokens(listed: Any) -> list[AddedToken]:
    """In the order of their ids."""
    name = "added_tokens_decoder"
    if not isinstance(listed, dict | None):
        raise _must(name, "an object", listed)
    tokens = []
    for key, flags in (listed or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise _must(name, "by token ids", key)
        if not isinstance(flags, dict) or flags.keys() - {"content", "__type", *_FLAGS}:
            raise _must(f"{name}.{key}", f"an object of content, {', '.join(_FLAGS)}", flags)
        if not isinstance(flags.get("content"), str):
            raise _must(f"{name}.{key}.content", "a text", flags.get("content"))
        _content(flags["content"], f"{name}.{key}.content")
        for flag in flags.keys() & {*_FLAGS}:
            if not isinstance(flags[flag], bool):
                raise _must(f"{name}.{key}.{flag}", "true or false", flags[flag])
        kept = {flag: flags[flag] for flag in flags if flag != "__type"}
        tokens.append((int(key), AddedToken(**kept)))
    return [token for _, token in sorted(tokens, key=lambda pair: pair[0])]


def _extra_tokens(config: dict[str, Any]) -> list[str]:
    name = "extra_special_tokens" if config.get("extra_special_tokens") else _ADDITIONAL
    extra = config.get(name) or []
    if isinstance(extra, dict):  # by a name of each token's own
        extra = list(extra.values())
    if not isinstance(extra, list):
        raise _must(name, "a list of tokens", extra)
    texts = (_content(token, name) for token in extra)
    return [text for text in texts if text is not None]


def _eos_token_ids(
    rust: RustTokenizer,
    folder: Path,
    generation_config: dict[str, Any],
    model_config: dict[str, Any],
    named: Mapping[str, str],
) -> frozenset[int]:
    """The ids that end a generation: the generation config's, and the tokenizer's own.

    Both, because chat checkpoints are known to name the end of a turn in only one of the two.
    """
    generations = "eos_token_id" in generation_config
    listed = (generation_config if generations else model_config).get("eos_token_id")
    ids = [] if listed is None else listed if isinstance(listed, list) else [listed]
    if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
        path = folder / ("generation_config.json" if generations else "config.json")
        raise TokenizerError(
            f"{path}: eos_token_id must be an id or a list of ids, got {shown(listed)}"
        )
    if "eos_token" in named and (own := rust.token_to_id(named["eos_token"])) is not None:
        ids = [*ids, own]
    return frozenset(ids)


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name, as transformers reads them: a file goes before what the config holds."""
    listed = config.get("chat_template")
    if not isinstance(listed, str | list | None):
        raise _must("chat_template", "a text or a list", listed)
    templates = {"default": listed} if isinstance(listed, str) else {}
    for entry in listed if isinstance(listed, list) else ():
        texts = [entry.get(key) for key in ("name", "template")] if isinstance(entry, dict) else []
        if not (texts and all(isinstance(text, str) for text in texts)):
            raise _must("chat_template", "a list of objects with name and template", entry)
        templates[str(texts[0])] = str(texts[1])
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        templates = {"default": read_text(folder, path, MAX_TEMPLATE_BYTES)}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(folder, path, MAX_TEMPLATE_BYTES)
    return templates
