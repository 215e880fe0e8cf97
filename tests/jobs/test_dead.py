"""Jobs that have failed: found by what they died of, and queued again by name."""

import pytest

from jobs import attempts, dead, store, sweep
from jobs.dead import Which
from jobs.finishing import JobResult
from jobs.lifecycle import ErrorCode, JobState, error_object
from jobs.tenants import DEFAULT_TENANT
from tests.jobs.conftest import MODEL, NOW, new_job
from tests.jobs.test_claims import beat, success


def fail(bench, *records, code=ErrorCode.NUMERICAL_ERROR):
    """Claimed and failed, a second apart."""
    bench.register()
    for record in records:
        [job] = bench.claim(record.id)
        bench.now += 1
        bench.finish(
            [
                JobResult(
                    id=job.id, fence=job.fence, state=JobState.FAILED, finish_reason="error",
                    error=error_object(code, f"{code} it was"), wasted_tokens=3,
                )
            ],
            now=bench.now,
        )  # fmt: skip
    return [record.id for record in records]


def listed(bench, **which):
    found = bench.call(dead.list_dead, Which(**which), limit=99)
    return [each.id for each in found]


def test_the_dead_are_listed_with_the_reason_the_last_first(bench):
    first, second = fail(bench, *bench.submit(new_job(custom_id="row"), new_job(max_attempts=2)))
    bench.submit(new_job())  # lives
    newest, oldest = bench.call(dead.list_dead, Which(), limit=99)
    assert (newest.id, oldest.id) == (second, first)
    assert (newest.error, newest.reason) == ("numerical_error", "numerical_error it was")
    assert (newest.attempt, newest.max_attempts, newest.failed_at) == (1, 2, NOW + 2)
    assert (oldest.custom_id, oldest.tenant, oldest.model) == ("row", DEFAULT_TENANT, MODEL)
    assert [each.id for each in bench.call(dead.list_dead, Which(), limit=1)] == [second]


def test_they_are_found_by_model_tenant_error_and_time(bench):
    [one] = fail(bench, *bench.submit(new_job()))
    [theirs] = fail(bench, *bench.submit(new_job(), tenant="acme"), code=ErrorCode.POISONED)
    [other] = fail(bench, *bench.submit(new_job(model="other")), code=ErrorCode.POISONED)
    assert listed(bench) == [other, theirs, one]
    assert listed(bench, error="poisoned") == [other, theirs]
    assert listed(bench, error="%") == listed(bench, error="oisoned") == []
    assert listed(bench, tenant="acme") == [theirs]
    assert listed(bench, model="other", error="poisoned") == [other]
    assert listed(bench, since=NOW + 2) == [other, theirs]
    assert listed(bench, until=NOW + 1.5) == [one]


def test_one_queued_again_has_all_its_attempts_and_a_higher_fence(bench):
    [job_id] = fail(bench, *bench.submit(new_job(max_attempts=1, deadline_s=5)))
    before = bench.call(store.get, job_id, tenant=DEFAULT_TENANT)
    bench.now += 60
    assert bench.call(dead.requeue, [job_id], now=bench.now) == {job_id: None}
    record = bench.get(job_id)
    assert (record.state, record.attempt, record.crash_count) == (JobState.QUEUED, 0, 0)
    assert (record.error, record.finished_at, record.finish_reason) == (None, None, None)
    assert record.fence == before.fence + 1
    assert record.deadline_at is None  # else it would expire at once
    assert record.wasted_tokens == 3  # they were made, and remain so
    assert bench.call(sweep.publishable, MODEL, limit=9, now=bench.now) == [job_id]
    bench.register()
    [again] = bench.claim(job_id)
    assert (again.attempt, again.checkpoint) == (1, None)
    bench.finish([success(again, completion_tokens=2)], now=bench.now)
    assert [each.outcome for each in bench.call(attempts.of_job, job_id, tenant="default")] == [
        "failed", "succeeded",
    ]  # fmt: skip
    assert bench.call(attempts.totals)["wasted_tokens", ""] == 3


def test_who_held_it_before_is_still_refused(bench):
    [record] = bench.submit(new_job(max_attempts=1))
    bench.register()
    [job] = bench.claim(record.id)
    bench.now += 31
    bench.call(sweep.reap, bench.now)
    bench.call(dead.requeue, [record.id], now=bench.now)
    assert bench.finish([success(job)], now=bench.now) == set()
    assert beat(bench, [job]) == {record.id}
    assert bench.get(record.id).state == JobState.QUEUED


def test_what_has_not_failed_is_refused_by_name(bench):
    living, cancelled, batched = bench.submit(new_job(), new_job(), new_job(batch_id="batch_1"))
    bench.call(store.cancel, cancelled.id, tenant=DEFAULT_TENANT, now=NOW)
    fail(bench, batched)
    [dead_id] = fail(bench, *bench.submit(new_job()))
    ids = [living.id, "job_none", cancelled.id, dead_id, batched.id, dead_id]
    answers = bench.call(dead.requeue, ids, now=bench.now)
    assert answers == {
        dead_id: None,
        living.id: "it has not failed: it is queued",
        "job_none": "there is no such job",
        cancelled.id: "it has not failed: it is cancelled",
        batched.id: "it is a row of batch_1, which has counted it",
    }
    assert bench.get(cancelled.id).state == JobState.CANCELLED


def test_all_of_a_kind_are_queued_again_in_rounds(bench, monkeypatch):
    monkeypatch.setattr(dead, "ROUND", 2)
    ids = fail(bench, *bench.submit(*(new_job() for _ in range(3))))
    others = fail(bench, *bench.submit(new_job()), code=ErrorCode.POISONED)
    which = Which(error="numerical_error")
    done = [bench.call(dead.requeue_all, which, now=bench.now) for _ in range(3)]
    assert [sorted(each) for each in done] == [sorted(ids[:2]), ids[2:], []]
    assert listed(bench) == others


@pytest.mark.parametrize("num", [0, 1])
def test_nothing_named_is_nothing_done(bench, num):
    fail(bench, *bench.submit(*(new_job() for _ in range(num))))
    assert bench.call(dead.requeue, [], now=bench.now) == {}
    assert len(listed(bench)) == num
