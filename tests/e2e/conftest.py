"""The whole service as a user starts it: `tokenmill up` in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cli.addresses import free_port
from cli.client import Client
from tests.conftest import REPOSITORY

READY_TIMEOUT_S = 120.0
# the command; -P keeps the working directory off the import path, as an installed one does
TOKENMILL = (sys.executable, "-P", "-m", "cli.main")


@dataclass
class Up:
    """A running `tokenmill up`."""

    process: subprocess.Popen
    url: str
    data_dir: Path
    log: Path
    environ: dict[str, str]

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def descendant(self, *words: str) -> psutil.Process:
        """The one below whose command line holds all of `words`."""
        found = [
            child
            for child in self.descendants()
            if all(word in " ".join(child.cmdline()) for word in words)
        ]
        assert len(found) == 1, (words, found, self.log.read_text())
        return found[0]

    def end(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


def environment(data_dir: Path, **settings: object) -> dict[str, str]:
    """This environment with a service's settings, and without those of another."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TOKENMILL_") and name not in ("DATABASE_URL", "REDIS_URL")
    }
    given = {f"TOKENMILL_{name.upper()}": str(value) for name, value in settings.items()}
    return environ | given | {"TOKENMILL_DATA_DIR": str(data_dir), "PYTHONPATH": str(REPOSITORY)}


def start_up(
    folder: Path,
    model_dir: Path,
    *arguments: str,
    environ: dict[str, str] | None = None,
    **settings: object,
) -> Up:
    """Start `tokenmill up` with the model `tiny`, and wait until it is ready."""
    data_dir, log = folder / "data", folder / "up.log"
    port = free_port()
    # one engine thread: tests share two cores with five processes; slow kernels: some tests meet a
    # job in its midst
    defaults = {"threads": 1, "kernels": "reference", "beat_s": 0.3, "lease_s": 3}
    defaults["drain_grace_s"] = 10
    environ = environment(data_dir, port=port, **(defaults | settings)) | (environ or {})
    command = [*TOKENMILL, "up", "--model", f"tiny={model_dir}", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environ, cwd=folder, stdout=output, stderr=output)
    up = Up(process, f"http://127.0.0.1:{port}", data_dir, log, environ)
    deadline = time.monotonic() + READY_TIMEOUT_S
    while "ready http" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return up


def wait_until(condition, timeout_s: float = 30.0):
    """Poll `condition` until it holds, and return its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def up(tmp_path_factory, tiny_llama_dir) -> Iterator[Up]:
    """One service for the tests of a module that leave it as they found it."""
    running = start_up(tmp_path_factory.mktemp("up"), tiny_llama_dir)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.end()


@pytest.fixture
def client(up: Up) -> Iterator[Client]:
    with Client(up.url) as client:
        yield client
