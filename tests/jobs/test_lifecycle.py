"""The store against a naive model of a job's life, over random histories; and the table itself."""

import functools
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import migrations
from jobs import claims, store, sweep
from jobs.claims import Held, UnknownWorker
from jobs.database import Database
from jobs.finishing import JobResult
from jobs.lifecycle import NEXT, TERMINAL, ErrorCode, JobState, error_object
from jobs.retries import Backoff
from jobs.rows import given
from jobs.tenants import DEFAULT_TENANT
from tests.conftest import REPOSITORY
from tests.jobs.conftest import MODEL, NOW, Bench, new_job

LEASE_S, MAX_CRASHES = 30.0, 2
WORKERS = st.sampled_from(["w1", "w2"])


def test_the_page_of_http_tells_of_every_code_once():
    page = (REPOSITORY / "docs" / "http.md").read_text()
    table = page.partition("### Why a job did not succeed\n")[2]
    told = [
        code
        for cell in re.findall(r"^\| (`.*?) \|", table, re.M)
        for code in re.findall(r"`(\w+)`", cell)
    ]
    assert sorted(told) == sorted(ErrorCode)
    clients = [code for code in told if error_object(code, "")["type"] == "invalid_request_error"]
    assert clients == told[:3]


def test_terminal_states_are_the_four_endings():
    assert {
        JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED,
    } == TERMINAL  # fmt: skip
    assert set(NEXT) == set(JobState)


@pytest.mark.parametrize(("code", "kind"), [
    (ErrorCode.EXCEEDS_CAPACITY, "invalid_request_error"),
    (ErrorCode.POISONED, "server_error"),
])  # fmt: skip
def test_an_error_object_has_openais_four_keys(code, kind):
    assert error_object(code, "why", param="max_tokens") == {
        "message": "why", "type": kind, "param": "max_tokens", "code": str(code),
    }  # fmt: skip


@functools.cache
def migrated() -> bytes:
    """A migrated SQLite database, to start each history from."""
    with tempfile.TemporaryDirectory() as folder:
        migrations.upgrade(f"sqlite:///{folder}/jobs.db")
        return Path(folder, "jobs.db").read_bytes()


@dataclass
class NaiveJob:
    """What a reader of design.md would keep on paper."""

    max_attempts: int
    deadline_at: float | None
    state: JobState = JobState.QUEUED
    fence: int = 0
    attempt: int = 0
    crashes: int = 0
    owner: str | None = None
    output: str | None = None
    checkpoint: list[list[int]] | None = None
    wasted: int = 0
    history: list[JobState] = field(default_factory=lambda: [JobState.QUEUED])

    def go(self, state: JobState) -> None:
        self.state = state
        self.history.append(state)
        if state != JobState.RUNNING:
            self.owner = None
        if state in TERMINAL:  # nobody goes on from it
            self.wasted += sum(map(len, self.checkpoint or []))
            self.checkpoint = None


class Histories(RuleBasedStateMachine):
    """Clients, two workers and a sweeper act in any order, with fences fresh and stale."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        file = Path(self.folder.name) / "jobs.db"
        file.write_bytes(migrated())
        self.bench = Bench(Database(f"sqlite:///{file}"), NOW)
        self.jobs: dict[str, NaiveJob] = {}
        self.leases: dict[str, float] = {}
        self.claims: list[tuple[str, int, str]] = []  # id, fence, worker: every claim ever made

    def teardown(self) -> None:
        self.bench.database.dispose()
        self.folder.cleanup()

    def some_jobs(self, numbers: Iterable[int]) -> list[str]:
        ids = list(self.jobs)[-3:]
        return [ids[number % len(ids)] for number in numbers] if ids else []

    def zombies(self) -> list[tuple[str, int, str]]:
        """Claims of jobs that someone else is running by now."""
        return [
            (job_id, fence, worker)
            for job_id, fence, worker in self.claims
            if self.jobs[job_id].state == JobState.RUNNING and self.jobs[job_id].fence != fence
        ]

    def some_claims(self, numbers: list[int]) -> list[tuple[str, int, str]]:
        """Mostly the latest ones, which may still hold."""
        if not self.claims:
            return []
        return list(dict.fromkeys(self.claims[-1 - n % len(self.claims)] for n in numbers))

    def holds(self, job_id: str, fence: int) -> bool:
        job = self.jobs[job_id]
        return job.state == JobState.RUNNING and job.fence == fence

    # few jobs that live, so that actions meet on one
    @precondition(lambda self: sum(job.state not in TERMINAL for job in self.jobs.values()) < 3)
    @rule(attempts=st.integers(1, 3), deadline_s=st.sampled_from([None, None, 20.0]))
    def submit(self, attempts, deadline_s):
        (record,) = self.bench.submit(new_job(max_attempts=attempts, deadline_s=deadline_s))
        self.jobs[record.id] = NaiveJob(attempts, record.deadline_at)

    @rule(seconds=st.sampled_from([1.0, 20.0, 31.0]))
    def wait(self, seconds):
        self.bench.now += seconds

    @rule(worker=WORKERS)
    def register(self, worker):
        self.bench.register(worker, lease_s=LEASE_S)
        self.leases[worker] = self.bench.now + LEASE_S

    @rule(worker=WORKERS, numbers=st.sets(st.integers(0, 2), min_size=2))
    def claim(self, worker, numbers):
        ids = self.some_jobs(numbers)
        got = {job.id: job for job in self.bench.claim(*ids, worker_id=worker)}
        for job_id in dict.fromkeys(ids):  # in order: ids are random, a replay has others
            job = self.jobs[job_id]
            late = job.deadline_at is not None and job.deadline_at <= self.bench.now
            assert (job_id in got) == (job.state == JobState.QUEUED and not late)
            if job_id in got:
                job.go(JobState.RUNNING)
                job.fence, job.attempt, job.owner = job.fence + 1, job.attempt + 1, worker
                assert (got[job_id].fence, got[job_id].attempt) == (job.fence, job.attempt)
                assert got[job_id].checkpoint == job.checkpoint
                self.claims.append((job_id, job.fence, worker))

    @rule(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=3), good=st.booleans())
    def finish(self, numbers, good):
        self.finish_claims(self.some_claims(numbers), good)

    @precondition(lambda self: self.zombies())
    @rule(good=st.booleans())
    def finish_late(self, good):
        self.finish_claims(self.zombies(), good)

    def finish_claims(self, picked, good):
        results = [
            JobResult(
                id=job_id,
                fence=fence,
                state=JobState.SUCCEEDED if good else JobState.FAILED,
                output={"by": f"{worker} {fence}"} if good else None,
                error=None if good else error_object(ErrorCode.ENGINE_ERROR, "broke"),
                wasted_tokens=0 if good else 10,
            )
            for job_id, fence, worker in picked
        ]
        for result, (_, fence, worker) in zip(results, picked, strict=True):
            accepted = self.bench.finish([result], now=self.bench.now)
            assert (result.id in accepted) == self.holds(result.id, fence)
            if accepted:
                job = self.jobs[result.id]
                job.checkpoint = None  # its tokens are in the result, or in its waste
                job.wasted += result.wasted_tokens
                job.go(result.state)
                job.output = f"{worker} {fence}" if good else None

    @rule(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=3), crashed=st.booleans())
    def hand_back(self, numbers, crashed):
        for job_id, fence, _ in self.some_claims(numbers):
            released = self.bench.call(
                claims.release, [Held(job_id, fence)], now=self.bench.now, crashed=crashed,
                max_crashes=MAX_CRASHES, backoff=Backoff(base_s=0),
            )  # fmt: skip
            assert (Held(job_id, fence) in released) == self.holds(job_id, fence)
            if released:
                job = self.jobs[job_id]
                job.fence += 1
                job.crashes += crashed
                job.attempt -= not crashed
                over = job.crashes >= MAX_CRASHES or job.attempt >= job.max_attempts
                job.go(JobState.FAILED if crashed and over else JobState.QUEUED)
                assert released[Held(job_id, fence)] == job.state

    @rule(worker=WORKERS, tokens=st.integers(1, 3))
    def beat(self, worker, tokens):
        mine = {(job_id, fence) for job_id, fence, owner in self.claims if owner == worker}
        newest = {job_id: max(f for j, f in mine if j == job_id) for job_id, _ in sorted(mine)}
        held = [Held(job_id, fence) for job_id, fence in newest.items()]
        checkpoints = {each: [list(range(tokens))] for each in held}

        def beat():
            return self.bench.call(
                claims.beat, worker, now=self.bench.now, lease_s=LEASE_S, stats={}, held=held,
                checkpoints=checkpoints,
            )  # fmt: skip

        if worker not in self.leases:
            with pytest.raises(UnknownWorker):
                beat()
            return
        lost = beat().lost
        self.leases[worker] = self.bench.now + LEASE_S
        for job_id, fence in newest.items():
            each = Held(job_id, fence)
            assert (each in lost) == (not self.holds(job_id, fence))
            if each not in lost:
                self.jobs[job_id].checkpoint = checkpoints[each]

    @rule(number=st.integers(0, 2))
    def cancel(self, number):
        for job_id in self.some_jobs([number]):
            job = self.jobs[job_id]
            record = self.bench.call(
                store.cancel, job_id, tenant=DEFAULT_TENANT, now=self.bench.now
            )
            if job.state not in TERMINAL:
                job.fence += 1
                job.go(JobState.CANCELLED)
            assert record.state == job.state

    @rule(turn=st.sampled_from(["reap", "expire", "publish"]))
    def sweep(self, turn):
        getattr(self, turn)()

    def reap(self):
        reaped = {each.id: each.state for each in self.bench.call(sweep.reap, self.bench.now)}
        for job_id, job in self.jobs.items():
            silent = self.leases.get(job.owner, 0.0) <= self.bench.now
            assert (job_id in reaped) == (job.state == JobState.RUNNING and silent)
            if job_id in reaped:
                job.fence += 1
                spent = job.attempt >= job.max_attempts
                job.go(JobState.FAILED if spent else JobState.QUEUED)
                assert reaped[job_id] == job.state

    def expire(self):
        expired = self.bench.call(sweep.expire, self.bench.now)
        for job_id, job in self.jobs.items():
            late = job.deadline_at is not None and job.deadline_at <= self.bench.now
            assert (job_id in expired) == (job.state == JobState.QUEUED and late)
            if job_id in expired:
                job.fence += 1
                job.go(JobState.EXPIRED)

    def publish(self):
        ids = self.bench.call(sweep.publishable, MODEL, limit=2, now=self.bench.now)
        assert len(ids) <= 2
        assert all(self.jobs[job_id].state == JobState.QUEUED for job_id in ids)

    @invariant()
    def rows_tell_what_happened(self):
        for job_id, job in self.jobs.items():
            row = self.bench.get(job_id)
            assert (row.state, row.fence, row.attempt, row.crash_count) == (
                job.state, job.fence, job.attempt, job.crashes,
            )  # fmt: skip
            assert row.wasted_tokens == job.wasted
            assert row.output == (None if job.output is None else {"by": job.output})
            assert (row.finished_at is not None) == (job.state in TERMINAL)
            assert (row.error is not None) == (job.state in (JobState.FAILED, JobState.EXPIRED))
            for old, new in zip(job.history, job.history[1:], strict=False):
                assert new in NEXT[old]


Histories.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestHistories = Histories.TestCase


def test_given_rows_arrive_in_order_with_their_types(bench):
    from sqlalchemy import select

    rows = [("a", 1, 0.5), ("ü\x01'", 2**62, None), (None, None, 1790000000.123456)]
    with bench.database.read() as connection:
        table = given(connection, {"text": str, "number": int, "real": float}, rows)
        query = select(table["text"], table["number"], table["real"])
        assert [tuple(row) for row in connection.execute(query, table.parameters)] == rows
        empty = given(connection, {"text": str}, [])
        assert connection.execute(select(empty["text"]), empty.parameters).all() == []
