"""A worker's lease on real databases: what keeps it, and what it brings back."""

import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from jobs import claims, store, sweep
from jobs.claims import Held
from jobs.database import Database
from jobs.lifecycle import JobState
from jobs.records import NewJob, WorkerInfo
from jobs.tenants import DEFAULT_TENANT
from worker.attempt import Holding
from worker.lease import LeaseKeeper

TIMEOUT_S = 30.0
LEASE_S = 0.3
WORKER = "w1"
INFO = WorkerInfo(
    id=WORKER, hostname="here", pid=7, model="tiny", max_num_seqs=8, kv_tokens=4096,
    max_model_len=512,
)  # fmt: skip


class Engine:
    """In the middle of one step."""

    pid, num_restarts, num_steps, failing = 7, 0, 7, False


class Dispatcher:
    """Holds what the test says, and keeps the answers to its beats."""

    engine_busy = True

    def __init__(self) -> None:
        self.held: list[Held] = []
        self.answers: list[set[Held]] = []
        self.stands = True

    def lease_stands(self, stands: bool) -> None:
        self.stands = stands

    def holding(self) -> Holding:
        return Holding(held=list(self.held), checkpoints={})

    def stats(self) -> dict[str, int | float]:
        return {}

    def beaten(self, holding: Holding, lost: Collection[Held], stored: Collection[Held]) -> None:
        if holding.held:
            self.answers.append(set(lost))


class NoHints:
    def wait(self, timeout_s: float) -> list[str]:
        time.sleep(0.01)
        return []


class Bench:
    """A keeper whose lease is shorter than the step its engine is in."""

    def __init__(self, url: str, lease_s: float = LEASE_S) -> None:
        self.database = Database(url)
        self.dispatcher = Dispatcher()
        self.stalled = False
        fakes: dict[str, Any] = {
            "dispatcher": self.dispatcher, "engine": Engine(), "cancelled": NoHints(),
        }  # fmt: skip
        self.keeper = LeaseKeeper(
            self.database,
            info=INFO,
            beat_s=lease_s / 6,
            lease_s=lease_s,
            stalled=lambda: self.stalled,
            **fakes,
        )

    def hold(self) -> Held:
        """A job that the worker runs."""
        new_job = NewJob(url="/v1/completions", model="tiny", body={"prompt": "x"})
        with self.database.begin() as connection:
            now = self.database.clock(connection)
            store.submit(connection, [new_job], tenant=DEFAULT_TENANT, now=now)
            [job] = claims.claim(connection, [new_job.id], worker_id=WORKER, now=now)
        return Held(job.id, job.fence)

    def lease_until(self) -> float:
        with self.database.read() as connection:
            [row] = store.live_workers(connection, now=0.0)
        return row.lease_until

    def state(self, job_id: str) -> tuple[JobState, int]:
        with self.database.read() as connection:
            record = store.get(connection, job_id, tenant=DEFAULT_TENANT)
        assert record is not None
        return record.state, record.attempt

    def sweep(self) -> None:
        with self.database.begin() as connection:
            sweep.reap(connection, self.database.clock(connection))

    def wait_for(self, condition) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def bench(database_url) -> Iterator[Bench]:
    bench = Bench(database_url)
    yield bench
    bench.keeper.stop()
    bench.database.dispose()


def test_a_worker_beats_through_a_step_that_is_longer_than_its_lease(bench):
    bench.keeper.start(lambda: None)
    first = bench.lease_until()
    bench.wait_for(lambda: bench.lease_until() > first + 3 * LEASE_S)


def test_an_interpreter_with_no_time_for_anybody_costs_no_lease(database_url):
    """D03: prompts are tokenized and templates rendered in this process, too."""
    bench = Bench(database_url, lease_s=1.5)
    bench.keeper.start(lambda: None)
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        first = until = bench.lease_until()
        while until < first + 2:
            with bench.database.begin() as connection:
                now = bench.database.clock(connection)
                assert claims.lease_stands(connection, WORKER, now=now)
            until = bench.lease_until()
    finally:
        over.set()
        for thread in threads:
            thread.join()
        bench.keeper.stop()
        bench.database.dispose()


def test_an_engine_that_is_stuck_is_the_only_reason_not_to_beat(bench):
    bench.stalled = True
    bench.keeper.start(lambda: None)
    held = bench.hold()
    bench.dispatcher.held = [held]

    def taken() -> bool:
        bench.sweep()
        return bench.state(held.id) == (JobState.QUEUED, 1)

    bench.wait_for(taken)
    assert bench.dispatcher.answers == []
    bench.stalled = False
    bench.wait_for(lambda: bench.dispatcher.answers)
    assert bench.dispatcher.answers[0] == {held}


def test_the_door_is_shut_while_the_lease_has_lapsed_and_open_again_with_the_next_beat(bench):
    bench.keeper.start(lambda: None)
    bench.wait_for(lambda: bench.lease_until() > 0)
    assert bench.dispatcher.stands
    bench.stalled = True  # as a database that is away: no beat gets through
    bench.wait_for(lambda: not bench.dispatcher.stands)
    bench.stalled = False
    bench.wait_for(lambda: bench.dispatcher.stands)


def test_a_beat_that_comes_late_keeps_what_nobody_has_taken(bench, monkeypatch):
    """As on a machine without a processor to spare, where the sweeper is as late as the worker."""
    beating, go_on = threading.Event(), threading.Event()
    holding = bench.dispatcher.holding

    def held_up() -> Holding:
        beating.set()
        assert go_on.wait(TIMEOUT_S)
        return holding()

    bench.keeper.start(lambda: None)
    kept, taken = bench.hold(), bench.hold()
    bench.dispatcher.held = [kept, taken]
    monkeypatch.setattr(bench.dispatcher, "holding", held_up)
    assert beating.wait(TIMEOUT_S)
    time.sleep(2 * LEASE_S)
    with bench.database.begin() as connection:
        assert not claims.lease_stands(connection, WORKER, now=bench.database.clock(connection))
        store.cancel(
            connection, taken.id, tenant=DEFAULT_TENANT, now=bench.database.clock(connection)
        )
    go_on.set()
    bench.wait_for(lambda: {taken} in bench.dispatcher.answers)
    bench.sweep()
    assert bench.state(kept.id) == (JobState.RUNNING, 1)
