"""Jobs that end with their callers' API process, on both databases."""

from sqlalchemy import func, select

from jobs import dead, store, waiting
from jobs.lifecycle import JobState
from jobs.models import api_processes
from jobs.tenants import DEFAULT_TENANT
from tests.jobs.conftest import new_job
from tests.jobs.test_claims import success

CANCELLED = JobState.CANCELLED


def extend(bench, process_id, lease_s=30.0):
    bench.call(waiting.extend, process_id, now=bench.now, lease_s=lease_s)


def sweep(bench):
    return bench.call(waiting.cancel_unwaited, bench.now)


def test_a_job_ends_with_the_lease_of_its_callers_process(bench):
    extend(bench, "a")
    queued, running, kept = bench.submit(new_job(waiter_id="a"), new_job(waiter_id="a"), new_job())
    bench.register()
    bench.claim(running.id)
    bench.now += 29
    assert sweep(bench) == []
    extend(bench, "a")
    bench.now += 29
    assert sweep(bench) == []
    bench.now += 1
    assert set(sweep(bench)) == {queued.id, running.id}
    assert sweep(bench) == []
    ended = bench.get(running.id)
    assert (ended.state, ended.finish_reason, ended.finished_at) == (CANCELLED, "abort", bench.now)
    assert ended.fence == 2  # who runs it is refused
    assert bench.get(kept.id).state == JobState.QUEUED


def test_another_processs_lease_does_not_help_and_a_process_that_has_ended_has_none(bench):
    extend(bench, "a")
    extend(bench, "b")
    of_a, of_b, of_none = bench.submit(
        new_job(waiter_id="a"), new_job(waiter_id="b"), new_job(waiter_id="never begun")
    )
    assert sweep(bench) == [of_none.id]
    bench.call(waiting.end, "a")
    assert sweep(bench) == [of_a.id]
    assert bench.get(of_b.id).state == JobState.QUEUED


def test_what_has_ended_keeps_its_end(bench):
    done, failed = bench.submit(new_job(waiter_id="gone"), new_job(waiter_id="gone"))
    bench.register()
    for claimed in bench.claim(done.id, failed.id):
        values = {} if claimed.id == done.id else {
            "state": JobState.FAILED, "output": None, "error": {"code": "engine_error"},
            "finish_reason": "error",
        }  # fmt: skip
        bench.finish([success(claimed, **values)], now=bench.now)
    assert sweep(bench) == []
    assert bench.get(done.id).state == JobState.SUCCEEDED
    # nobody waits for what an operator has tried once more, and it runs
    bench.call(dead.requeue, [failed.id], now=bench.now)
    assert sweep(bench) == []
    assert bench.get(failed.id).state == JobState.QUEUED


def test_leases_that_ran_out_are_forgotten_and_others_are_not(bench):
    extend(bench, "old", lease_s=1)
    extend(bench, "new", lease_s=10)
    bench.now += 1
    bench.call(waiting.purge, bench.now)
    with bench.database.read() as connection:
        assert connection.scalar(select(func.count()).select_from(api_processes)) == 1
    (job,) = bench.submit(new_job(waiter_id="new"))
    assert sweep(bench) == []
    with bench.database.read() as connection:
        assert store.get(connection, job.id, tenant=DEFAULT_TENANT).state == JobState.QUEUED
