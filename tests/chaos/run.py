"""One scenario: clients ask, faults come, all must end; then the checker judges.

A scenario is a function that gets a Storm and does its faults while clients are at work. What is
around it is the same for all: load, rest, evidence, figures.
"""

import contextlib
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import psutil
import redis

from jobs.lifecycle import JobState
from tests.chaos.background import Batch
from tests.chaos.checker import Evidence, Held, Recovery, Violation, check, stale_writes
from tests.chaos.cluster import LEASE_S, OTHER_TENANT, TENANTS, Child, Cluster
from tests.chaos.history import OK, UNKNOWN, Clients, History
from tests.chaos.oracle import CANARY, Oracle

RECOVERY_S = LEASE_S + 5
TOLD_S = 180.0  # a sweeper that takes a webhook up and dies is waited for two minutes
SLACK = {"descriptors": 20.0, "threads": 10.0}  # pools of connections fill as they are used
_names = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of a scenario: CI's short form, or `make chaos`."""

    num_jobs: int
    num_faults: int
    tokens: tuple[int, int] = (5, 60)
    per_call: int = 10
    pause_s: float = 0.2
    num_rows: int = 20  # of a batch in the background


@dataclass(kw_only=True)
class Result:
    """What a scenario showed; one line of JSON."""

    scenario: str
    seed: int
    seconds: float = 0.0
    jobs: int = 0
    kills: int = 0
    stops: int = 0
    lost: int = 0
    duplicates: int = 0
    stale_refused: int = 0
    stale_accepted: int = 0
    false_202s: int = 0
    unknown_resolved: int = 0
    wrong_texts: int = 0
    attempts_max: int = 0
    tokens_kept: int = 0
    tokens_wasted: int = 0
    blocks_leaked: int = 0
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)  # of recoveries, by kind
    figures: dict[str, float | None] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    @property
    def wasted_share(self) -> float:
        return self.tokens_wasted / max(1, self.tokens_kept + self.tokens_wasted)

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"wasted_share": round(self.wasted_share, 4)}


@dataclass(kw_only=True)
class Storm:
    """What a scenario's faults have in hand."""

    cluster: Cluster
    oracle: Oracle
    clients: Clients
    rng: random.Random
    name: str
    size: Size
    result: Result
    recoveries: list[Recovery] = field(default_factory=list)
    may_fail: dict[str, str | None] = field(default_factory=dict)
    without_redis: list[tuple[float, float]] = field(default_factory=list)  # from when until when
    slack_s: float = 0.0  # on every bound of time: others may have the machine
    _watchers: list[threading.Thread] = field(default_factory=list)

    def meet_work(self) -> bool:
        """Return when some job is running; False when all have ended, and a fault meets nothing."""
        self.cluster.until(lambda: bool(self.cluster.running()) or self.all_ended)
        return not self.all_ended

    @property
    def all_ended(self) -> bool:
        """Every job was accepted and has ended."""
        num = len(self.clients.history.asks)
        return self.clients.done and self.cluster.all_ended(self.name, num)

    def kill_worker(self, worker: Child) -> None:
        """SIGKILL; the time is taken until all it held runs again or has ended.

        Not where it is the only one: its jobs wait for a new process and its model.
        """
        record = self.cluster.record_of(worker)
        self.cluster.kill(worker)
        if record is not None and len(self.cluster.workers) > 1:
            self.watch("kill -9 of a worker", self.cluster.running(record.id), RECOVERY_S)

    def watch(self, kind: str, fences: dict[str, int], bound_s: float) -> None:
        if not fences:
            return
        began = time.monotonic()

        def look() -> None:
            with contextlib.suppress(AssertionError):
                self.cluster.until(lambda: not self.cluster.unsettled(fences))
            self.recoveries.append(Recovery(kind, time.monotonic() - began, bound_s + self.slack_s))

        self._watchers.append(threading.Thread(target=look))
        self._watchers[-1].start()

    @property
    def recovered(self) -> bool:
        """Nothing is being timed."""
        return not any(watcher.is_alive() for watcher in self._watchers)

    def settle(self) -> None:
        """Everything has been submitted and has ended."""
        self.cluster.until(lambda: self.clients.done)
        num = len(self.clients.history.asks)
        self.cluster.until(lambda: self.cluster.all_ended(self.name, num))
        for watcher in self._watchers:
            watcher.join()


def run(
    cluster: Cluster,
    oracle: Oracle,
    faults: Callable[[Storm], None],
    size: Size,
    *,
    seed: int = 0,
    cancels: float = 0.02,
    slack_s: float = 0.0,
) -> tuple[Result, list[Violation]]:
    """The scenario, its figures, and every promise it broke."""
    began, kills, stops = time.monotonic(), cluster.num_kills, cluster.num_stops
    resources = _resources(cluster)
    storm = storm_on(
        cluster, oracle, faults.__name__, size, seed=seed, cancels=cancels, slack_s=slack_s
    )
    result = storm.result
    batch = Batch(
        lambda: cluster.api, oracle, storm.clients.history, headers=cluster.headers(OTHER_TENANT),
        name=storm.name, num_rows=size.num_rows, tokens=size.tokens,
    )  # fmt: skip
    with storm.clients, batch:
        faults(storm)
        storm.settle()
    evidence = evidence_of(storm, oracle)
    after = _resources(cluster)
    evidence.held = [
        Held(f"{what} of {name}", resources[what, name], after[what, name], SLACK[what])
        for what, name in resources.keys() & after.keys()
    ]
    assert batch.id is not None
    with contextlib.suppress(AssertionError):
        cluster.until(lambda: batch.id in cluster.receiver.events, TOLD_S)
    evidence.webhooks = {batch.id: cluster.receiver.events.get(batch.id, ())}
    violations = check(evidence)
    _count_submits(storm)
    result.seconds = round(time.monotonic() - began, 1)
    result.kills, result.stops = cluster.num_kills - kills, cluster.num_stops - stops
    _count(result, evidence, violations)
    return result, violations


def storm_on(
    cluster: Cluster,
    oracle: Oracle,
    title: str,
    size: Size,
    *,
    seed: int = 0,
    cancels: float = 0.02,
    slack_s: float = 0.0,
) -> Storm:
    """Clients that are about to ask, under a name of their own."""
    name = f"{title}{next(_names)}"
    clients = Clients(
        lambda: cluster.api, oracle, History(), name=name, num_jobs=size.num_jobs,
        tokens=size.tokens, per_call=size.per_call, pause_s=size.pause_s, seed=seed,
        cancels=cancels, headers=[cluster.headers(tenant) for tenant in TENANTS],
    )  # fmt: skip
    return Storm(
        cluster=cluster, oracle=oracle, clients=clients, rng=random.Random(seed), name=name,
        size=size, result=Result(scenario=title, seed=seed), slack_s=slack_s,
    )  # fmt: skip


def evidence_of(storm: Storm, oracle: Oracle) -> Evidence:
    cluster, history = storm.cluster, storm.clients.history
    cluster.until(cluster.ready)
    free_blocks = _free_blocks(cluster)
    rows = cluster.rows(storm.name)
    ids = {row.id for row in rows}
    return Evidence(
        history=history,
        rows=rows,
        writes=[write for write in cluster.writes() if write.job_id in ids],
        texts={custom_id: oracle.text(ask) for custom_id, ask in history.asks.items()},
        may_fail=storm.may_fail,
        canaries_found=list(canaries_found(cluster)),
        free_blocks=free_blocks,
        recoveries=storm.recoveries,
    )


def _resources(cluster: Cluster) -> dict[tuple[str, str], float]:
    """What each process of its own holds; one that was started anew has another name."""
    found: dict[tuple[str, str], float] = {}
    for child in cluster.children.values():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(child.pid)
            name = f"{child.name} ({child.pid})"
            found["descriptors", name] = process.num_fds()
            found["threads", name] = process.num_threads()
    return found


def _free_blocks(cluster: Cluster) -> list[tuple[int, int]]:
    """Of engines that have come to rest, by a beat after that."""
    found: dict[str, tuple[int, int]] = {}

    def rested() -> bool:
        found.clear()
        for record in cluster.live_workers():
            stats = record.stats
            if stats.get("num_blocks"):
                found[record.id] = (stats["num_free_blocks"], stats["num_blocks"])
        return all(free == num for free, num in found.values())

    with contextlib.suppress(AssertionError):
        cluster.until(rested, timeout_s=15)
    return list(found.values())


def canaries_found(cluster: Cluster) -> Iterator[str]:
    """Prompts that have come to where none belongs: logs, and every key of Redis."""
    for log in cluster.folder.glob("*.log"):
        if CANARY in log.read_text(errors="replace"):
            yield f"a prompt stands in {log.name}"
    with redis.Redis.from_url(cluster.valkey.url) as client:
        for key in client.scan_iter():
            kind = client.type(key)
            content = {
                b"list": lambda k: client.lrange(k, 0, -1),
                b"hash": lambda k: list(client.hgetall(k).items()),
                b"set": lambda k: list(client.smembers(k)),
                b"zset": lambda k: client.zrange(k, 0, -1),
            }.get(kind, client.get)(key)
            if CANARY in repr(content):
                yield f"a prompt stands in Redis under {key!r}"


def _count(result: Result, evidence: Evidence, violations: list[Violation]) -> None:
    by_name = [violation.invariant for violation in violations]
    result.jobs = len(evidence.rows)
    ended = {row.id for row in evidence.rows if row.state not in ("queued", "running")}
    result.lost = sum(i not in ended for i in evidence.history.accepted.values())
    result.duplicates = by_name.count("I2")
    result.stale_refused, result.stale_accepted = stale_writes(evidence)
    result.false_202s = by_name.count("I4")
    events = [e for e in evidence.history.events if e.kind == "submit"]
    unknown = {event.key for event in events if event.outcome == UNKNOWN}
    result.unknown_resolved = len(unknown & {e.key for e in events if e.outcome == OK})
    result.wrong_texts = by_name.count("I8")
    result.attempts_max = max((row.attempt for row in evidence.rows), default=0)
    result.tokens_kept = sum(row.completion_tokens for row in evidence.rows)
    result.tokens_wasted = sum(
        row.wasted_tokens for row in evidence.rows if row.state == JobState.SUCCEEDED
    )
    result.blocks_leaked = sum(num - free for free, num in evidence.free_blocks)
    for each in evidence.recoveries:
        result.recoveries.setdefault(each.kind, []).append(round(each.seconds, 2))
        result.bounds[each.kind] = round(each.bound_s, 2)
    result.violations = [f"{v.invariant}: {v.what}" for v in violations]


def _count_submits(storm: Storm) -> None:
    """Those that began while Redis was away; counted when each of them has ended."""
    if storm.without_redis:
        told = [storm.clients.history.answered("submit", *each) for each in storm.without_redis]
        storm.result.figures["submits_without_redis"] = float(sum(num for num, _ in told))
        storm.result.figures["submits_answered_without_redis"] = float(sum(ok for _, ok in told))


def percentile(values: list[float], share: float) -> float | None:
    """Nearest rank."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else None


@contextlib.contextmanager
def stopped(cluster: Cluster, child: Child, number: signal.Signals) -> Iterator[None]:
    """The child gets a signal and stays down until the end of the block."""
    child.wanted = False
    child.signal(number)
    try:
        yield
    finally:
        child.wanted = True
