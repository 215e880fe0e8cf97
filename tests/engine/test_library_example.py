"""The README's program that uses the engine as a library runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def example() -> str:
    programs = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    (program,) = [program for program in programs if "LLMEngine" in program]
    return program


@pytest.mark.slow
def test_the_readmes_library_program_runs(smollm2_dir):
    assert smollm2_dir == REPOSITORY / ".tokenmill" / "models" / "smollm2-135m-instruct"
    done = subprocess.run(
        [sys.executable, "-c", example()],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum("RequestStats(prompt_tokens=" in line for line in lines) == 2
    assert "Paris" in done.stdout
    assert sum(line.startswith("a ") for line in lines) > 1
