"""A small deployment for tests: a database, a Redis, a sweeper, and workers that may be killed.

All of it is real; only the model is tiny and the times are short.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis
from sqlalchemy import or_, select

from cli import tether
from jobs import store
from jobs.celery_app import make_app
from jobs.database import Database
from jobs.events import Channel, Publisher
from jobs.lifecycle import TERMINAL, JobState
from jobs.models import jobs
from jobs.records import JobRecord, NewJob, WorkerRecord
from jobs.settings import Settings
from jobs.tenants import DEFAULT_TENANT
from worker import sweeper

TIMEOUT_S = 120.0  # for anything; the machine may be busy
MODEL = "tiny"
CELERY = (
    *("-m", "celery", "-A", "worker.app", "worker"),
    *("--without-gossip", "--without-mingle", "--loglevel", "INFO"),
)
SHORT_TIMES = {
    "TOKENMILL_LEASE_S": "3",
    "TOKENMILL_BEAT_S": "0.5",
    "TOKENMILL_SWEEP_S": "0.1",
    "TOKENMILL_REPUBLISH_S": "1",
    "TOKENMILL_DRAIN_GRACE_S": "2",
}


@dataclass
class Worker:
    """`celery -A worker.app worker` as a child of the test."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> int:
        return tether.stop(self.process, sig=sig, grace_s=TIMEOUT_S)

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Deployment:
    """Where jobs are submitted and looked at, and workers started."""

    folder: Path
    database_url: str
    redis_url: str
    model_dir: Path
    extra: dict[str, str] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TOKENMILL_") and name not in ("DATABASE_URL", "REDIS_URL")
        }
        self.env |= {
            "DATABASE_URL": self.database_url,
            "REDIS_URL": self.redis_url,
            "TOKENMILL_MODELS": f"{MODEL}={self.model_dir},other={self.model_dir}",
            "TOKENMILL_KEY_PREFIX": f"{self.folder.name}:",
            "TOKENMILL_NUM_BLOCKS": "1000",
            "TOKENMILL_MAX_NUM_SEQS": "16",
            "TOKENMILL_MAX_NUM_BATCHED_TOKENS": "128",
            "TOKENMILL_THREADS": "1",
            # slow ones: jobs are to be met in their midst, and the others end them in a second
            "TOKENMILL_KERNELS": "reference",
            **SHORT_TIMES,
            **self.extra,
        }
        self.settings = Settings.from_env(self.env)
        self.database = Database(self.settings.database_url)
        self.app = make_app(self.settings)
        self._stop = threading.Event()
        self._sweeper = threading.Thread(target=sweeper.run, args=(self.settings, self._stop))
        self._sweeper.start()

    def close(self) -> None:
        for worker in self.workers:
            worker.stop(signal.SIGKILL)
        self._stop.set()
        self._sweeper.join(TIMEOUT_S)
        self.app.close()
        self.database.dispose()

    # -- workers

    def start_worker(self, *, wait: bool = True, command: tuple[str, ...] = CELERY) -> Worker:
        log = self.folder / f"worker-{len(self.workers)}.log"
        with log.open("wb") as output:
            process = tether.spawn(
                [sys.executable, *command],
                death_signal=signal.SIGKILL,
                env=self.env,
                output=output,
            )
        worker = Worker(process, log)
        self.workers.append(worker)
        if wait:
            self.wait_for(lambda: self.row_of(worker) is not None, worker)
        return worker

    def row_of(self, worker: Worker) -> WorkerRecord | None:
        with self.database.read() as connection:
            live = store.live_workers(connection, self.database.clock(connection))
        return next((row for row in live if row.pid == worker.pid), None)

    def next_beat(self, worker: Worker) -> WorkerRecord:
        """Its row as of a beat after this call: what it says is not older than the call."""
        last = self.row_of(worker)
        assert last is not None
        row = last

        def beaten() -> bool:
            nonlocal row
            row = self.row_of(worker) or last
            return row.lease_until > last.lease_until

        self.wait_for(beaten, worker)
        return row

    def engine_pid(self, worker: Worker) -> int:
        """Of the process that has its model loaded, as the worker says at its beats."""
        self.wait_for(lambda: self._engine_of(worker) is not None, worker)
        engine = self._engine_of(worker)
        assert engine is not None
        return engine

    def _engine_of(self, worker: Worker) -> int | None:
        row = self.row_of(worker)
        pid = None if row is None else row.stats.get("engine_pid")
        return pid if pid is not None and psutil.pid_exists(pid) else None

    # -- jobs

    def submit(self, *new_jobs: NewJob) -> list[str]:
        with self.database.begin() as connection:
            now = self.database.clock(connection)
            submitted = store.submit(connection, new_jobs, tenant=DEFAULT_TENANT, now=now)
        return [record.id for record in submitted.records]

    def get(self, job_id: str) -> JobRecord:
        record = self.find(job_id)
        assert record is not None, f"no job {job_id}"
        return record

    def find(self, job_id: str) -> JobRecord | None:
        with self.database.read() as connection:
            return store.get(connection, job_id, tenant=DEFAULT_TENANT)

    def cancel(self, job_id: str) -> None:
        """As the API does it: the row, then a hint."""
        with self.database.begin() as connection:
            store.cancel(
                connection, job_id, tenant=DEFAULT_TENANT, now=self.database.clock(connection)
            )
        publisher = Publisher(self.settings)
        publisher.publish(Channel.CANCELLED, [job_id])
        publisher.close()

    def ended(self, *job_ids: str) -> list[JobRecord]:
        """Their rows, once all of them have ended."""
        self.wait_for(lambda: all((row := self.find(id_)) and row.ended for id_ in job_ids))
        return [self.get(job_id) for job_id in job_ids]

    def running(self, job_id: str) -> JobRecord:
        """Its row, once it has tokens in a checkpoint; or has ended before anybody looked."""
        self.wait_for(lambda: self._checkpointed(job_id))
        return self.get(job_id)

    def _checkpointed(self, job_id: str) -> bool:
        begun = or_(jobs.c.checkpoint_tokens > 0, jobs.c.state.in_(TERMINAL))
        query = select(jobs.c.id).where(jobs.c.id == job_id, begun)
        with self.database.read() as connection:
            return connection.scalar(query) is not None

    def counts(self) -> dict[JobState, int]:
        with self.database.read() as connection:
            return {state: n for (_, state), n in store.counts(connection).items()}

    def all_ended(self) -> bool:
        return set(self.counts()) <= TERMINAL

    def wait_for(self, condition: Callable[[], bool], worker: Worker | None = None) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if worker is not None and worker.process.poll() is not None:
                raise AssertionError(f"worker ended:\n{worker.log_text()}")
            if time.monotonic() > deadline:
                logs = "\n".join(each.log_text()[-4000:] for each in self.workers)
                raise AssertionError(f"waited {TIMEOUT_S:g} s in vain; {self.counts()}\n{logs}")
            time.sleep(0.02)

    # -- Redis

    def unacknowledged(self) -> int:
        prefix = self.settings.key_prefix
        with redis.Redis.from_url(self.redis_url) as client:
            return int(client.hlen(f"{prefix}unacked"))


def completion(max_tokens: int = 20, prompt: str = "once upon a time", **values) -> NewJob:
    """A job of exactly so many tokens; a field of `body` that is None is left out."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    body |= values.pop("body", {})
    body = {name: value for name, value in body.items() if value is not None}
    return NewJob(**{"url": "/v1/completions", "model": MODEL, "body": body} | values)
