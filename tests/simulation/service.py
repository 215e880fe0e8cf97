"""A whole deployment in one thread: one seed drives clock, network, crashes and who acts next.

Clients submit, retry, look and cancel; sweepers and workers run the product's own code (callers.py,
processes.py) on real SQL (servers.py). For a while everything fails that can; then faults stop, and
within a bound all must come to rest. What must hold is checked after every commit (audit.py).
In the manner of FoundationDB's simulation and TigerBeetle's VOPR.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from jobs import runway, store
from jobs.claims import Held
from jobs.lifecycle import TERMINAL, JobState
from jobs.models import Base
from tests.simulation.audit import Row, Spec, check_rest, check_rows
from tests.simulation.callers import ClientProcess, SweeperProcess
from tests.simulation.fake_engine import KV_TOKENS, POISON
from tests.simulation.processes import LEASE_S, Process, WorkerProcess
from tests.simulation.servers import (
    Killed,
    Messages,
    connection_lost,
    open_memory,
    say_nothing,
)

EPOCH = 1_790_000_000.0
MOST_ROUNDS = 400  # for all to come to rest after the faults
MOST_NESTED = 3

_connection = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often, for each transaction or action."""

    database: float = 0.04
    kill: float = 0.02
    pause: float = 0.04
    engine: float = 0.01
    redis: float = 0.02


CALM = Faults(database=0, kill=0, pause=0, engine=0, redis=0)


class World:
    """One run. `run` raises AssertionError where a promise is broken."""

    def __init__(self, seed: int) -> None:
        global _connection
        self.rng = random.Random(seed)
        self.now = EPOCH
        self.faults = CALM
        if _connection is None:
            _connection = open_memory()
        self.connection = _connection
        self.rows: dict[str, Row] = {}
        self._num_changes = -1  # when they were read
        self.accepted: set[str] = set()
        self.beaten_at: dict[str, float] = {}  # by worker id: true time of its last beat
        self.num_generated: dict[str, int] = {}
        self.unaccountable: set[str] = set()  # tokens of these died with a process
        self.num_poisoned = self.num_engine_kills = self.num_failures = 0
        self.messages = Messages(self)
        self._specs = {f"k{i}": self._spec(f"k{i}") for i in range(self._num_jobs())}
        self._poisonous = any(spec.poison for spec in self._specs.values())
        self._num_workers = self.rng.choice([1, 2, 2, 3, 3])
        self.kv_tokens = self.rng.choice(KV_TOKENS)
        self._born = 0
        self._depth = 0
        self._acting: list[str] = []  # threads in the midst of an action; the last one acts now
        self._database_down_until = 0.0
        self._redis_down_until = 0.0
        self._births: list[float] = []  # when the next workers start
        self.client = ClientProcess(self, list(self._specs.values()))
        self.sweepers = [SweeperProcess(self, f"s{i}", self._skew()) for i in range(2)]
        self.workers: list[WorkerProcess] = []

    def _num_jobs(self) -> int:
        """Few, so that much happens to each; or more of the background than a worker may claim."""
        self._mostly_background = self.rng.random() < 0.1
        return 14 if self._mostly_background else self.rng.randint(2, 5)

    def _spec(self, key: str) -> Spec:
        rng = self.rng
        return Spec(
            key=key,
            prompt=int(key[1:]) + (POISON if rng.random() < 0.08 else 0),
            n=rng.choice([1, 1, 2]),
            max_tokens=16 if self._mostly_background else rng.choice([1, 4, 8, 16]),
            max_attempts=rng.choice([2, 30, 30]),
            priority=-5 if self._mostly_background else rng.choice([0, 0, 0, 1, -1, -5]),
            deadline_s=rng.choice([None, None, None, 0.5, 5.0]),
            tries_failures=rng.random() < 0.5,
        )

    def _skew(self) -> float:
        return self.rng.choice([0.0, -7200.0, 7200.0])

    # -- what the parts ask

    def chance(self, probability: float) -> bool:
        return self.faults is not CALM and self.rng.random() < probability

    def spec_of(self, row: Row) -> Spec:
        return self._specs[row["custom_id"]]

    def generated(self, key: str) -> None:
        job_id = key.rpartition(":")[0]
        self.num_generated[job_id] = self.num_generated.get(job_id, 0) + 1

    def before_transaction(self, process: Process) -> None:
        self.now += self.rng.random() * 0.02
        if self.chance(self.faults.database) or self.chance(0.1):
            self.others_act(0.05)
        if self.chance(self.faults.kill / 2):
            raise Killed
        if self.now < self._database_down_until or self.chance(self.faults.database / 2):
            raise connection_lost()

    def fate_of_commit(self) -> str:
        if self.chance(self.faults.database):
            return self.rng.choice(["lost", "in doubt"])
        if self.chance(self.faults.kill / 2):
            return self.rng.choice(["killed before", "killed behind"])
        return "in"

    def committed(self, process: Process) -> None:
        before, self.rows = self.rows, self._read_anew()
        if isinstance(process, WorkerProcess) and self._acting[-1] == "lease":
            self.beaten_at[process.name] = process.database.asked_at
            process.really_held = {
                held
                for held in (process.holding_told.held if process.holding_told else ())
                if self.rows[held.id]["state"] == JobState.RUNNING
                and self.rows[held.id]["fence"] == held.fence
            }
        check_rows(self, process, before, self.rows)

    def _read_anew(self) -> dict[str, Row]:
        """The rows, which are those of the last time while nothing has been written."""
        driver: Any = self.connection.connection.driver_connection
        before, self._num_changes = self._num_changes, driver.total_changes
        return self.rows if before == self._num_changes else self._read()

    def _read(self) -> dict[str, Row]:
        return {row["id"]: row for row in self._rows("jobs")}

    def _rows(self, table: str) -> list[Row]:
        cursor = self.connection.connection.cursor()
        cursor.execute(f"SELECT * FROM {table}")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def attempts(self) -> list[Row]:
        return self._rows("attempts")

    def totals(self) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        for row in self._rows("tallies"):
            key = (row["name"], row["label"])
            found[key] = found.get(key, 0) + row["amount"]
        return found

    def ended(self, worker_: WorkerProcess) -> None:
        """A drain is over."""
        held = [row["id"] for row in self.rows.values() if row["worker_id"] == worker_.name
                and row["state"] == JobState.RUNNING]  # fmt: skip
        assert not held, f"{worker_.name} drained and left {held}"
        self.beaten_at[worker_.name] = float("-inf")
        worker_.alive = False
        self._births.append(self.now + 0.2)

    # -- who acts

    def run(self) -> None:
        with simulated(self):
            for table in reversed(Base.metadata.sorted_tables):
                self.connection.connection.cursor().execute(f"DELETE FROM {table.name}")
            self._births = [self.now + i * 0.1 for i in range(self._num_workers)]
            self.faults = self._draw_faults()
            for _ in range(self.rng.randint(30, 110)):
                self._fault()
                self._act()
            self.faults = CALM
            self._come_to_rest()
            check_rest(self)

    def _draw_faults(self) -> Faults:
        """Each run has a few kinds of faults and not the others: they hide each other."""
        drawn = Faults()
        for name in ("database", "kill", "pause", "engine", "redis"):
            if self.rng.random() < 0.4:
                drawn = replace(drawn, **{name: 0.0})
        return drawn

    def _fault(self) -> None:
        """What happens to whole processes and servers, between two actions."""
        if self.chance(self.faults.database / 4):
            self._database_down_until = self.now + self.rng.random()
        if self.chance(self.faults.redis):
            self.messages.flush()
        if self.chance(self.faults.redis):
            self.messages.down, self._redis_down_until = True, self.now + 2 * self.rng.random()
        if self.now >= self._redis_down_until:
            self.messages.down = False
        processes: list[Process] = [*self.sweepers, *self.workers]
        if self.chance(self.faults.pause):
            paused = self.rng.sample(processes, self.rng.randint(1, len(processes)))
            for process in paused:  # thawed in another order than frozen
                process.paused_until = self.now + self.rng.uniform(0.1, 2.5) * LEASE_S
        if self.workers:
            worker_ = self.rng.choice(self.workers)
            if self.chance(self.faults.kill):
                self._kill(worker_)
            # few have ids that wait for a place: those are to meet a drain too
            elif self.chance(self.faults.kill * (10 if worker_.book.unclaimed else 0.5)):
                worker_.stop()
            elif self.chance(self.faults.engine) and worker_.engine.requests:
                self.num_engine_kills += 1
                worker_.engine.kill()
            elif self.chance(self.faults.engine / 2) and worker_.engine.requests:
                self.num_engine_kills += 1
                worker_.engine.stuck = True

    def _kill(self, process: Process) -> None:
        if isinstance(process, WorkerProcess) and process.alive:
            process.alive = False
            held = [attempt.job.id for attempt in process.book.attempts.values()]
            held += [entry_id(entry) for entry in process.window]
            held += [key.rpartition(":")[0] for key in process.engine.requests]
            while not process.ledger._inbox.empty():
                held.append(entry_id(process.ledger._inbox.get()))
            self.unaccountable |= set(held)
            self._births.append(self.now + 0.3)
        elif process.kind == "sweeper":
            index = self.sweepers.index(process)  # type: ignore[arg-type]
            self.sweepers[index] = SweeperProcess(self, process.name, self._skew())

    def others_act(self, seconds: float) -> None:
        """Time passes inside of an action: whoever is not in one goes on."""
        self.now += seconds * self.rng.random()
        if self._depth < MOST_NESTED:
            self._depth += 1
            for _ in range(self.rng.randint(1, 5)):
                self._act()
            self._depth -= 1

    def _choices(self) -> list[tuple[Process, str, Callable[[], None]]]:
        self._be_born()
        found = []
        for process in (self.client, *self.sweepers, *self.workers):
            if process.alive and self.now >= process.paused_until:
                found += [(process, thread, act) for thread, act in process.actions()]
        for worker_ in self.workers:  # an engine goes on while its worker is paused
            if worker_.alive:
                found += [(worker_, thread, act) for thread, act in worker_.engine_actions()]
        return [each for each in found if each[1] not in each[0].busy]

    def _be_born(self) -> None:
        self.workers = [worker_ for worker_ in self.workers if worker_.alive]
        due = [at for at in self._births if at <= self.now]
        self._births = [at for at in self._births if at > self.now]
        for _ in due:
            self._born += 1
            self.workers.append(WorkerProcess(self, f"w{self._born}", self._skew()))

    def _act(self) -> None:
        choices = self._choices()
        if not choices or self.chance(0.05):
            self.now += self.rng.random() * 1.5
            return
        self._do(*self.rng.choice(choices))

    def _do(self, process: Process, thread: str, action: Callable[[], None]) -> None:
        process.busy.add(thread)
        self._acting.append(thread)
        try:
            action()
        except Killed:
            self._kill(process)
        finally:
            process.busy.discard(thread)
            self._acting.pop()
        if isinstance(process, WorkerProcess) and process.alive:
            process.check()
        self.now += self.rng.random() * 0.01

    # -- after the faults

    def _come_to_rest(self) -> None:
        self.messages.down = False
        self._database_down_until = 0.0
        for _ in range(MOST_ROUNDS):
            if self._at_rest():
                return
            for process, thread, action in self._choices():
                if process.alive:
                    self._do(process, thread, action)
            self.now += 0.1
        waiting = {job_id: row["state"] for job_id, row in self.rows.items()}
        raise AssertionError(f"{self.now - EPOCH:.1f} s, and no rest: {waiting}")

    def _at_rest(self) -> bool:
        return (
            len(self.client.ids) == len(self._specs)
            and all(row["state"] in TERMINAL for row in self.rows.values())
            and not self.messages.waiting
            and not self.messages.unacknowledged
            and bool(self.workers)
            and all(worker_.at_rest() for worker_ in self.workers)
            and not any(worker_.engine_actions() for worker_ in self.workers)
        )


def entry_id(entry: Any) -> str:
    held: Held | None = getattr(entry, "held", None)
    return held.id if held is not None else getattr(entry, "job_id", "")


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """The clocks of jobs/ and worker/ are the world's, and the schema is what it should be."""

    class Clock:
        monotonic = staticmethod(lambda: world.now - EPOCH)
        time = staticmethod(lambda: world.now)
        time_ns = staticmethod(lambda: int(world.now * 1e9))

    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("jobs.", "worker.")) and getattr(module, "time", None) is time
    ]
    patches = [patch.object(module, "time", Clock) for module in modules]
    with (
        patch.object(store, "need_schema", lambda _: None),
        patch.object(runway, "CHUNK_ROWS", 4),
    ):
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()


def run_seed(seed: int) -> None:
    """One run; a failure names the seed."""
    global _connection
    try:
        World(seed).run()
    except BaseException as error:
        _connection = None  # whatever it was left in
        error.add_note(f"seed {seed}: run_seed({seed}) in tests/simulation/service.py repeats it")
        raise


def main(arguments: list[str]) -> None:
    """`python -m tests.simulation.service FIRST NUM`: prints what was run; fails at a fault."""
    say_nothing()
    first, num = map(int, arguments)
    began = time.monotonic()
    for seed in range(first, first + num):
        run_seed(seed)
    print(  # noqa: T201
        f"{num} seeds from {first} on, {time.monotonic() - began:.0f} s: every promise kept"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
