"""`make fuzz`: schemathesis against a running service, by the service's own OpenAPI document.

It sends what the document allows and what it does not, and judges every reply: no fault of the
server, a status and a body that the document names, nothing accepted that it excludes, no route
open without its key. Behind the routes are a real worker and engine, with a tiny model.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import httpx

from api.document import OPERATIONS
from tests.conftest import REPOSITORY
from tests.e2e.conftest import TOKENMILL, Up, start_up
from tests.tiny_llama import write_tiny_llama

KEY = re.compile(r"tm_\S+")
SPENT = re.compile(r"^\s+(\d+) generated", re.MULTILINE)
# not every body that fits its schema is a job: a prompt may be too long, a model may know no tools
EXCLUDED = "positive_data_acceptance"
# what a form's file holds is any bytes: there is none that may not be one
CONFIG = """
[[operations]]
include-operation-id = "files.upload"
checks.negative_data_rejection.enabled = false
"""
# these may shut out who asks: they come last, by themselves
LAST = ("admin.change_tenant", "admin.revoke_key")
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Report:
    num_requests: int
    passed: bool
    text: str


def start(folder: Path, model_dir: Path, environ: dict[str, str] | None = None) -> Up:
    """A service that asks for keys and serves its document."""
    settings = {"auth": "keys", "openapi": "true", "max_n": 4}
    settings |= {"log_level": "debug", "log_format": "json"}
    # many of its calls come without a key on purpose
    settings["max_failed_keys_per_minute"] = 1_000_000
    return start_up(folder, model_dir, environ=environ, **settings)


def key_of(up: Up) -> str:
    """One that may do everything."""
    command = [*TOKENMILL, "keys", "create", "--name", "fuzz"]
    command += [f"--scope={scope}" for scope in ("read", "write", "webhooks", "metrics", "admin")]
    made = subprocess.run(command, env=up.environ, capture_output=True, text=True, check=True)
    [key] = KEY.findall(made.stdout)
    return key


def fuzz(up: Up, folder: Path, *, num_requests: int, phases: str, seed: int) -> Report:
    """Send about so many requests, the same number to each operation."""
    key = key_of(up)
    document = httpx.get(
        f"{up.url}/openapi.json", headers={"authorization": f"Bearer {key}"}, trust_env=False
    )
    (folder / "openapi.json").write_bytes(document.raise_for_status().content)
    (folder / "schemathesis.toml").write_text(CONFIG)
    each = max(1, round(num_requests / len(OPERATIONS)))
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", str(folder / "openapi.json")),
        *("--url", up.url, "--header", f"Authorization: Bearer {key}"),
        *("--max-examples", str(each), "--seed", str(seed)),
        *("--exclude-checks", EXCLUDED, "--continue-on-failure", "--no-shrink"),
        *("--request-timeout", "600", "--suppress-health-check", "all"),
        *("--generation-database", "none"),
    ]
    without = [f"--exclude-operation-id={name}" for name in LAST]
    alone = [f"--include-operation-id={name}" for name in LAST]
    first = _run([*command, "--phases", phases, *without], folder)
    last = _run([*command, "--phases", "fuzzing", *alone], folder)
    text = first.text + last.text
    return Report(first.num_requests + last.num_requests, first.passed and last.passed, text)


def _run(command: list[str], folder: Path) -> Report:
    ran = subprocess.run(
        command, cwd=folder, env=_environ(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    found = SPENT.search(ran.stdout)
    return Report(int(found[1]) if found else 0, ran.returncode == 0, ran.stdout + ran.stderr)


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "NO_COLOR": "1", "COLUMNS": "100"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--phases", default="coverage,fuzzing,stateful")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        up = start(folder, write_tiny_llama(folder / "model"))
        try:
            report = fuzz(
                up, folder, num_requests=asked.requests, phases=asked.phases, seed=asked.seed
            )
        finally:
            up.end()
    sys.stdout.write(report.text)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
