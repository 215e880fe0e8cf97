"""The kernels' values: each file of `interpreted/`, in a process where Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_are_right_in_the_interpreter(file):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
