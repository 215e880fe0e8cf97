"""Checkpoints on disk: what is accepted, what is refused by name, and tensors by name and shape.

Only safetensors and JSON are ever read, so opening a checkpoint runs none of its code. Knows the
files' form, not what a family does with them: that is models/.

    CheckpointError
    ├── CheckpointNotFoundError    no such folder, file or hub id, or a file is missing from it
    ├── MalformedCheckpointError   a file that cannot be understood
    ├── PickleCheckpointError      weights only as pickle, which runs code when it is read
    ├── RemoteCodeError            `auto_map`: the model is code of its own
    ├── OutsideFolderError         a path or a link that leads out of the checkpoint
    ├── UnsupportedModelError      an architecture or setting that this engine does not compute
    └── TensorError
        ├── MissingTensorError
        ├── UnexpectedTensorError  a tensor that nothing would use: the settings must be wrong
        └── TensorShapeError
"""

import copy
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint_files import (
    FileFault,
    MissingFile,
    OutsideFolder,
    check_links,
    checked_path,
    read_config,
    read_object,
    shown,
)
from engine.gguf import GGUFError, convert_gguf, file_sha256

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.safetensors", INDEX_FILE, "*.json", "*.jinja")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MASK_DTYPES = ("BOOL", "U8")  # of buffers; no weight has them
SAMPLES_PER_FILE = 16  # of 64 KiB, for a checkpoint's quick fingerprint


class CheckpointError(Exception):
    """A checkpoint that cannot be loaded; the message names the file, tensor or setting."""


class CheckpointNotFoundError(CheckpointError):
    pass


class MalformedCheckpointError(CheckpointError):
    pass


class PickleCheckpointError(CheckpointError):
    pass


class RemoteCodeError(CheckpointError):
    pass


class OutsideFolderError(CheckpointError):
    pass


class UnsupportedModelError(CheckpointError):
    pass


class TensorError(CheckpointError):
    pass


class MissingTensorError(TensorError):
    pass


class UnexpectedTensorError(TensorError):
    pass


class TensorShapeError(TensorError):
    pass


def resolve_folder(model: str) -> Path:
    """The safetensors folder of a checkpoint folder, a GGUF file or a hub id.

    A GGUF file is converted once, into a folder beside it that is named after its content. A hub id
    is fetched unless it is in the hub's cache. Raises CheckpointError.
    """
    path = Path(model)
    if path.is_dir():
        check_folder(path)
        return path
    if path.is_file():
        return _converted(path)
    if not HUB_ID.fullmatch(model):
        raise CheckpointNotFoundError(f"{model} is not a folder, a GGUF file or a hub id")
    try:
        folder = Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointNotFoundError(f"{model} could not be had from the hub: {error}") from error
    check_folder(folder)
    return folder


def _converted(path: Path) -> Path:
    if path.name.endswith(PICKLE_SUFFIXES):
        raise PickleCheckpointError(f"{path} is a pickle checkpoint; only safetensors are read")
    if path.suffix != ".gguf":
        raise CheckpointNotFoundError(f"{path} is neither a folder nor a GGUF file")
    folder = path.with_name(f"{path.stem}-{file_sha256(path)[:16]}")
    if not folder.exists():
        try:
            convert_gguf(path, folder)
        except GGUFError as error:
            raise MalformedCheckpointError(str(error)) from error
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Refuse a folder with a link that leads out of it, or with weights only as pickle."""
    names = sorted(entry.name for entry in folder.iterdir())
    with _by_name():
        check_links(folder)
    if any(name in (SINGLE_FILE, INDEX_FILE) for name in names):
        return
    for name in names:
        if name.endswith(PICKLE_SUFFIXES):
            raise PickleCheckpointError(
                f"{folder} has its weights as pickle ({name}); only safetensors are read, because "
                "a pickle may run any code"
            )
    raise CheckpointNotFoundError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")


class Checkpoint:
    """One safetensors checkpoint, opened for reading; its tensors come out by name and shape.

    Raises a CheckpointError as in the tree above.
    """

    def __init__(self, folder: Path) -> None:
        check_folder(folder)
        self.folder = folder
        with _by_name():
            self.config = read_config(folder)
        if "auto_map" in self.config:
            raise RemoteCodeError(
                f"{folder}/config.json has auto_map: the model needs code of its own, and code "
                "from a checkpoint is never run"
            )
        self._open: dict[str, Any] = {}  # file name -> safe_open handle
        self._file_of = self._tensor_files()
        self._stored_as: Mapping[str, str] = {}  # names that are others in the files
        self._taken: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._open.values():
            handle.__exit__(kind, error, trace)
        self._open.clear()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor in the file's own type, on the CPU, mapped from the file."""
        self.dtype_of(name)
        return self._take(name, shape)

    def take_integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Likewise a tensor of 32-bit integers, as quantised checkpoints have them."""
        found = self._find(name)
        if found.get_dtype() != "I32":
            raise UnsupportedModelError(
                f"{self.folder}: {name} has type {found.get_dtype()}, must have I32"
            )
        return self._take(name, shape)

    @property
    def names(self) -> Iterable[str]:
        """Of all tensors."""
        return self._file_of.keys()

    def part(self, config: dict[str, Any], stored_as: Mapping[str, str]) -> "Checkpoint":
        """Some of the tensors under names of their own, and what says of them. Shares the files."""
        part = copy.copy(self)
        part.config = config
        part._file_of = {name: self._file_of[stored] for name, stored in stored_as.items()}
        part._stored_as = stored_as
        part._taken = set()
        return part

    def check_all_taken(self, ignored: re.Pattern[str]) -> None:
        """Raises UnexpectedTensorError when tensors are left that do not match `ignored`."""
        left = sorted(
            name for name in self._file_of.keys() - self._taken if not ignored.fullmatch(name)
        )
        if left:
            raise UnexpectedTensorError(
                f"{self.folder}: {len(left)} tensors have no place in the model that config.json "
                f"describes: {', '.join(left[:5])}{', …' if len(left) > 5 else ''}"
            )

    def dtype_of(self, name: str) -> torch.dtype:
        """The type a tensor is stored in."""
        stored: str = self._find(name).get_dtype()
        if stored not in DTYPES:
            raise UnsupportedModelError(
                f"{self.folder}: {name} has type {stored}; "
                f"only {', '.join(sorted(DTYPES))} are read"
            )
        return DTYPES[stored]

    @property
    def dtype(self) -> torch.dtype:
        """The type that most of the stored numbers have."""
        counts: Counter[str] = Counter()
        for name in self._file_of:
            found = self._find(name)
            counts[found.get_dtype()] += math.prod(found.get_shape())
        stored = max(counts.keys() & DTYPES.keys(), key=lambda kind: counts[kind], default="F32")
        return DTYPES[stored]

    def take_all(self) -> dict[str, Tensor]:
        """Every tensor by name, as `take` gives it, and masks that old checkpoints saved."""
        taken = {}
        for name, file_name in self._file_of.items():
            found = self._find(name)
            if found.get_dtype() in MASK_DTYPES:
                taken[name] = self._handle(file_name).get_tensor(self._stored_as.get(name, name))
            else:
                taken[name] = self.take(name, tuple(found.get_shape()))
        return taken

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation: generation_config.json's, else config.json's."""
        name, read = "generation_config.json", {}
        if (self.folder / name).exists():
            read = _read_json(self.folder, name)
        if "eos_token_id" not in read:
            name, read = "config.json", self.config
        found = read.get("eos_token_id")
        ids = [] if found is None else found if isinstance(found, list) else [found]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise MalformedCheckpointError(
                f"{self.folder}/{name}: eos_token_id must be an id or a list of ids, "
                f"got {shown(found)}"
            )
        return frozenset(ids)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the settings and of samples of every weight file; quick at any size.

        Tells one model from another. For proof that files are unchanged: `checkpoint_sha256`.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(set(self._file_of.values())):
            path = self.folder / name
            size = path.stat().st_size
            digest.update(f"\0{name}\0{size}\0".encode())
            with path.open("rb") as file:
                for i in range(SAMPLES_PER_FILE):
                    file.seek(i * max(0, size - 65536) // (SAMPLES_PER_FILE - 1))
                    digest.update(file.read(65536))
        return digest.digest()

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._find(name)
        if tuple(found.get_shape()) != shape:
            raise TensorShapeError(
                f"{self.folder}: {name} must have shape {list(shape)}, got {found.get_shape()}"
            )
        self._taken.add(name)
        stored = self._stored_as.get(name, name)
        tensor: Tensor = self._handle(self._file_of[name]).get_tensor(stored)
        return tensor

    def _find(self, name: str) -> Any:
        """A tensor's place in its file."""
        if name not in self._file_of:
            raise MissingTensorError(f"{self.folder} has no tensor {name}")
        try:
            return self._handle(self._file_of[name]).get_slice(self._stored_as.get(name, name))
        except SafetensorError as error:
            raise MissingTensorError(
                f"{self.folder}/{self._file_of[name]} has no tensor {name}: {error}"
            ) from error

    def _handle(self, file_name: str) -> Any:
        if file_name not in self._open:
            path = _checked_path(self.folder, file_name)
            try:
                handle: Any = safe_open(path, framework="pt", device="cpu")
                self._open[file_name] = handle.__enter__()
            except SafetensorError as error:
                raise MalformedCheckpointError(f"{path} is not safetensors: {error}") from error
        return self._open[file_name]

    def _tensor_files(self) -> dict[str, str]:
        """The file that holds each tensor."""
        if not (self.folder / INDEX_FILE).exists():
            return dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)
        weight_map = _read_json(self.folder, INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise MalformedCheckpointError(f"{self.folder}/{INDEX_FILE} has no weight_map")
        for tensor_name, file_name in weight_map.items():
            if not isinstance(file_name, str):
                raise MalformedCheckpointError(
                    f"{self.folder}/{INDEX_FILE}: the file of {tensor_name} is {file_name!r}"
                )
            if file_name.endswith(PICKLE_SUFFIXES):
                raise PickleCheckpointError(
                    f"{self.folder}/{INDEX_FILE} names a pickle file: {file_name}"
                )
        for file_name in sorted(set(weight_map.values())):
            _checked_path(self.folder, file_name)
        return weight_map


def checkpoint_sha256(folder: Path) -> str:
    """SHA-256, in hex, of a checkpoint's settings, tokenizer, templates and weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja", ".safetensors"):
            checked = _checked_path(folder, path.name)
            digest.update(f"{path.name}\0{file_sha256(checked)}\n".encode())
    return digest.hexdigest()


@contextmanager
def _by_name() -> Iterator[None]:
    """A fault of a file as one of this module's errors."""
    try:
        yield
    except OutsideFolder as error:
        raise OutsideFolderError(str(error)) from error
    except MissingFile as error:
        raise CheckpointNotFoundError(str(error)) from error
    except FileFault as error:
        raise MalformedCheckpointError(str(error)) from error


def _checked_path(folder: Path, name: str) -> Path:
    with _by_name():
        return checked_path(folder, name)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    with _by_name():
        return read_object(folder, name)
