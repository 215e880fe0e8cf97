"""Several API processes behind one port."""

import os
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from cli.addresses import free_port
from jobs.settings import ModelEntry
from tests.api.conftest import alive, completion, until

NUM = 2


@pytest.fixture
def several(sqlite_url, valkey_url, tiny_llama_dir):
    entry = ModelEntry(name="tiny", path=str(tiny_llama_dir))
    port = free_port()
    environ = os.environ | {
        "DATABASE_URL": sqlite_url,
        "REDIS_URL": valkey_url,
        "TOKENMILL_MODELS": f"{entry.name}={entry.path}",
        "TOKENMILL_PORT": str(port),
    }
    command = [sys.executable, "-m", "cli.main", "api", "--processes", str(NUM)]
    process = subprocess.Popen(command, env=environ)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            until(lambda: alive(client) or process.poll() is not None, 60)
            yield client, process
    finally:
        process.kill()
        process.wait()


def test_they_share_a_port_and_one_that_dies_is_started_again(several):
    client, process = several
    parent = psutil.Process(process.pid)
    until(lambda: len(parent.children()) == NUM)
    killed, left = parent.children()
    job = client.post("/v1/jobs", json=completion()).json()
    killed.kill()
    until(lambda: left in parent.children() and len(parent.children()) == NUM)
    with httpx.Client(base_url=client.base_url, timeout=30) as other:
        assert other.get(f"/v1/jobs/{job['id']}").json()["id"] == job["id"]
    children = parent.children()
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not any(child.is_running() for child in children)
