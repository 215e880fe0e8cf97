"""The files of a checkpoint folder, which somebody else wrote: found inside it, small, and in form.

Every reader of such a file goes through here, so that a link that leads out, a file without end and
JSON of another shape are refused by name whoever reads them. Knows nothing of what the files mean.

    FileFault               the message names the file, and the key
    ├── MissingFile         it is not there, or no file
    └── OutsideFolder       a path or a link leads out of the checkpoint
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 64 << 20  # the index of the largest public models has a few megabytes
MAX_JSON_DEPTH = 64
MAX_SHOWN = 100  # characters of a value in a message
SAMPLES_PER_FILE, SAMPLE_BYTES = 16, 1 << 16
FINGERPRINTED = (".safetensors", ".json", ".jinja", ".gguf")
_SURROGATE = re.compile("[\ud800-\udfff]")


class FileFault(ValueError):
    pass


class MissingFile(FileFault):
    pass


class OutsideFolder(FileFault):
    pass


def check_links(folder: Path) -> None:
    """Raise OutsideFolder at a link that leads out of the folder, however deep in it."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink():
                _real(folder, path)


def checked_path(folder: Path, name: str) -> Path:
    """A file of the folder, by plain name; its links may not lead out of the checkpoint."""
    if not name or Path(name).name != name or "\\" in name or "\0" in name:
        raise OutsideFolder(f"{folder} refers to {name!r}, which is a path, not a file name")
    return checked_file(folder, folder / name)


def checked_file(folder: Path, path: Path) -> Path:
    """A file that was found in the folder."""
    if not _real(folder, path).is_file():
        raise MissingFile(f"{path} is not a file" if path.exists() else f"{path} is missing")
    return path


def _real(folder: Path, path: Path) -> Path:
    """Where a path of the folder leads."""
    roots = [folder.resolve()]
    if folder.parent.name == "snapshots":  # the hub's cache keeps the content in blobs/ next to it
        roots.append(folder.parent.parent.resolve() / "blobs")
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:
        raise OutsideFolder(f"{path} is a link that leads nowhere: {error}") from error
    if not any(real.is_relative_to(root) for root in roots):
        raise OutsideFolder(f"{path} leads out of the checkpoint, to {real}")
    return real


def read_text(folder: Path, path: Path, max_bytes: int) -> str:
    """Raises FileFault."""
    checked_file(folder, path)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise FileFault(f"{path} is over {max_bytes} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise FileFault(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileFault(f"{path} is not UTF-8 at byte {error.start}") from error


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object that a file holds. Raises FileFault."""
    path = checked_path(folder, name)
    try:
        value = json.loads(read_text(folder, path, MAX_JSON_BYTES))
    except FileFault:
        raise
    except RecursionError as error:
        raise FileFault(f"{path} is nested too deep") from error
    except ValueError as error:  # a number of too many digits is one too
        raise FileFault(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FileFault(f"{path} must hold a JSON object, got {type(value).__name__}")
    for key, item in value.items():
        fault = _fault_of({key: item})
        if fault:
            raise FileFault(f"{path}: {shown(key)} {fault}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Of the model. Raises FileFault."""
    config = read_object(folder, "config.json")
    if not isinstance(config.get("text_config"), dict | None):
        raise FileFault(
            f"{folder / 'config.json'}: text_config must be an object, "
            f"got {shown(config['text_config'])}"
        )
    return config


def _fault_of(root: Any) -> str | None:
    """What keeps a JSON value from being text again, or from being walked through."""
    level: list[Any] = [root]
    for _ in range(MAX_JSON_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
                return "holds half of a surrogate pair"
            if isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list):
                below += value
        if not below:
            return None
        level = below
    return f"is nested more than {MAX_JSON_DEPTH} deep"


def shown(value: Any) -> str:
    """A value in a message, cut."""
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def fingerprint(path: Path) -> str:
    """SHA-256 of a checkpoint folder's or GGUF file's names, sizes and samples of their content.

    Quick at any size; tells a model of other weights, settings or template from this one.
    """
    files = [path] if path.is_file() else sorted(path.iterdir())
    digest = hashlib.sha256()
    for each in files:
        if each.suffix not in FINGERPRINTED or each.name == "origin.json" or not each.is_file():
            continue
        size = each.stat().st_size
        digest.update(f"\0{each.name}\0{size}\0".encode())
        with each.open("rb") as file:
            for i in range(SAMPLES_PER_FILE):
                file.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES_PER_FILE - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
