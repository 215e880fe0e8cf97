"""Cases of docs/proof.md that no other test holds, on the store alone."""

import threading

import pytest

from jobs import claims, store, sweep
from jobs.attempts import Outcome, totals
from jobs.lifecycle import JobState
from jobs.tenants import DEFAULT_TENANT
from tests.jobs.conftest import MODEL, NOW, new_job
from tests.jobs.test_claims import success


def test_a_submission_that_commits_late_is_published_though_later_ids_were_before_it(bench):
    """Q20: nothing remembers the last id it has seen."""
    if bench.database.sqlite:
        pytest.skip("on SQLite one submission is over before the next begins")
    with bench.database.begin() as slow:
        [early] = store.submit(slow, [new_job()], tenant=DEFAULT_TENANT, now=NOW).records
        bench.now += 2
        [late] = bench.submit(new_job())
        assert bench.call(sweep.publishable, MODEL, limit=9, now=bench.now) == [late.id]
    assert early.created_at < late.created_at
    assert bench.call(sweep.publishable, MODEL, limit=9, now=bench.now) == [early.id]


def test_a_job_cancelled_while_no_worker_lives_never_runs(bench):
    """Q11: a cancel is a row, and remembered by nobody's memory."""
    [record] = bench.submit(new_job())
    assert bench.call(sweep.publishable, MODEL, limit=9, now=bench.now) == [record.id]
    first = bench.call(store.cancel, record.id, tenant=DEFAULT_TENANT, now=bench.now)
    bench.register()
    assert bench.claim(record.id) == []  # its message comes to the first worker
    assert bench.call(sweep.publishable, MODEL, limit=9, now=bench.now + 60) == []
    again = bench.call(store.cancel, record.id, tenant=DEFAULT_TENANT, now=bench.now + 60)
    assert again == first
    assert (again.state, again.attempt) == (JobState.CANCELLED, 0)


def test_everybody_at_once_is_told_of_no_lock_and_every_job_ends_once(bench):
    """D04: clients, workers, sweepers and readers of one database, each as fast as it can."""
    num_jobs, errors = 60, []
    bench.register()
    submitted, finished = threading.Event(), threading.Event()

    def submit():
        for number in range(num_jobs):
            bench.submit(new_job(custom_id=str(number)))
        submitted.set()

    def work(worker_id):
        while not finished.is_set():
            ids = bench.call(sweep.publishable, MODEL, limit=4, now=bench.now)
            taken = bench.call(claims.claim, ids, worker_id=worker_id, now=bench.now)
            bench.finish([success(job) for job in taken], now=bench.now)
            if submitted.is_set() and not ids:
                finished.set()

    def look():
        while not finished.is_set():
            with bench.database.read() as connection:
                store.list_jobs(connection, tenant=DEFAULT_TENANT, limit=20)
            bench.call(sweep.reap, bench.now)

    def safely(function, *args):
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001
            errors.append(error)
            finished.set()

    threads = [
        threading.Thread(target=safely, args=args)
        for args in ((submit,), (work, "w1"), (work, "w2"), (look,))
    ]
    bench.register("w2")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    # a worker may have ended while another held the last ones
    left = bench.call(sweep.publishable, MODEL, limit=99, now=bench.now)
    bench.finish([success(job) for job in bench.claim(*left)], now=bench.now)
    with bench.database.read() as connection:
        counts = store.counts(connection)
    assert counts == {(MODEL, JobState.SUCCEEDED): num_jobs}
    assert bench.call(totals) == {("attempts", Outcome.SUCCEEDED): num_jobs}
