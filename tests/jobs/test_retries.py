"""What fails and may be tried again waits in SQL; what may not has failed, and says why."""

import itertools

import pytest
from sqlalchemy import select, update

from jobs import attempts, claims, sweep
from jobs.claims import ClaimedJob
from jobs.lifecycle import RETRYABLE, ErrorCode, JobState
from jobs.models import jobs
from jobs.records import JobError
from jobs.retries import Backoff
from jobs.tenants import DEFAULT_TENANT
from tests.jobs.conftest import MODEL, NOW, held, new_job
from tests.jobs.test_claims import release


def fail(bench, *failed, backoff=None, code=ErrorCode.RESOURCE_EXHAUSTED):
    return bench.call(
        claims.release, [held(job) for job in failed], now=bench.now, crashed=False, max_crashes=3,
        checkpoints={held(job): [[1, 2]] for job in failed},
        failures=dict.fromkeys(map(held, failed), code), backoff=backoff or Backoff(),
    )  # fmt: skip


def publishable(bench):
    return bench.call(sweep.publishable, MODEL, limit=99, now=bench.now)


@pytest.fixture
def claimed(bench) -> ClaimedJob:
    [record] = bench.submit(new_job(retry_on=["resource_exhausted"]))
    bench.register()
    assert publishable(bench) == [record.id]
    return bench.claim(record.id)[0]


def test_a_failed_job_waits_and_then_goes_on_from_its_tokens(bench, claimed):
    assert list(fail(bench, claimed).values()) == [JobState.QUEUED]
    record = bench.get(claimed.id)
    assert (record.state, record.attempt, record.error) == (JobState.QUEUED, 1, None)
    assert record.not_before is not None
    assert NOW + 0.5 <= record.not_before <= NOW + 1
    bench.now = record.not_before - 0.001
    assert publishable(bench) == []
    assert bench.claim(claimed.id) == []  # as by a second message of the attempt before
    bench.now = record.not_before
    assert publishable(bench) == [claimed.id]
    [again] = bench.claim(claimed.id)
    assert (again.attempt, again.fence, again.checkpoint) == (2, 3, [[1, 2]])
    assert bench.get(claimed.id).not_before is None
    first, _ = bench.call(attempts.of_job, claimed.id, tenant=DEFAULT_TENANT)
    assert (first.outcome, first.error_code, first.kept_tokens) == (
        "failed", "resource_exhausted", 2,
    )  # fmt: skip


def test_each_failure_waits_four_times_as_long_up_to_the_bound(bench, claimed):
    waits = []
    for attempt in range(1, 6):
        with bench.database.begin() as connection:
            connection.execute(update(jobs).values(attempt=attempt))
        fail(bench, claimed, backoff=Backoff(base_s=2.0, most_s=50.0))
        not_before = bench.get(claimed.id).not_before
        waits.append(not_before - bench.now)
        bench.now = not_before
        [claimed] = bench.claim(claimed.id)
    for wait, longest in zip(waits, (2, 8, 32, 50, 50), strict=True):
        assert longest / 2 <= wait <= longest + 1e-6, waits


def test_no_wait_is_no_wait(bench, claimed):
    fail(bench, claimed, backoff=Backoff(base_s=0.0))
    assert bench.get(claimed.id).not_before == bench.now
    assert publishable(bench) == [claimed.id]


def test_jobs_that_failed_together_do_not_return_together(bench):
    records = bench.submit(*(new_job() for _ in range(100)))
    bench.register()
    failed = bench.claim(*(record.id for record in records))
    fail(bench, *failed)
    with bench.database.read() as connection:
        due = sorted(connection.scalars(select(jobs.c.not_before)))
    assert len(set(due)) > 90
    assert due[-1] - due[0] > 0.4
    assert max(b - a for a, b in itertools.pairwise(due)) < 0.1


def test_a_crash_waits_as_well_and_a_lapse_does_not(bench):
    [record] = bench.submit(new_job())
    bench.register()
    release(bench, *bench.claim(record.id), crashed=True)
    not_before = bench.get(record.id).not_before
    assert NOW + 0.5 <= not_before <= NOW + 1
    bench.now = not_before
    bench.claim(record.id)
    bench.now += 31
    bench.call(sweep.reap, bench.now)
    assert bench.get(record.id).not_before is None
    assert publishable(bench) == [record.id]


@pytest.mark.parametrize("code", [ErrorCode.ENGINE_CRASH, ErrorCode.WORKER_LOST])
def test_what_its_policy_does_not_name_is_not_tried_again(bench, code):
    others = [each for each in RETRYABLE if each != code]
    [record] = bench.submit(new_job(retry_on=others))
    bench.register()
    [job] = bench.claim(record.id)
    if code == ErrorCode.ENGINE_CRASH:
        assert release(bench, job, crashed=True) == {record.id: JobState.FAILED}
    else:
        bench.now += 31
        assert [each.state for each in bench.call(sweep.reap, bench.now)] == [JobState.FAILED]
    ended = bench.get(record.id)
    assert ended.error["code"] == code
    assert ended.not_before is None


def test_many_that_wait_keep_nobody_from_the_runway(bench):
    """And none of them is in a worker's memory: they are rows, and nothing else."""
    waiting = bench.submit(*(new_job(priority=5) for _ in range(200)))
    with bench.database.begin() as connection:
        connection.execute(update(jobs).values(not_before=NOW + 3600))
    [due] = bench.submit(new_job())
    assert publishable(bench) == [due.id]
    bench.now += 3600
    assert len(bench.call(sweep.publishable, MODEL, limit=500, now=bench.now)) == len(waiting)


def test_a_policy_is_checked_and_kept_in_one_order():
    for bad in (["colour"], ["invalid_request"], ["x" * 10_000]):
        with pytest.raises(JobError) as refused:
            new_job(retry_on=bad)
        assert (refused.value.param, len(str(refused.value)) < 300) == ("retry_on", True)
    record = new_job(retry_on=["engine_error", "engine_crash", "engine_error"]).accepted("t", NOW)
    assert record.retry_on == ("engine_crash", "engine_error")
    assert new_job(retry_on=[]).accepted("t", NOW).retry_on == ()


def test_a_job_says_after_which_failure_another_attempt_follows(bench):
    [record] = bench.submit(new_job(max_attempts=2, retry_on=["engine_error"]))
    bench.register()
    [job] = bench.claim(record.id)
    assert job.may_retry(ErrorCode.ENGINE_ERROR)
    assert not job.may_retry(ErrorCode.NUMERICAL_ERROR)
    fail(bench, job, code=ErrorCode.ENGINE_ERROR)
    bench.now += 10
    [last] = bench.claim(record.id)
    assert not last.may_retry(ErrorCode.ENGINE_ERROR)
