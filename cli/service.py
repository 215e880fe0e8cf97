"""The whole service on one machine: what `tokenmill up` runs and `tokenmill demo` runs it on.

What the environment does not name is brought along: Valkey when there is no REDIS_URL, a SQLite
file when there is no DATABASE_URL, both in the data folder. One service at a time has the folder.

StartError
└── Cancelled
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import redis
from sqlalchemy.exc import SQLAlchemyError

import migrations
from cli import env_file, tether
from cli.addresses import free_port, port_holder, service_url
from cli.catalogue import CATALOGUE, is_complete
from cli.servers import FolderInUse, Server, ServerError, Valkey, lock_folder
from cli.start import Report, StartLog, WorkerChild
from cli.supervisor import STOP_MARGIN_S, Child, Embedded, Loop, Part, Supervisor
from cli.wheel_binaries import BinaryMissing
from jobs import store
from jobs.database import Database
from jobs.redis_client import connect
from jobs.settings import Settings, variable
from worker.sweeper import run as run_sweeper

READY_TIMEOUT_S = 900.0  # a cold disk, a large checkpoint, kernels to compile on a busy machine
API_GRACE_S = 15.0


class StartError(Exception):
    """The service could not be brought up. The message says what to do."""


class Cancelled(StartError):
    """`cancelled` was set before the service was ready; nothing is left running."""


class Service:
    """Every part of the service, started in order, watched by `watch`, ended by `stop`.

    `cancelled`, once set, ends a start that is under way.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        log_folder: Path | None,
        report: Report,
        cancelled: threading.Event,
    ) -> None:
        self._environ = dict(environ)
        self._cancelled = cancelled
        self._log_folder = log_folder
        self._report = report
        self._valkey: Server | None = None
        self._supervisor: Supervisor | None = None
        self._workers: dict[str, WorkerChild] = {}  # by model
        self._folder_fd: int | None = None  # holds the lock on the data folder
        data_dir = Path(Settings.from_env(environ).data_dir).resolve()
        self._set("data_dir", data_dir)
        self.settings = Settings.from_env(self._environ)

    @property
    def url(self) -> str:
        """Where a client on this machine finds the API."""
        return service_url(self.settings)

    def start(self) -> Self:
        """Bring everything up and wait until jobs can be done. Raises StartError."""
        try:
            self._take_folder()
            self._take_port()
            for entry in self.settings.models:
                self._need_model(entry.name, Path(entry.path))
            self._start_parts()
            self._wait_until_ready()
            env_file.write(self._environ, self.settings)
        except BaseException:
            self.stop()
            raise
        return self

    def watch(self) -> list[str]:
        """Look after the parts once; to be called several times a second. Returns notices."""
        assert self._supervisor is not None
        return self._supervisor.watch()

    def hurry(self) -> None:
        """While `stop` waits: let the workers hand back what they have instead of finishing it."""
        if self._supervisor is not None:
            self._supervisor.hurry()

    def stop(self) -> None:
        """End everything, whatever state it is in."""
        if self._folder_fd is not None:
            env_file.remove(self._folder)
        if self._supervisor is not None:
            self._supervisor.stop()
        if self._valkey is not None:
            self._valkey.stop()
        if self._folder_fd is not None:
            os.close(self._folder_fd)
            self._folder_fd = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _set(self, field: str, value: object) -> None:
        self._environ[variable(field)] = str(value)

    @property
    def _folder(self) -> Path:
        return Path(self.settings.data_dir)

    def _take_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._folder_fd = lock_folder(self._folder, "service", wait_s=0)
        except FolderInUse:
            raise self._folder_in_use() from None
        env_file.remove(self._folder)

    def _folder_in_use(self) -> StartError:
        return StartError(
            f"the data folder {self._folder} is in use: is the service running already?"
        )

    def _take_port(self) -> None:
        if self.settings.port == 0:
            self._set("port", free_port())
            self.settings = Settings.from_env(self._environ)
        holder = port_holder(self.settings.host, self.settings.port)
        if holder is not None:
            raise StartError(holder)

    def _need_model(self, name: str, path: Path) -> None:
        if is_complete(path) or path.is_file():
            return
        if name not in CATALOGUE or path.parts[-2:] != ("models", name):
            raise StartError(
                f"model {name}: no checkpoint in {path}; get one with `tokenmill models fetch`"
            )
        self._report(f"fetching the model {name}, once")
        # in a process of its own: the conversion needs torch, and this process lives long
        command = [sys.executable, "-P", "-m", "cli.main", "models", "fetch", name]
        command += ["--data-dir", str(path.parent.parent)]
        fetching = tether.spawn(command, env=self._environ)
        while fetching.poll() is None:
            if self._cancelled.wait(0.1):
                tether.stop(fetching, sig=signal.SIGTERM, grace_s=5.0)
                raise Cancelled
        if fetching.returncode != 0:
            raise StartError(f"model {name} could not be fetched")

    def _start_parts(self) -> None:
        parts: list[Part] = []
        self._ready_database()
        if self._environ.get(variable("redis_url")):
            self._check_redis()
        else:
            self._report("starting Valkey")
            self._valkey = Valkey(self._folder / "valkey")
            try:
                self._valkey.start()
            except FolderInUse:
                raise self._folder_in_use() from None
            except (ServerError, BinaryMissing) as error:
                raise StartError(str(error)) from error
            self._set("redis_url", self._valkey.url)
            parts.append(Embedded(self._valkey))
        self.settings = Settings.from_env(self._environ)
        parts.append(Loop("sweeper", lambda stop: run_sweeper(self.settings, stop)))
        for entry in self.settings.models:
            self._workers[entry.name] = WorkerChild(
                f"worker-{entry.name}",
                ("worker", "--model", entry.name),
                self._environ,
                grace_s=self.settings.drain_grace_s + STOP_MARGIN_S,
                log_folder=self._log_folder,
            )
        parts += self._workers.values()
        parts.append(
            Child("api", ("api",), self._environ, grace_s=API_GRACE_S, log_folder=self._log_folder)
        )
        self._report("starting the API and the workers")
        self._supervisor = Supervisor(parts)
        self._supervisor.start()

    def _check_redis(self) -> None:
        """Say at once what is otherwise only seen by never becoming ready."""
        client = connect(self.settings.redis_url)
        try:
            with client:
                client.ping()
        except (redis.RedisError, OSError) as error:
            raise StartError(
                f"the Redis of REDIS_URL does not answer: {error}; without REDIS_URL one is "
                "brought along"
            ) from error

    def _ready_database(self) -> None:
        url = self.settings.database_url
        if not self._environ.get(variable("database_url")):
            self._set("database_url", url)
            try:
                migrations.upgrade(url)
            except migrations.SchemaError as error:
                raise StartError(f"{url}: {error}") from error
            return
        database = Database(url, pool_size=1)
        try:
            with database.read() as connection:
                current = migrations.up_to_date(connection)
        except SQLAlchemyError as error:
            raise _database_away(error) from error
        finally:
            database.dispose()
        if not current:
            raise StartError(str(store.WrongSchema()))

    def _wait_until_ready(self) -> None:
        assert self._supervisor is not None
        progress = StartLog(self._report)
        database = Database(self.settings.database_url)
        deadline = time.monotonic() + READY_TIMEOUT_S
        try:
            while True:
                served = self._models_with_workers(database)
                waited_for = [each for name, each in self._workers.items() if name not in served]
                progress.show({each.name: each.phase for each in waited_for})
                if not waited_for and self._api_is_ready():
                    return
                ended = self._supervisor.watch()
                if ended:
                    raise StartError("; ".join(ended).partition("; starting")[0])
                if self._cancelled.wait(0.1):
                    raise Cancelled
                if time.monotonic() > deadline:
                    raise StartError(f"not ready within {READY_TIMEOUT_S:g} s")
        except SQLAlchemyError as error:
            raise _database_away(error) from error
        finally:
            database.dispose()

    def _api_is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"{self.url}/health/ready", timeout=5.0, trust_env=False)
            return answer.status_code == 200
        return False

    @staticmethod
    def _models_with_workers(database: Database) -> set[str]:
        with database.read() as connection:
            now = database.clock(connection)
            return {worker.model for worker in store.live_workers(connection, now)}


def _database_away(error: SQLAlchemyError) -> StartError:
    reason = str(error).partition("\n")[0]  # further lines hold the statement
    return StartError(f"the database does not answer: {reason}")


def watch_in_background(service: Service, pause_s: float = 0.2) -> Callable[[], None]:
    """Look after `service` from a thread; returns the call that ends it."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(pause_s):
            service.watch()

    thread = threading.Thread(target=run, name="supervisor", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end
