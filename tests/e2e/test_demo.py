"""`tokenmill demo` on the real model: what a newcomer sees first."""

import re
import subprocess

import psutil
import pytest

from tests.e2e.conftest import TOKENMILL, environment


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_runs_48_prompts_together_and_leaves_nothing_running(smollm2_dir, tmp_path):
    done = subprocess.run(
        [*TOKENMILL, "demo", "--model", f"smollm2-135m-instruct={smollm2_dir}"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "48 of 48" in done.stdout
    largest_step = re.search(r"most sequences in one step\s+(\d+)", done.stdout)
    assert largest_step, done.stdout
    assert int(largest_step[1]) >= 16
    assert re.search(r"demo-47\s+\d+\s+\d+\s+\d+\s+[\d.]+\s+[\d.]+", done.stdout), done.stdout
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or ())
    ]
    assert left == []
