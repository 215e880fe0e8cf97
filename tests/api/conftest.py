"""A real server on a free port for each test, and the SQL side of a worker to end jobs with."""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from api.app import create_app
from api.main import Server
from jobs import claims, finishing
from jobs.claims import Held
from jobs.database import Database
from jobs.events import Channel, Publisher
from jobs.finishing import JobResult
from jobs.lifecycle import JobState
from jobs.records import WorkerInfo
from jobs.settings import ModelEntry, Settings
from tests.conftest import REPOSITORY

MODEL = "tiny"
LEASE_S = 30.0


@pytest.fixture
def settings(database_url, valkey_url, tiny_llama_dir) -> Settings:
    return Settings(
        database_url=database_url,
        redis_url=valkey_url,
        models=(ModelEntry(name=MODEL, path=str(tiny_llama_dir)),),
        port=0,
    )


@pytest.fixture
def sqlite_settings(sqlite_url, valkey_url, tiny_llama_dir) -> Settings:
    """For what does not depend on the database."""
    return Settings(
        database_url=sqlite_url,
        redis_url=valkey_url,
        models=(ModelEntry(name=MODEL, path=str(tiny_llama_dir)),),
        port=0,
    )


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[httpx.Client]:
    """A server in a thread, until the end of the block."""
    server = Server(create_app(settings), settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@contextlib.contextmanager
def process(settings: Settings) -> Iterator[tuple[httpx.Client, subprocess.Popen]]:
    """A server in a process of its own; killed at the end of the block if it still runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    models = ",".join(f"{model.name}={model.path}" for model in settings.models)
    environ = os.environ | {
        "DATABASE_URL": settings.database_url,
        "REDIS_URL": settings.redis_url,
        "TOKENMILL_MODELS": models,
        "TOKENMILL_PORT": str(port),
        "PYTHONPATH": str(REPOSITORY),
    }
    command = (
        "from api.main import run; from jobs.settings import Settings; run(Settings.from_env())"
    )
    child = subprocess.Popen([sys.executable, "-W", "error", "-c", command], env=environ)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            until(lambda: alive(client) or child.poll() is not None)
            yield client, child
    finally:
        child.kill()
        child.wait()


def alive(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/health/live").status_code == 200
    return False


def until(condition, timeout_s: float = 30) -> None:
    """Return when the condition holds; fail when it does not come to hold."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come to hold"
        time.sleep(0.02)


@pytest.fixture
def client(settings) -> Iterator[httpx.Client]:
    """On both databases."""
    with serving(settings) as client:
        yield client


@pytest.fixture
def sqlite_client(sqlite_settings) -> Iterator[httpx.Client]:
    with serving(sqlite_settings) as client:
        yield client


@dataclasses.dataclass
class Hands:
    """What a worker does to rows, done by the test."""

    database: Database
    publisher: Publisher
    worker_id: str = "w1"

    def call(self, function, *args, **kwargs):
        with self.database.begin() as connection:
            return function(connection, *args, now=self.database.clock(connection), **kwargs)

    def register(self, model: str = MODEL) -> None:
        info = WorkerInfo(
            id=self.worker_id,
            hostname="here",
            pid=1,
            model=model,
            max_num_seqs=8,
            kv_tokens=4096,
            max_model_len=512,
        )
        self.call(claims.register_worker, info, lease_s=LEASE_S)

    def claim(self, job_id: str):
        """The job, claimed. A row that the runway's refill holds locked is passed over at first."""
        claimed: list = []

        def try_it() -> bool:
            claimed.extend(self.call(claims.claim, [job_id], worker_id=self.worker_id))
            return bool(claimed)

        until(try_it)
        return claimed[0]

    def finish(self, claimed, *, announce: bool = True, **values) -> None:
        result = JobResult(
            **{
                "id": claimed.id,
                "fence": claimed.fence,
                "state": JobState.SUCCEEDED,
                "output": {"object": "text_completion"},
                "completion_tokens": 4,
                "finish_reason": "length",
            }
            | values
        )
        assert self.call(finishing.finish, [result]) == {Held(claimed.id, claimed.fence)}
        if announce:
            self.publisher.publish(Channel.ENDED, [claimed.id])


@contextlib.contextmanager
def hands_on(settings: Settings) -> Iterator[Hands]:
    hands = Hands(Database(settings.database_url), Publisher(settings))
    yield hands
    hands.publisher.close()
    hands.database.dispose()


@pytest.fixture
def hands(request) -> Iterator[Hands]:
    """On the database of the test's server, with a live worker."""
    both = "settings" in request.fixturenames
    with hands_on(request.getfixturevalue("settings" if both else "sqlite_settings")) as hands:
        hands.register()
        yield hands


def completion(**values) -> dict:
    """A job of the smallest kind; `values` go into its body."""
    body = {"model": MODEL, "prompt": "the quick brown fox", "max_tokens": 4}
    return {"url": "/v1/completions", "body": body | values}


def chat(**values) -> dict:
    messages = [{"role": "user", "content": "what is the capital?"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4}
    return {"url": "/v1/chat/completions", "body": body | values}


def submit(client: httpx.Client, job: dict | None = None, **fields) -> dict:
    reply = client.post("/v1/jobs", json=(job or completion()) | fields)
    assert reply.status_code == 202, reply.text
    return reply.json()


def error_of(reply: httpx.Response) -> dict:
    """The error object, after a look at its form."""
    assert reply.headers["x-request-id"].startswith("req_")
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]
