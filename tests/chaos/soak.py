"""`make soak`: hours of light load and light faults; does anything grow?

    python -m tests.chaos.soak --minutes 30 [--sqlite] [--report]

Samples each process's memory, descriptors and threads, and the engines' KV blocks at rest, and
prints the slope of each by least squares: per hour, beside its value. The first fifth of the time
is warming up and does not count. Redis is emptied and frozen, its connections are cut, jobs are
cancelled; no process is killed, since a new one would hide what its predecessor gathered.
"""

import argparse
import contextlib
import datetime
import json
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis
from sqlalchemy.exc import SQLAlchemyError

from tests.chaos.checker import Violation, check
from tests.chaos.cluster import Cluster
from tests.chaos.oracle import Oracle
from tests.chaos.proxy import Mode
from tests.chaos.report import RESULTS
from tests.chaos.run import Size, Storm, evidence_of, storm_on
from tests.tiny_llama import write_tiny_llama

SAMPLE_S = 5.0
CALM_S = 20.0  # between two faults
JOBS_S = 3.0  # asked for in each second
WARM_UP = 0.2
# growth in an hour that is still flat: allocators and caches breathe
MOST_MB_H, MOST_FDS_H, MOST_THREADS_H = 40.0, 10.0, 4.0


@dataclass
class Series:
    """Values of one thing over time."""

    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.at.append(at)
        self.values.append(value)

    def slope_per_hour(self, *, warm_up: float = WARM_UP) -> float:
        """By least squares, without the warm-up."""
        if len(self.at) < 2:
            return 0.0
        start = self.at[0] + warm_up * (self.at[-1] - self.at[0])
        pairs = [(a, v) for a, v in zip(self.at, self.values, strict=True) if a >= start]
        mean_at = sum(a for a, _ in pairs) / len(pairs)
        mean = sum(v for _, v in pairs) / len(pairs)
        spread = sum((a - mean_at) ** 2 for a, _ in pairs)
        return 3600 * sum((a - mean_at) * (v - mean) for a, v in pairs) / spread if spread else 0.0


class Meter:
    """Samples all processes of a cluster until told to stop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.series: dict[str, Series] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Meter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            with contextlib.suppress(SQLAlchemyError, psutil.Error):
                self.sample()

    def sample(self) -> None:
        at = time.monotonic()
        pids = {child.name: child.pid for child in self._cluster.children.values()}
        for worker in self._cluster.workers:
            if (engine := self._cluster.engine_pid(worker)) is not None:
                pids[f"{worker.name}'s engine"] = engine
        for name, pid in pids.items():
            process = psutil.Process(pid)
            self._add(f"{name} MB", at, process.memory_info().rss / 1e6)
            self._add(f"{name} descriptors", at, process.num_fds())
            self._add(f"{name} threads", at, process.num_threads())
        if not self._cluster.running():
            for record in self._cluster.live_workers():
                if record.stats.get("num_blocks"):
                    used = record.stats["num_blocks"] - record.stats["num_free_blocks"]
                    self._add(f"worker {record.pid} blocks at rest", at, used)

    def _add(self, name: str, at: float, value: float) -> None:
        self.series.setdefault(name, Series()).add(at, value)

    def lines(self) -> list[str]:
        return [
            f"{name:32} {series.values[-1]:10.1f} {series.slope_per_hour():+10.2f} an hour"
            for name, series in sorted(self.series.items())
        ]

    def growing(self) -> list[str]:
        """What has a slope that is not flat any more."""
        bounds = {"MB": MOST_MB_H, "descriptors": MOST_FDS_H, "threads": MOST_THREADS_H}
        return [
            f"{name} grows by {series.slope_per_hour():.1f} an hour"
            for name, series in self.series.items()
            for unit, most in bounds.items()
            if name.endswith(unit) and series.slope_per_hour() > most
        ]


def light_faults(storm: Storm, until: float) -> None:
    """Redis emptied, frozen and cut off, in turn."""
    cluster = storm.cluster
    for i in range(1 << 20):
        if time.monotonic() + CALM_S > until:
            return
        time.sleep(CALM_S * storm.rng.uniform(0.5, 1.5))
        cluster.num_stops += 1
        if i % 3 == 0:
            with redis.Redis.from_url(cluster.valkey.url) as client:
                client.flushall()
        elif i % 3 == 1 and cluster.valkey.pid is not None:
            with cluster.frozen(cluster.valkey.pid):
                time.sleep(2)
        else:
            cluster.redis_proxy.mode = Mode.RESET
            time.sleep(0.5)
            cluster.redis_proxy.mode = Mode.PASS


def soak(cluster: Cluster, oracle: Oracle, minutes: float) -> tuple[Meter, list[Violation], Storm]:
    seconds = minutes * 60
    num_jobs = max(10, round(seconds * JOBS_S))
    size = Size(num_jobs=num_jobs, num_faults=0, per_call=3, pause_s=3 * 3 / JOBS_S)
    storm = storm_on(cluster, oracle, "soak", size, seed=random.randrange(1 << 30))
    until = time.monotonic() + seconds
    with storm.clients, Meter(cluster) as meter:
        light_faults(storm, until)
        while time.monotonic() < until and not storm.clients.done:
            time.sleep(0.5)
        storm.settle()
        time.sleep(3 * SAMPLE_S)
    return meter, check(evidence_of(storm, oracle)), storm


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sqlite", action="store_true")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenmill-soak-") as text:
        folder = Path(text)
        folder.chmod(0o755)
        model_dir = write_tiny_llama(folder / "model")
        oracle = Oracle(model_dir, most_tokens=60)
        with Cluster(folder / "cluster", model_dir, postgres=not options.sqlite) as cluster:
            meter, violations, storm = soak(cluster, oracle, options.minutes)
            num_jobs = len(cluster.rows(storm.name))
    print(f"{options.minutes:g} minutes, {num_jobs} jobs, {cluster.num_stops} faults")  # noqa: T201
    print("\n".join(meter.lines()))  # noqa: T201
    broken = [f"{each.invariant}: {each.what}" for each in violations] + meter.growing()
    for each in broken:
        print(f"BROKEN {each}", file=sys.stderr)  # noqa: T201
    if options.report:
        stem = RESULTS / f"{datetime.date.today()}-soak-cpu{os.cpu_count()}"
        told = {"minutes": options.minutes, "jobs": num_jobs, "lines": meter.lines()}
        stem.with_suffix(".json").write_text(json.dumps(told | {"broken": broken}, indent=1) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
