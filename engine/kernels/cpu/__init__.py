"""Compiled kernels for CPUs: a decoder's whole stack, its matrix products and its attention.

Numba compiles them for the machine at hand, once, and keeps the result on disk: no compiler is
needed there. The inner loops are written in vectors of 8 or 16 float32 (`emit`), everything above
them in plain loops. One tile, [rows, K] × [K, 16], is all the matrix arithmetic there is: weights
and blocks of the KV cache lie in memory as its right-hand side.

Every sum is taken in one order, whatever else is in the batch: a row's result does not depend on
how many rows are computed with it, nor on how its sequence was cut into steps, to the last bit.

Importing this package sets Numba up, before any kernel is decorated.
"""

import hashlib
import platform
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

# torch's OpenMP has to be there before Numba looks for one: then both share its threads
import torch  # noqa: F401
from numba import __version__ as numba_version
from numba import config
from numba.core import event

from engine.kernels.cpu.machine import FEATURES, HAS_AMX


def unavailable() -> str | None:
    """Why compiled kernels cannot run on this machine; None where they can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    missing = [name for name in ("avx2", "fma", "f16c") if name not in FEATURES]
    return f"the CPU lacks {', '.join(missing)}" if missing else None


class _Compilation(event.Listener):
    """Calls `tell` at the first compilation. What is found on disk is no compilation."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell

    def on_start(self, event: event.Event) -> None:
        if self._tell is not None:
            tell, self._tell = self._tell, None
            tell()

    def on_end(self, event: event.Event) -> None:
        """Nothing: many follow the first, and the longest part has no event of its own."""


def telling_of_compilation(tell: Callable[[], None]) -> AbstractContextManager[None]:
    """Inside it, `tell` is called once, before the first kernel that is not on disk is compiled."""
    return event.install_listener("numba:compile", _Compilation(tell))


def _cache_folder() -> Path | None:
    """Where compiled kernels are kept: named by what they were made from, so never stale."""
    # the features of a CPU are in Numba's own key, but not what the system grants of them
    digest = hashlib.sha256(f"{numba_version} {HAS_AMX}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    try:
        folder = Path.home() / ".cache" / "tokenmill" / "kernels" / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):
        return None  # no home, or one that cannot be written


# annotated as a plain module, Numba's settings are unknown to a type checker
_settings: Any = config
_settings.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]
_folder = _cache_folder()
if _folder is None:
    # compiled anew by each process; gone with this object when the process ends
    _temporary = tempfile.TemporaryDirectory(prefix="tokenmill-kernels-")
    _folder = Path(_temporary.name)
_settings.CACHE_DIR = _settings.CACHE_DIR or str(_folder)
MAX_THREADS: int = _settings.NUMBA_NUM_THREADS
