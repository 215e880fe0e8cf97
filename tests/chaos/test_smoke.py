"""kill -9 of the engine, of the worker and of Redis in the middle of 200 jobs: none is lost.

Redis keeps nothing on disk here, so its death takes every message with it. The full suite of faults
is more than this; what must hold on every commit is that each job ends once, whatever dies.
"""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from cli.servers import Valkey
from jobs.lifecycle import JobState
from tests.worker.deployment import Deployment, Worker, completion

NUM_JOBS = 200
NUM_TOKENS = 100


@dataclass
class Supervisor:
    """Starts a worker whenever there is none, as systemd or a container runtime would."""

    deployment: Deployment
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Supervisor":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            worker = self.deployment.start_worker(wait=False)
            while worker.process.poll() is None and not self._stop.wait(0.05):
                pass


@pytest.fixture
def valkey(tmp_path) -> Iterator[Valkey]:
    with Valkey(tmp_path / "valkey", persist=False) as server:
        yield server


@pytest.fixture
def deployment(database_url, valkey, tiny_llama_dir, tmp_path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path / "deployment", database_url, valkey.url, tiny_llama_dir)
    yield deployment
    deployment.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_job_ends_once_though_engine_worker_and_redis_are_killed(deployment, valkey):
    def working_worker() -> Worker:
        """The worker now alive, once it has jobs in its engine."""
        deployment.wait_for(
            lambda: (
                deployment.workers != []
                and deployment.row_of(deployment.workers[-1]) is not None
                and deployment.counts().get(JobState.RUNNING, 0) > 0
            )
        )
        return deployment.workers[-1]

    def done(share: float) -> bool:
        return deployment.counts().get(JobState.SUCCEEDED, 0) >= share * NUM_JOBS

    with Supervisor(deployment):
        ids = deployment.submit(
            *(completion(NUM_TOKENS, prompt=f"job number {i}") for i in range(NUM_JOBS))
        )
        deployment.wait_for(lambda: done(0.15))
        os.kill(deployment.engine_pid(working_worker()), signal.SIGKILL)
        deployment.wait_for(lambda: done(0.35))
        os.kill(working_worker().pid, signal.SIGKILL)
        deployment.wait_for(lambda: done(0.55))
        working_worker()
        valkey.kill()
        deployment.wait_for(lambda: done(0.6))  # what was claimed needs no Redis to end
        valkey.start()
        rows = deployment.ended(*ids)

    for row in rows:
        assert row.state == JobState.SUCCEEDED, row.error
        assert row.completion_tokens == row.output["usage"]["completion_tokens"] == NUM_TOKENS
        assert len(row.output["choices"]) == 1
    assert deployment.counts() == {JobState.SUCCEEDED: NUM_JOBS}
    assert any(row.crash_count > 0 for row in rows), "the engine was killed while idle"
    assert any(row.attempt > 1 and row.crash_count == 0 for row in rows), "so was the worker"
    assert len(deployment.workers) == 2, "Redis took the worker with it"
