"""The bytes of files: a folder, in which a file is either whole under its id or not there.

Bytes go to a temporary name, to the disk, and only then to the file's own name, whose folder is
synced as well: what has a name survives a loss of power. Nobody outside says what a name is.
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

STRAY_S = 3600.0  # a file without a row, or a temporary one, that nobody wrote to for so long
_ID = re.compile(r"file-[0-9a-z]{26}")
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}")


class Incoming:
    """Bytes on their way to a file. To be ended by `keep` or `drop`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / f".tmp-{secrets.token_hex(16)}"
        self._file: BinaryIO = open(  # noqa: SIM115 (lives as long as this object)
            os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
        )
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)

    def keep(self, file_id: str) -> None:
        """From now on the folder has it under this id, whatever happens."""
        _check(file_id)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self._path, self._folder / file_id)
        _sync_folder(self._folder)

    def drop(self) -> None:
        """Forget the bytes; nothing where they were kept."""
        self._file.close()
        self._path.unlink(missing_ok=True)


class FileStore:
    """The folder of a deployment's files. Thread-safe; any number of processes share it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()

    def incoming(self) -> Incoming:
        return Incoming(self.folder)

    def open(self, file_id: str) -> BinaryIO:
        """Raises FileNotFoundError. Whoever has it open reads on after a `remove`."""
        _check(file_id)
        return open(self.folder / file_id, "rb")

    def remove(self, file_id: str) -> None:
        _check(file_id)
        (self.folder / file_id).unlink(missing_ok=True)

    def remove_temporary(self) -> int:
        """Take away what uploads that died have left; how many there were."""
        num = 0
        for entry in self._old():
            if _TEMPORARY.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)
                    num += 1
        return num

    def old_ids(self) -> list[str]:
        """Ids of files that are older than an upload takes to get its row."""
        return [entry.name for entry in self._old() if _ID.fullmatch(entry.name)]

    def _old(self) -> Iterator["os.DirEntry[str]"]:
        before = time.time() - STRAY_S
        try:
            entries = os.scandir(self.folder)
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime < before:
                        yield entry


def is_file_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def _check(file_id: str) -> None:
    if not is_file_id(file_id):
        raise ValueError(f"no id of a file: {file_id[:100]!r}")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
