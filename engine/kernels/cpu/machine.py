"""What the processor has for which kernels are compiled."""

from typing import Any

from numba.core import config
from numba.core.codegen import get_host_cpu_features

_settings: Any = config  # annotated as a plain module, its settings are unknown to a type checker
_listed: str = _settings.CPU_FEATURES or get_host_cpu_features()

# this machine's, or what Numba is told; LLVM's names: avx2, fma …
FEATURES = frozenset(each[1:] for each in _listed.split(",") if each.startswith("+"))
