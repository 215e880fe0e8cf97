"""Who may import whom, and which processes never load torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

# what is imported by the process, and which packages it must not bring along
LIGHT_PROCESSES = {
    "api": ("import api.app, api.main", {"torch", "transformers", "numpy"}),
    "worker's parent": (
        "import worker.main, worker.app, worker.pool",
        {"torch", "transformers", "numpy"},
    ),
    "sweeper": ("import worker.sweeper", {"torch", "transformers", "numpy"}),
    "jobs": (
        "import jobs.store, jobs.claims, jobs.sweep, jobs.openai",
        {"torch", "transformers", "numpy", "starlette", "pydantic", "celery"},
    ),
    "supervisor": ("import cli.up, cli.demo, cli.doctor", {"torch", "transformers", "starlette"}),
    "the engine's brain": (
        "import engine.scheduler, engine.block_manager, engine.sampling_params, engine.tokenizer",
        {"torch", "transformers", "numpy", "sqlalchemy", "celery", "redis"},
    ),
    "the engine": (
        "import engine, engine.llm_engine",
        {"sqlalchemy", "celery", "kombu", "redis", "starlette", "pydantic", "msgspec", "triton"},
    ),
    "the engine on a CPU": (
        "import torch, engine.model_runner; "
        "from engine.kernels.registry import select_kernels; select_kernels(torch.device('cpu'))",
        {"triton"},
    ),
}


def test_the_import_contracts_of_pyproject_hold():
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint_imports, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("process", LIGHT_PROCESSES)
def test_a_process_holds_only_its_own_floor(process):
    statement, unwanted = LIGHT_PROCESSES[process]
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert unwanted & set(done.stdout.split()) == set()
