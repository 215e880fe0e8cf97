"""The kernels for less than this machine has, AVX2 alone or all but AMX: there is one source."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.cpu.emit import WIDTH
from engine.kernels.cpu.machine import CPU, FEATURES, HAS_AMX

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # they compile all kernels anew

AVX2 = (
    "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,"
    "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"
)
CHECKED = ("test_cpu.py", "test_kv_int8.py", "test_draw.py")


@pytest.mark.skipif(WIDTH == 8, reason="they are what the other tests run on this machine")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="has no AVX2")
def test_kernels_are_right_in_registers_of_eight_numbers():
    told = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": AVX2}
    width = "from engine.kernels.cpu.emit import WIDTH; print(WIDTH)"
    assert _run(["-c", width], told).stdout == "8\n"
    folder = Path(__file__).parent
    files = [str(folder / name) for name in CHECKED]
    done = _run(["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *files], told)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.skipif("avx512bf16" not in FEATURES, reason="has no products of bfloat16")
@pytest.mark.skipif(
    CPU.startswith("znver") and not HAS_AMX, reason="the other tests run so on this machine"
)
def test_products_of_bfloat16_are_right_in_vectors_alone():
    names = sorted(name for name in FEATURES if not name.startswith("amx"))
    told = {
        "NUMBA_CPU_NAME": "znver4",
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in names),
    }
    has = "from engine.kernels.cpu.pairs import BY_AMX, HAS_PAIRS; print(HAS_PAIRS, BY_AMX)"
    assert _run(["-c", has], told).stdout == "True False\n"
    folder = Path(__file__).parent
    files = [str(folder / name) for name in ("test_pairs.py", "test_cpu.py")]
    chosen = "pairs or 8_bit or bfloat16 or rounded"
    done = _run(["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", chosen, *files], told)
    assert done.returncode == 0, done.stdout[-4000:]


def _run(arguments: list[str], told: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **told},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
