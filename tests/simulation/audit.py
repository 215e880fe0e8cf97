"""What must hold of the rows after every commit, whoever committed and whatever failed before.

Works on snapshots of the jobs table: the one before the commit, the one after, and who acted.
"""

from dataclasses import dataclass
from typing import Any

from jobs.attempts import Outcome
from jobs.claims import Held
from jobs.lifecycle import NEXT, TERMINAL, JobState
from jobs.rows import decode
from tests.simulation.fake_engine import POISON, text
from tests.simulation.processes import LEASE_S, MAX_CRASHES, WorkerProcess
from worker.ledger import Finish, HandBack

# what may still be learnt of a job that has ended
_LATER = frozenset({"wasted_tokens", "first_token_at", "prompt_tokens", "max_tokens"})
_REACHABLE = {
    old: {old} | NEXT[old] | (frozenset(JobState) if NEXT[old] else frozenset()) for old in JobState
}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spec:
    """What a client asks for."""

    key: str
    prompt: int
    n: int
    max_tokens: int
    max_attempts: int
    priority: int
    deadline_s: float | None
    tries_failures: bool  # again, those of the engine's numbers

    @property
    def poison(self) -> bool:
        return self.prompt >= POISON


def check_rows(world: Any, process: Any, before: dict[str, Row], after: dict[str, Row]) -> None:
    for job_id, row in after.items():
        old = before.get(job_id)
        if old == row:
            continue
        _check_row(world, row)
        if old is not None:
            _check_change(old, row)
            _check_actor(world, process, old, row)
    assert before.keys() <= after.keys(), "a row is gone"
    for job_id in world.accepted:
        assert job_id in after, f"{job_id} was accepted and is not there"


def _check_row(world: Any, row: Row) -> None:
    spec: Spec = world.spec_of(row)
    assert row["attempt"] <= row["max_attempts"], f"{row['id']} was tried too often"
    assert row["crash_count"] <= MAX_CRASHES, f"{row['id']} killed too many engines"
    state = JobState(row["state"])
    if state is JobState.SUCCEEDED:
        choices = decode(row["output"])["choices"]
        assert [choice["text"] for choice in choices] == [
            text(spec.prompt, i, spec.max_tokens) for i in range(spec.n)
        ], f"{row['id']} has another text than an undisturbed run"
        assert row["completion_tokens"] == spec.n * spec.max_tokens, f"{row['id']} miscounted"
        assert row["error"] is None
    elif state in TERMINAL:
        assert row["output"] is None, f"{row['id']} has an output and is {state}"
        assert row["completion_tokens"] == 0
    if row["checkpoint"] is not None and state in TERMINAL:
        raise AssertionError(f"{row['id']} has ended and keeps a checkpoint")


def _check_change(old: Row, row: Row) -> None:
    before, state = JobState(old["state"]), JobState(row["state"])
    if before in TERMINAL:
        changed = {name for name in row if row[name] != old[name]}
        assert changed <= _LATER, f"{row['id']} changed after its end: {changed}"
    assert state in _REACHABLE[before]
    assert row["fence"] >= old["fence"], f"{row['id']}: its fence went back"
    if state is JobState.RUNNING and row["worker_id"] != old["worker_id"]:
        assert row["fence"] > old["fence"], f"{row['id']} changed hands under one fence"


def _check_actor(world: Any, process: Any, old: Row, row: Row) -> None:
    """Who took a running job away, ended it or wrote its checkpoint had the right to."""
    if old["state"] != JobState.RUNNING:
        return
    if process.kind == "sweeper" and row["state"] != JobState.RUNNING:
        silent_s = world.now - world.beaten_at.get(old["worker_id"], float("-inf"))
        assert silent_s >= LEASE_S - 1e-6, (
            f"{row['id']} was taken from {old['worker_id']} {silent_s:.2f} s after its last beat"
        )
    if not isinstance(process, WorkerProcess) or row["state"] == JobState.CANCELLED:
        return
    if row["checkpoint"] != old["checkpoint"] or row["state"] != JobState.RUNNING:
        assert old["worker_id"] == process.name, (
            f"{process.name} wrote to {row['id']}, which is {old['worker_id']}'s"
        )
    if row["state"] in TERMINAL:
        ends = {e.held for e in process.window if isinstance(e, Finish | HandBack)}
        assert Held(row["id"], old["fence"]) in ends, (
            f"{process.name} ended {row['id']} under a fence it does not hold"
        )


def check_record(world: Any) -> None:
    """When all has come to rest: every claim is closed, once, as its job says; counts agree."""
    records = world.attempts()
    for job_id, row in world.rows.items():
        mine = [each for each in records if each["job_id"] == job_id]
        assert all(each["outcome"] for each in mine), f"{job_id} has an attempt that never ended"
        if row["state"] == JobState.SUCCEEDED:
            assert [each["outcome"] for each in mine].count("succeeded") == 1
            kept = sum(each["kept_tokens"] for each in mine)
            assert kept == row["completion_tokens"], f"{job_id} kept {kept} tokens"
        counted = sum(each["outcome"] != "handed_back" for each in mine)
        if row["state"] in (JobState.SUCCEEDED, JobState.FAILED):
            assert counted == row["attempt"], f"{job_id}: {row['attempt']} attempts, {mine}"
    totals = world.totals()
    assert sum(totals.get(("attempts", outcome), 0) for outcome in Outcome) == len(records)
    wasted = sum(row["wasted_tokens"] for row in world.rows.values())
    assert totals.get(("wasted_tokens", ""), 0) == wasted


def check_rest(world: Any) -> None:
    """When all has come to rest: every job has its end, and every token is counted once."""
    check_record(world)
    for row in world.rows.values():
        spec: Spec = world.spec_of(row)
        job_id, code = row["id"], (decode(row["error"]) or {}).get("code")
        if row["state"] == JobState.FAILED:
            if spec.poison:
                assert code in ("poisoned", "max_attempts", "numerical_error")
            elif code == "numerical_error":
                assert world.num_failures
                spent = row["attempt"] == row["max_attempts"]
                assert spent or not spec.tries_failures, f"{job_id} was not tried again"
            elif code == "poisoned":
                assert world.num_engine_kills, f"{job_id} fell with its neighbours"
            else:
                assert code == "max_attempts", row["error"]
        else:
            assert not spec.poison or row["state"] != JobState.SUCCEEDED
        counted = row["completion_tokens"] + row["wasted_tokens"]
        made = world.num_generated.get(job_id, 0)
        assert counted <= made, f"{job_id}: {counted} tokens counted, {made} made"
        if job_id not in world.unaccountable:
            assert counted == made, f"{job_id}: {counted} tokens counted, {made} made"
    assert not world.messages.unacknowledged, "a message is never acknowledged"
    for worker in world.workers:
        # one that got stuck with what is nobody's any more shows when the next job comes
        assert worker.engine.stuck or not worker.engine.requests, "the engine works for nobody"
        assert not worker.book.attempts, "a worker holds a job that has ended"
