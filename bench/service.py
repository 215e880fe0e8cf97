"""The whole service as a system under test: `tokenmill up` in processes of its own, over HTTP."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.measure import Pieces, Request, System
from cli.addresses import free_port
from cli.client import Client, Unreachable

REPOSITORY = Path(__file__).parents[1]
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
MODEL = "bench"


class ServiceError(Exception):
    """The service did not start, or a job did not succeed."""


@contextmanager
def running_service(model: Path, environ: dict[str, str]) -> Iterator[tuple[System, int]]:
    """Start the service on an empty data folder; yields it and its first process's id.

    Raises ServiceError. `environ` are settings beside those of this process.
    """
    with TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        port = free_port()
        log = Path(folder, "service.log")
        command = [sys.executable, "-m", "cli.main", "up", "--port", str(port)]
        command += ["--data-dir", str(Path(folder, "data")), "--model", f"{MODEL}={model}"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env={**os.environ, **environ, "PYTHONPATH": str(REPOSITORY)},
            )
        try:
            with Client(f"http://127.0.0.1:{port}") as client:
                _wait_until_ready(client, process, log)
                yield _system(client), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_TIMEOUT_S)


def _wait_until_ready(client: Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            ready, _ = client.readiness()
        except Unreachable:
            ready = False
        if ready and MODEL in client.models():
            return
        time.sleep(0.2)
    raise ServiceError(f"the service did not start:\n{log.read_text('utf-8', 'replace')[-4000:]}")


def _system(client: Client) -> System:
    def run(requests: list[Request], n: int, temperature: float) -> Pieces:
        jobs = [
            {
                "url": "/v1/completions",
                "body": {
                    "model": MODEL,
                    "prompt": request["prompt"],
                    "max_tokens": request["max_tokens"],
                    "n": n,
                    "temperature": temperature,
                    "ignore_eos": True,
                },
            }
            for request in requests
        ]
        started = time.perf_counter()
        ids = [job["id"] for job in client.submit(jobs)]
        ended = client.wait(ids)
        wall_s = time.perf_counter() - started
        num_tokens, texts = [], []
        for job_id, request in zip(ids, requests, strict=True):
            job = ended[job_id]
            if job["status"] != "succeeded":
                raise ServiceError(f"{job_id} {job['status']}: {job['error']}")
            choices = job["response"]["body"]["choices"]
            texts += [choice["text"] for choice in choices]
            # a job counts its samples' tokens together: all as long as asked, or all wrong
            whole = job["usage"]["completion_tokens"] == n * request["max_tokens"]
            num_tokens += [request["max_tokens"] if whole else -1] * n
        return Pieces(wall_s=wall_s, token_ids=None, num_tokens=num_tokens, texts=texts)

    return run
