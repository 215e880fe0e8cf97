"""Each invariant of the checker sees its violation planted in a run that keeps all the others."""

import dataclasses

import pytest

from jobs.lifecycle import JobState
from tests.chaos.checker import (
    INVARIANTS,
    Evidence,
    Held,
    Recovery,
    Row,
    Tried,
    Write,
    check,
    stale_writes,
)
from tests.chaos.history import OK, UNKNOWN, Event, History

TEXTS = {"a-1": "one", "a-2": "two", "a-3": "three", "a-4": "four"}


def row(number: int, **values) -> Row:
    given = {
        "id": f"job_{number}", "custom_id": f"a-{number}", "state": "succeeded", "fence": 1,
        "attempt": 1, "max_attempts": 5, "crash_count": 0,
        "text": TEXTS[f"a-{number}"], "output_tokens": 3,
        "completion_tokens": 3, "wasted_tokens": 0, "error_code": None, "finished_at": 9.0,
        "tried": (Tried("lapsed", 1), Tried("succeeded", 2)),
    }  # fmt: skip
    return Row(**given | values)


def event(kind: str, at: float, *jobs: tuple[int, str], **values) -> Event:
    told = tuple((f"job_{number}", f"a-{number}", state) for number, state in jobs)
    given = {"client": 0, "kind": kind, "key": "a-1", "began": at, "ended": at + 0.1}
    return Event(**given | {"outcome": OK, "status": 200, "jobs": told} | values)


def good() -> Evidence:
    """Three jobs: one done, one lost its answer and was sent again, one cancelled; and a batch's
    row."""
    events = [
        event("submit", 1, (1, "queued")),
        event("submit", 1, key="a-2", outcome=UNKNOWN, status=None),
        event("submit", 2, (2, "queued"), key="a-2"),
        event("submit", 2, (3, "queued"), key="a-3"),
        event("look", 3, (1, "running"), key="job_1"),
        event("cancel", 4, (3, "cancelled"), key="job_3"),
        event("look", 10, (1, "succeeded"), key="job_1"),
    ]
    return Evidence(
        history=History(events, rows={"a-4"}),
        rows=[
            row(1),
            row(2, fence=3, attempt=2),
            row(3, state="cancelled", text=None, output_tokens=None, completion_tokens=0, tried=()),
            row(4),
        ],
        writes=[Write("job_1", 1, True), Write("job_2", 1, False), Write("job_2", 3, True)],
        texts=TEXTS,
        free_blocks=[(100, 100)],
        held=[Held("descriptors", 40, 41)],
        recoveries=[Recovery("kill", 3.0, 8.0)],
        webhooks={"batch_1": ["e1"], "batch_2": ["e2", "e2"]},
    )


def test_a_run_that_kept_every_promise_passes():
    assert check(good()) == []
    assert stale_writes(good()) == (1, 0)


def with_row(number: int, **values):
    def plant(evidence: Evidence) -> None:
        rows = list(evidence.rows)
        rows[number - 1] = dataclasses.replace(rows[number - 1], **values)
        evidence.rows = rows

    return plant


def with_event(*events: Event):
    def plant(evidence: Evidence) -> None:
        evidence.history.events += events

    return plant


def with_evidence(**values):
    def plant(evidence: Evidence) -> None:
        for name, value in values.items():
            setattr(evidence, name, value)

    return plant


def without_row(evidence: Evidence) -> None:
    evidence.rows = evidence.rows[1:]


def row_twice(evidence: Evidence) -> None:
    evidence.rows = [*evidence.rows, row(2, id="job_9", fence=3)]


QUEUED = {"state": "queued", "text": None, "completion_tokens": 0, "output_tokens": None}
FAILED = QUEUED | {"state": "failed", "error_code": "poisoned"}

PLANTED = [
    ("I1", with_row(2, **QUEUED)),
    ("I1", with_row(2, **FAILED)),
    ("I1", with_row(2, **QUEUED | {"state": "cancelled"})),
    ("I1", with_row(4, **QUEUED)),
    ("I4", with_row(4, custom_id="a-5")),
    ("I2", with_evidence(writes=[Write("job_1", 1, True), Write("job_1", 1, True)])),
    ("I2", with_evidence(writes=[Write("job_2", 1, True)])),
    ("I2", with_row(3, text="a late result")),
    ("I2", with_row(2, text=None)),
    ("I3", with_row(3, state="succeeded", text="three", output_tokens=3, completion_tokens=3)),
    ("I4", without_row),
    ("I4", row_twice),
    ("I4", with_event(event("submit", 5, (9, "queued")).__class__(
        client=0, kind="submit", key="a-2", began=5, ended=6, outcome=OK, status=202,
        jobs=(("job_9", "a-2", "queued"),),
    ))),
    ("I5", with_event(event("look", 11, (1, "running"), key="job_1"))),
    ("I6", with_event(event("look", 5, key="job_1", outcome="refused", status=404))),
    ("I6", with_event(event("cancel", 5, (1, "running"), key="job_1"))),
    ("I7", with_row(1, completion_tokens=6)),
    ("I7", with_row(3, completion_tokens=2)),
    ("I7", with_row(1, tried=(Tried("lapsed", 3), Tried(None, 0)))),
    ("I7", with_row(1, tried=(Tried("succeeded", 2),))),
    ("I7", with_row(1, tried=(Tried("succeeded", 3), Tried("succeeded", 0)))),
    ("I8", with_row(1, text="another")),
    ("I9", with_event(event("peek", 5, (1, "running"), key="job_1"))),
    ("I9", with_evidence(canaries_found=["a prompt stands in api.log"])),
    ("I10", with_evidence(free_blocks=[(97, 100)])),
    ("I10", with_evidence(held=[Held("descriptors", 40, 60)])),
    ("I11", with_evidence(recoveries=[Recovery("kill", 9.0, 8.0)])),
    ("I12", with_evidence(webhooks={"batch_1": ["e1"], "batch_2": []})),
    ("I12", with_evidence(webhooks={"batch_1": ["e1", "e4"]})),
]  # fmt: skip


@pytest.mark.parametrize(("invariant", "plant"), PLANTED, ids=[name for name, _ in PLANTED])
def test_a_planted_violation_is_seen(invariant, plant):
    evidence = good()
    plant(evidence)
    assert invariant in {violation.invariant for violation in check(evidence)}


def test_every_invariant_has_a_violation_planted():
    assert {name for name, _ in PLANTED} == set(INVARIANTS)


def test_a_failure_that_was_to_be_expected_is_none():
    evidence = good()
    with_row(2, **FAILED)(evidence)
    evidence.may_fail = {"a-2": "poisoned"}
    assert [v for v in check(evidence) if v.invariant == "I1"] == []
    evidence.may_fail = {"a-2": "max_attempts"}
    assert [v.invariant for v in check(evidence)] == ["I1"]


def test_a_job_whose_every_attempt_died_with_somebody_may_have_failed():
    evidence = good()
    spent = FAILED | {"error_code": "max_attempts", "attempt": 2, "max_attempts": 2}
    with_row(2, **spent, tried=(Tried("lapsed", 0), Tried("suspect", 0)))(evidence)
    assert [v for v in check(evidence) if v.invariant == "I1"] == []
    with_row(2, tried=(Tried("lapsed", 0), Tried("failed", 0)))(evidence)
    assert [v.invariant for v in check(evidence)] == ["I1"]


def test_states_are_those_of_the_lifecycle():
    assert {each.state for each in good().rows} <= set(JobState)
