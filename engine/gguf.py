"""GGUF files: turned once into a safetensors checkpoint, through transformers' reader.

Quantised weights become the float32 numbers they stand for, exactly. Knows nothing of the engine.

    GGUFError    not a GGUF file, or one that transformers cannot turn into a model
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# where the file lay, how it was packed, who wrote it: none of it describes the model, and the rest
# must be the same bytes from every run
CONFIG_NOISE = ("_model_name_or_path", "_name_or_path", "quantization_config")
GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENIZER_NOISE = ("is_local", "local_files_only", "name_or_path")


class GGUFError(Exception):
    pass


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Write a float32 safetensors checkpoint, with its tokenizer, to a folder that does not exist.

    The folder appears complete or not at all; the same file gives the same bytes. If another
    process makes the folder meanwhile, its one is kept. Raises GGUFError.
    """
    with gguf_path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise GGUFError(f"{gguf_path} is not a GGUF file: it does not begin with 'GGUF'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(gguf_path, draft)
        draft.chmod(0o755)  # mkdtemp's is for its owner alone
        for path in (*sorted(draft.iterdir()), draft):
            _sync(path)
        try:
            draft.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
        _sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(gguf_path: Path, draft: Path) -> None:
    # transformers takes seconds to import, and nothing but a conversion needs it
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    progress: Any = logging  # its functions carry no types
    had_progress_bar = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()
    try:
        place, name = gguf_path.parent, gguf_path.name
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
        AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(draft)
    except Exception as error:
        # the reader has no error of its own: a damaged file ends in whatever its bytes lead to
        raise GGUFError(f"{gguf_path} could not be read as a model: {error}") from error
    finally:
        if had_progress_bar:
            progress.enable_progress_bar()
    config: dict[str, Any] = model.config.to_diff_dict()
    config["architectures"] = [type(model).__name__]
    generation = {key: config[key] for key in GENERATION_KEYS if config.get(key) is not None}
    state: dict[str, torch.Tensor] = model.state_dict()
    if config.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    save_file(
        {key: tensor.contiguous() for key, tensor in state.items()},
        draft / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_json(draft / "config.json", config, CONFIG_NOISE)
    _write_json(draft / "generation_config.json", generation)
    tokenizer = json.loads((draft / "tokenizer_config.json").read_text("utf-8"))
    _write_json(draft / "tokenizer_config.json", tokenizer, TOKENIZER_NOISE)


def _write_json(path: Path, content: dict[str, Any], without: tuple[str, ...] = ()) -> None:
    kept = {key: value for key, value in content.items() if key not in without}
    path.write_text(json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
