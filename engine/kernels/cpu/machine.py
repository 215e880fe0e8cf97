"""What the processor has for which kernels are compiled."""

import ctypes
import platform
from typing import Any

from llvmlite.binding import get_host_cpu_name
from numba.core import config
from numba.core.codegen import get_host_cpu_features

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64

_settings: Any = config  # annotated as a plain module, its settings are unknown to a type checker
_listed: str = _settings.CPU_FEATURES or get_host_cpu_features()

# this machine's, or what Numba is told; LLVM's names: avx2, fma …
FEATURES = frozenset(each[1:] for each in _listed.split(",") if each.startswith("+"))
CPU: str = _settings.CPU_NAME or get_host_cpu_name()  # LLVM's: znver5, sapphirerapids …


def _may_use_tiles() -> bool:
    """Ask the kernel for AMX's tile registers, which a process has only when it has asked."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


HAS_AMX = {"amx-tile", "amx-bf16", "amx-int8"} <= FEATURES and _may_use_tiles()
