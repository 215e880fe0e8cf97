"""A database that goes away: nothing is accepted falsely, and everything comes back by itself."""

import contextlib
import socket
import sqlite3
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from sqlalchemy import text

import jobs.database
import migrations
from cli.servers import Postgres
from jobs.database import Database
from jobs.settings import ModelEntry, Settings
from tests.api.conftest import MODEL, completion, error_of, process, serving, submit, until


def settings_for(database_url: str, valkey_url: str, folder) -> Settings:
    models = (ModelEntry(name=MODEL, path=str(folder)),)
    return Settings(database_url=database_url, redis_url=valkey_url, models=models, port=0)


def test_a_stopped_postgres_is_a_503_until_it_is_back(valkey_url, tiny_llama_dir):
    with Postgres() as postgres:
        migrations.upgrade(postgres.url)
        with process(settings_for(postgres.url, valkey_url, tiny_llama_dir)) as (client, _):
            job = submit(client)
            postgres.kill()
            for reply in (
                client.post("/v1/jobs", json=completion()),
                client.get(f"/v1/jobs/{job['id']}"),
                client.get("/v1/jobs"),
                client.post(f"/v1/jobs/{job['id']}/cancel"),
                client.get("/metrics"),
            ):
                assert reply.status_code == 503
                assert int(reply.headers["retry-after"]) >= 1
                assert error_of(reply)["code"] == "database_unavailable"
            ready = client.get("/health/ready")
            assert ready.status_code == 503
            assert ready.json()["reasons"][0]["code"] == "database"
            assert client.get("/health/live").status_code == 200
            assert client.get("/v1/models").status_code == 200
            postgres.start()
            until(lambda: client.get("/v1/jobs").status_code == 200)
            assert [each["id"] for each in client.get("/v1/jobs").json()["data"]] == [job["id"]]
            submit(client)


def test_a_restarted_postgres_costs_no_error(valkey_url, tiny_llama_dir):
    with Postgres() as postgres:
        migrations.upgrade(postgres.url)
        with process(settings_for(postgres.url, valkey_url, tiny_llama_dir)) as (client, _):
            job = submit(client)
            postgres.kill()
            postgres.start()
            assert client.get(f"/v1/jobs/{job['id']}").status_code == 200
            submit(client)


def test_a_locked_sqlite_is_a_503(sqlite_settings, monkeypatch):
    monkeypatch.setattr("jobs.database.BUSY_TIMEOUT_S", 0.5)
    with serving(sqlite_settings) as client:
        job = submit(client)
        file = sqlite_settings.database_url.removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as writer:
            writer.execute("BEGIN IMMEDIATE")
            reply = client.post("/v1/jobs", json=completion())
            assert reply.status_code == 503
            assert error_of(reply)["code"] == "database_unavailable"
            # who only reads does not notice
            assert client.get(f"/v1/jobs/{job['id']}").status_code == 200
            writer.execute("ROLLBACK")
        assert len(client.get("/v1/jobs").json()["data"]) == 1
        submit(client)


@contextlib.contextmanager
def full_disk_of_sqlite(settings, monkeypatch) -> Iterator[None]:
    monkeypatch.setattr("tests.api.test_outages.MAX_PAGES", 1)  # no more than there are
    yield
    monkeypatch.undo()


@contextlib.contextmanager
def full_disk_of_postgres(settings, monkeypatch) -> Iterator[None]:
    """As the server says it where no file can grow."""
    raising = "BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END"
    database = Database(settings.database_url)
    with database.begin() as connection:
        connection.execute(
            text(f"CREATE FUNCTION disk_full() RETURNS trigger LANGUAGE plpgsql AS $${raising}$$")
        )
        connection.execute(
            text("CREATE TRIGGER disk_full BEFORE INSERT ON jobs EXECUTE FUNCTION disk_full()")
        )
    yield
    with database.begin() as connection:
        connection.execute(text("DROP TRIGGER disk_full ON jobs"))
    database.dispose()


MAX_PAGES = 1 << 30
begin_sqlite = jobs.database._begin_sqlite


def begin_with_few_pages(connection) -> None:
    begin_sqlite(connection)
    connection.exec_driver_sql(f"PRAGMA max_page_count = {MAX_PAGES}")


def test_a_full_disk_is_a_503_that_says_so_and_readiness_says_it_too(settings, hands, monkeypatch):
    monkeypatch.setattr("jobs.database._begin_sqlite", begin_with_few_pages)
    sqlite = settings.database_url.startswith("sqlite")
    with serving(settings) as client, pytest.MonkeyPatch.context() as patch:
        assert client.get("/health/ready").status_code == 200
        with (full_disk_of_sqlite if sqlite else full_disk_of_postgres)(settings, patch):
            reply = client.post("/v1/jobs", json=[completion()] * 500)
            assert reply.status_code == 503
            assert error_of(reply)["message"] == "the database's disk is full"
            reply = client.get("/health/ready")
            assert reply.status_code == 503
            assert reply.json()["reasons"] == [
                {"code": "database", "message": "the database's disk is full"}
            ]
            assert client.get("/v1/jobs").json()["data"] == []
        submit(client)
        assert client.get("/health/ready").status_code == 200


class CommitCutter:
    """A proxy to PostgreSQL that, when armed, passes one COMMIT on and cuts before its answer."""

    def __init__(self, port: int) -> None:
        self.server_port = port
        self.armed = False
        self.num_cut = 0
        self._open = contextlib.ExitStack()
        self._listening = self._open.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self._listening.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._open.close()

    def _start(self, function, *args) -> None:
        thread = threading.Thread(target=function, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._open.enter_context(self._listening.accept()[0])
                address = ("127.0.0.1", self.server_port)
                server = self._open.enter_context(socket.create_connection(address))
                silent = threading.Event()
                self._start(self._pass_questions, client, server, silent)
                self._start(self._pass_answers, server, client, silent)

    def _pass_questions(self, client, server, silent: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while content := client.recv(65536):
                if self.armed and b"COMMIT\0" in content:
                    self.armed = False
                    self.num_cut += 1
                    silent.set()
                server.sendall(content)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _pass_answers(self, server, client, silent: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while (content := server.recv(65536)) and not silent.is_set():
                client.sendall(content)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cutter(postgres_url) -> Iterator[tuple[CommitCutter, str]]:
    port = urlsplit(postgres_url).port
    cutter = CommitCutter(port)
    yield cutter, postgres_url.replace(f":{port}/", f":{cutter.port}/")
    cutter.close()


def test_a_commit_in_doubt_is_a_503_and_its_repeat_finds_the_job(
    cutter, valkey_url, tiny_llama_dir
):
    proxy, url = cutter
    with serving(settings_for(url, valkey_url, tiny_llama_dir)) as client:
        headers = {"idempotency-key": "key-1"}
        client.get("/v1/jobs")
        proxy.armed = True
        doubtful = client.post("/v1/jobs", json=completion(), headers=headers)
        assert proxy.num_cut == 1
        assert doubtful.status_code == 503
        assert doubtful.headers["retry-after"]
        repeated = client.post("/v1/jobs", json=completion(), headers=headers)
        assert repeated.status_code == 202
        assert repeated.headers["idempotent-replayed"] == "true"
        (job,) = client.get("/v1/jobs").json()["data"]
        assert job["id"] == repeated.json()["id"]


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_before_the_first_migration_a_503_says_what_to_run(
    backend, valkey_url, tiny_llama_dir, tmp_path
):
    with contextlib.ExitStack() as stack:
        url = f"sqlite:///{tmp_path / 'new.db'}"
        if backend == "postgres":
            url = stack.enter_context(Postgres()).url
        client, _ = stack.enter_context(process(settings_for(url, valkey_url, tiny_llama_dir)))
        for reply in (client.post("/v1/jobs", json=completion()), client.get("/v1/jobs")):
            assert reply.status_code == 503
            assert "run `tokenmill migrate`" in error_of(reply)["message"]
        migrations.upgrade(url)
        until(lambda: client.get("/v1/jobs").status_code == 200)
        submit(client)
