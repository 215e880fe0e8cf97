"""A deployment to be broken: real API, workers, sweeper, Valkey, PostgreSQL or SQLite, proxies.

Every process is a child, started again at once when it ends, as systemd or a container runtime
would. Processes reach the servers through proxies; the test itself does not.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from sqlalchemy import func, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

import migrations
from cli import tether
from cli.addresses import free_port
from cli.servers import Postgres, Valkey
from jobs import keys, store, tenants, webhooks
from jobs.database import Database
from jobs.lifecycle import TERMINAL, JobState
from jobs.models import attempts, jobs
from jobs.records import WorkerRecord
from jobs.rows import decode
from jobs.tenants import DEFAULT_TENANT, Quotas
from jobs.webhooks import EventType
from tests.chaos.background import Receiver
from tests.chaos.checker import Row, Tried, Write
from tests.chaos.hooked import WRITES_FILE
from tests.chaos.proxy import Proxy
from tests.conftest import REPOSITORY
from tests.worker.deployment import CELERY, MODEL

LEASE_S, GRACE_S = 3.0, 3.0
OTHER_TENANT = "other"
TENANTS = (DEFAULT_TENANT, OTHER_TENANT)
TIMEOUT_S = 600.0  # for anything; the machine may be busy
API = ("-m", "tests.chaos.api_process")
SWEEPER = ("-m", "cli.main", "sweeper")


@dataclass(eq=False)
class Child:
    """A process of the deployment, whichever incarnation."""

    name: str
    command: tuple[str, ...]
    log: Path
    env: dict[str, str]
    process: subprocess.Popen[bytes]
    wanted: bool = True  # started again when it ends
    num_starts: int = 1
    started_at: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Cluster:
    """`postgres` None: SQLite in the folder."""

    def __init__(
        self,
        folder: Path,
        model_dir: Path,
        *,
        postgres: bool = True,
        num_workers: int = 2,
        env: dict[str, str] | None = None,
        database_folder: Path | None = None,  # of SQLite
    ) -> None:
        self.database_folder = database_folder or folder
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._exits = contextlib.ExitStack()
        self.valkey = self._exits.enter_context(Valkey(folder / "valkey", persist=False))
        self.redis_proxy = self._exits.enter_context(Proxy(self.valkey.port))
        self.postgres: Postgres | None = None
        self.postgres_proxy: Proxy | None = None
        self.url = f"sqlite:///{self.database_folder / 'tokenmill.db'}"
        through = self.url
        if postgres:
            self.postgres = self._exits.enter_context(Postgres())
            self.postgres_proxy = self._exits.enter_context(Proxy(self.postgres.port))
            self.url = self.postgres.url
            address = make_url(self.url).set(port=self.postgres_proxy.port)
            through = address.render_as_string(hide_password=False)
        migrations.upgrade(self.url)
        self.database = Database(self.url)
        self.receiver = self._exits.enter_context(Receiver())
        self.keys = self._make_keys()
        self.api_port = free_port()
        self.env = self._environment(through, model_dir) | (env or {})
        self.children: dict[str, Child] = {}
        self.num_kills = 0
        self.num_stops = 0
        self._stop = threading.Event()
        self.start("api", API)
        self.start("sweeper", SWEEPER)
        for i in range(num_workers):
            self.start(f"worker-{i}", CELERY)
        self._watch = threading.Thread(target=self._keep_alive)
        self._watch.start()

    def __enter__(self) -> "Cluster":
        try:
            self.until(self.ready)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop.set()
        self._watch.join()
        for child in self.children.values():
            child.signal(signal.SIGKILL)
            child.process.wait()
        self.database.dispose()
        self._exits.close()

    def _make_keys(self) -> dict[str, str]:
        """A key of each tenant; and one of them wants to hear what has ended."""
        with self.database.begin() as connection:
            now = self.database.clock(connection)
            tenants.create(connection, OTHER_TENANT, Quotas(), now=now)
            webhooks.create_endpoint(
                connection,
                OTHER_TENANT,
                name="chaos",
                url=self.receiver.url,
                event_types=[str(each) for each in EventType if each is not EventType.PING],
                now=now,
            )
            return {
                tenant: keys.create(connection, tenant, "chaos", keys.TENANT_SCOPES, now=now)[1]
                for tenant in TENANTS
            }

    def headers(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
        """Of a tenant's calls."""
        return {"Authorization": f"Bearer {self.keys[tenant]}"}

    def _environment(self, through: str, model_dir: Path) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TOKENMILL_") and name not in ("DATABASE_URL", "REDIS_URL")
        }
        hooks = REPOSITORY / "tests" / "chaos" / "hooks"
        return inherited | {
            "DATABASE_URL": through,
            "REDIS_URL": self.valkey.url.replace(
                f":{self.valkey.port}/", f":{self.redis_proxy.port}/"
            ),
            "TOKENMILL_DATA_DIR": str(self.folder / "data"),
            "TOKENMILL_MODELS": f"{MODEL}={model_dir}",
            "TOKENMILL_PORT": str(self.api_port),
            "TOKENMILL_AUTH": "keys",
            "TOKENMILL_WEBHOOK_PRIVATE_ADDRESSES": "true",
            "TOKENMILL_NUM_BLOCKS": "1000",
            "TOKENMILL_MAX_NUM_SEQS": "16",
            "TOKENMILL_MAX_NUM_BATCHED_TOKENS": "256",
            "TOKENMILL_THREADS": "1",
            "TOKENMILL_KERNELS": "reference",
            "TOKENMILL_LEASE_S": f"{LEASE_S:g}",
            "TOKENMILL_BEAT_S": "0.5",
            "TOKENMILL_SWEEP_S": "0.2",
            "TOKENMILL_REPUBLISH_S": "1",
            "TOKENMILL_STALL_S": "5",
            "TOKENMILL_RETRY_BASE_S": "0.2",
            "TOKENMILL_DRAIN_GRACE_S": f"{GRACE_S:g}",
            "TOKENMILL_RUNWAY": "32",
            "OMP_NUM_THREADS": "1",
            "CHAOS_FOLDER": str(self.folder),
            "CHAOS_STEP_S": "0.01",
            "PYTHONPATH": os.pathsep.join([str(hooks), str(REPOSITORY)]),
        }  # fmt: skip

    # -- processes

    def start(
        self, name: str, command: tuple[str, ...], env: dict[str, str] | None = None
    ) -> Child:
        log = self.folder / f"{name}.log"
        given = self.env | (env or {})
        child = Child(name, command, log, given, self._spawn(command, log, given))
        self.children[name] = child
        return child

    def _spawn(
        self, command: tuple[str, ...], log: Path, env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return tether.spawn(
                [sys.executable, *command], death_signal=signal.SIGKILL, env=env, output=output
            )

    def _keep_alive(self) -> None:
        while not self._stop.wait(0.05):
            for child in list(self.children.values()):
                if child.wanted and child.process.poll() is not None:
                    child.process = self._spawn(child.command, child.log, child.env)
                    child.num_starts += 1
                    child.started_at = time.monotonic()

    @property
    def workers(self) -> list[Child]:
        return [child for name, child in self.children.items() if name.startswith("worker")]

    def kill(self, child: Child) -> None:
        self.num_kills += 1
        child.signal(signal.SIGKILL)

    @contextlib.contextmanager
    def frozen(self, *pids: int):
        """SIGSTOP until the end of the block."""
        self.num_stops += 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in reversed(pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def engine_pid(self, worker: Child) -> int | None:
        row = self.record_of(worker)
        pid = None if row is None else row.stats.get("engine_pid")
        return int(pid) if pid is not None and psutil.pid_exists(int(pid)) else None

    # -- what it says of itself

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    def ready(self) -> bool:
        """Every process is up, and every worker beats."""
        with contextlib.suppress(httpx.HTTPError, SQLAlchemyError):
            reply = httpx.get(f"{self.api}/health/live", timeout=2, trust_env=False)
            pids = {row.pid for row in self.live_workers()}
            return reply.is_success and pids >= {child.pid for child in self.workers}
        return False

    def live_workers(self) -> list[WorkerRecord]:
        with self.database.read() as connection:
            return store.live_workers(connection, self.database.clock(connection))

    def record_of(self, worker: Child) -> WorkerRecord | None:
        return next((row for row in self.live_workers() if row.pid == worker.pid), None)

    def rows(self, name: str) -> list[Row]:
        """Of a scenario's jobs."""
        query = select(jobs).where(jobs.c.custom_id.startswith(f"{name}-"))
        with self.database.read() as connection:
            found = connection.execute(query).all()
            tried: dict[str, list[Tried]] = {}
            of_these = select(attempts).join(jobs).where(jobs.c.custom_id.startswith(f"{name}-"))
            for each in connection.execute(of_these):
                tried.setdefault(each.job_id, []).append(Tried(each.outcome, each.kept_tokens))
            return [_row(row, tried.get(row.id, [])) for row in found]

    def counts(self, name: str) -> dict[JobState, int]:
        """Of a scenario's jobs, how many are in each state."""
        query = select(jobs.c.state, func.count()).where(jobs.c.custom_id.startswith(f"{name}-"))
        with self.database.read() as connection:
            found = connection.execute(query.group_by(jobs.c.state)).all()
        return {JobState(state): num for state, num in found}

    def has_ended(self, job_id: str) -> bool:
        with self.database.read() as connection:
            return bool(store.ended(connection, [job_id]))

    def running(self, worker_id: str | None = None) -> dict[str, int]:
        """Fences of jobs now running, of one worker or of all; of the background's none, which wait
        for all others."""
        query = select(jobs.c.id, jobs.c.fence).where(
            jobs.c.state == "running", jobs.c.priority >= 0
        )
        if worker_id is not None:
            query = query.where(jobs.c.worker_id == worker_id)
        with self.database.read() as connection:
            return dict(connection.execute(query).all())

    def num_suspects(self) -> int:
        """Jobs that were in an engine's death and have not ended."""
        query = select(func.count()).where(
            jobs.c.crash_count > 0, jobs.c.state.in_(["queued", "running"])
        )
        with self.database.read() as connection:
            return connection.execute(query).scalar_one()

    def unsettled(self, fences: dict[str, int]) -> set[str]:
        """Of those the ones that are still as they were, or wait: not running again nor ended."""
        query = select(jobs.c.id, jobs.c.fence, jobs.c.state).where(jobs.c.id.in_(list(fences)))
        with self.database.read() as connection:
            return {
                job_id
                for job_id, fence, state in connection.execute(query)
                if state not in TERMINAL and not (state == "running" and fence > fences[job_id])
            }

    def writes(self) -> list[Write]:
        file = self.folder / WRITES_FILE
        lines = file.read_text().splitlines() if file.exists() else []
        told = [json.loads(line) for line in lines]
        return [Write(line["id"], line["fence"], line["accepted"]) for line in told]

    # -- waiting

    def until(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> float:
        """Seconds until it held. Raises AssertionError, with the ends of all logs."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(SQLAlchemyError):
                if condition():
                    return time.monotonic() - began
            assert time.monotonic() < began + timeout_s, f"waited in vain\n{self.log_tails()}"
            time.sleep(0.05)

    def all_ended(self, name: str, num: int) -> bool:
        counts = self.counts(name)
        return sum(counts.values()) >= num and set(counts) <= TERMINAL

    def log_tails(self) -> str:
        return "\n".join(
            f"-- {child.name}\n" + child.log.read_text(errors="replace")[-1500:]
            for child in self.children.values()
        )


def _row(row, tried: list[Tried]) -> Row:
    output, error = decode(row.output), decode(row.error)
    return Row(
        tried=tuple(tried),
        id=row.id,
        custom_id=row.custom_id,
        state=row.state,
        fence=row.fence,
        attempt=row.attempt,
        crash_count=row.crash_count,
        text=None if output is None else output["choices"][0]["text"],
        output_tokens=None if output is None else output["usage"]["completion_tokens"],
        completion_tokens=row.completion_tokens,
        max_attempts=row.max_attempts,
        wasted_tokens=row.wasted_tokens,
        error_code=None if error is None else error["code"],
        finished_at=row.finished_at,
    )
