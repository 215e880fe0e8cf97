"""Rescue, expiry, publishing and purge; safe with any number of sweepers at once."""

import random
import threading

import pytest
from sqlalchemy import text

from jobs import finishing, quotas, store, stored, sweep
from jobs.accounting import Counted, Wasted, account_wasted, count_prompts
from jobs.lifecycle import ErrorCode, JobState
from jobs.sweep import Reaped
from jobs.tenants import DEFAULT_TENANT, Quotas
from tests.jobs.conftest import MODEL, NOW, new_job


def publishable(bench, limit=100, model=MODEL):
    return bench.call(sweep.publishable, model, limit=limit, now=bench.now)


def republish(bench, *, num_messages=None, limit=100):
    return bench.call(
        sweep.republish, MODEL, limit=limit, now=bench.now, older_than_s=5,
        num_messages=num_messages,
    )  # fmt: skip


def test_jobs_of_silent_and_unknown_workers_come_back_and_others_stay(bench):
    silent, unknown, live = bench.submit(new_job(), new_job(), new_job())
    bench.register("w1", lease_s=30)
    bench.claim(silent.id)
    bench.claim(unknown.id, worker_id="never registered")
    bench.now += 29
    bench.register("w2", lease_s=30)
    bench.claim(live.id, worker_id="w2")
    assert bench.call(sweep.reap, bench.now) == [Reaped(unknown.id, MODEL, JobState.QUEUED)]
    bench.now += 1
    assert bench.call(sweep.reap, bench.now) == [Reaped(silent.id, MODEL, JobState.QUEUED)]
    assert bench.call(sweep.reap, bench.now) == []
    back = bench.get(silent.id)
    assert (back.state, back.attempt, back.fence) == (JobState.QUEUED, 1, 2)
    assert (back.worker_id, back.published_at, back.started_at) == (None, None, None)
    assert bench.get(live.id).state == JobState.RUNNING


def test_a_job_reaped_in_its_last_attempt_fails(bench):
    (record,) = bench.submit(new_job(max_attempts=2))
    for expected in (JobState.QUEUED, JobState.FAILED):
        begun_at = bench.now
        assert len(bench.claim(record.id, worker_id="gone")) == 1
        bench.now += 7
        assert bench.call(sweep.reap, bench.now) == [Reaped(record.id, MODEL, expected)]
    failed = bench.get(record.id)
    assert failed.error["code"] == ErrorCode.MAX_ATTEMPTS
    assert (failed.started_at, failed.finished_at) == (begun_at, bench.now)
    assert failed.timings["queue_s"] == begun_at - failed.created_at
    assert failed.finish_reason == "error"


def test_queued_jobs_past_their_deadline_expire(bench):
    late, later, running = bench.submit(
        new_job(deadline_s=10), new_job(deadline_s=20), new_job(deadline_s=10)
    )
    bench.claim(running.id)
    bench.now += 10
    assert bench.call(sweep.expire, bench.now) == [late.id]
    expired = bench.get(late.id)
    assert (expired.state, expired.finish_reason) == (JobState.EXPIRED, "deadline")
    assert expired.error["code"] == ErrorCode.DEADLINE_EXCEEDED
    assert bench.get(later.id).state == JobState.QUEUED
    assert bench.get(running.id).state == JobState.RUNNING


def test_the_best_jobs_are_published_first_and_once(bench):
    choice = random.Random(7)
    made = []
    for _ in range(30):
        bench.now += choice.choice([0, 1])
        made += bench.submit(
            new_job(priority=choice.randint(-1, 1), deadline_s=choice.choice([None, 50, 90]))
        )
    bench.submit(new_job(model="other"))
    never = float("inf")
    order = sorted(made, key=lambda r: (-r.priority, r.deadline_at or never, r.created_at, r.id))
    best = [record.id for record in order]
    for start in range(0, 30, 7):  # each eighth place is the oldest's: see test_order
        assert publishable(bench, 7) == best[start : start + 7]
    assert publishable(bench) == []
    assert bench.get(best[0]).published_at == bench.now


def test_a_lost_message_is_sent_again_once_the_runway_is_nearly_empty(bench):
    first, second = bench.submit(new_job(), new_job())
    publishable(bench)
    bench.now += 4.9
    assert republish(bench, num_messages=0) == []
    bench.now += 0.1
    assert republish(bench) == []
    assert republish(bench, num_messages=0) == [first.id, second.id]
    assert republish(bench, num_messages=0) == []


def test_messages_that_wait_for_a_worker_are_not_lost(bench):
    first, *_ = bench.submit(*(new_job() for _ in range(3)))
    publishable(bench)
    bench.now += 60
    assert republish(bench, num_messages=3) == []
    assert republish(bench, num_messages=4) == []
    assert republish(bench, num_messages=2) == [first.id]


def test_behind_a_deep_backlog_a_message_overtaken_by_later_ones_is_lost(bench):
    (lost,) = bench.submit(new_job())
    publishable(bench)
    bench.now += 6
    overtaker, waiting = bench.submit(new_job(), new_job())
    publishable(bench)
    assert republish(bench) == []
    bench.claim(overtaker.id)
    assert republish(bench) == [lost.id]
    assert bench.get(waiting.id).published_at == bench.now


def test_a_job_that_came_whole_in_a_message_overtakes_nobody(bench):
    bench.submit(new_job())
    publishable(bench)
    bench.now += 60
    whole = new_job()
    bench.call(store.insert_new, [whole], now=bench.now)
    assert len(bench.claim(whole.id)) == 1
    assert republish(bench) == []


def test_many_sweepers_at_once_do_each_thing_once(bench):
    ids = {record.id for record in bench.submit(*(new_job() for _ in range(60)))}
    bench.claim(*list(ids)[:20], worker_id="gone")
    start, reaped, published, errors = threading.Barrier(5), [], [], []

    def round_():
        start.wait()
        try:
            for _ in range(4):
                reaped.extend(each.id for each in bench.call(sweep.reap, bench.now))
                published.extend(publishable(bench, 7))
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=round_) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    published.extend(publishable(bench))
    assert len(reaped) == 20
    assert sorted(published) == sorted(ids)


def test_purging_forgets_old_keys_and_workers_that_hold_nothing(bench):
    bench.submit(new_job(), key="old", body_sha256=b"\1" * 32)
    (record,) = bench.submit(new_job())
    bench.register("idle", lease_s=1)
    bench.register("holding", lease_s=1)
    bench.claim(record.id, worker_id="holding")
    bench.now += sweep.FORGET_WORKER_S
    bench.submit(new_job(), key="new", body_sha256=b"\1" * 32)
    bench.now += 1
    bench.call(sweep.purge, now=bench.now, idempotency_ttl_s=60)
    with bench.database.read() as connection:
        keys = connection.scalars(text("SELECT key FROM idempotency_keys")).all()
        workers = connection.scalars(text("SELECT id FROM workers")).all()
    assert (keys, workers) == (["new"], ["holding"])


@pytest.fixture
def full(bench):
    """Enough rows in every state that a plan which reads them all would be dearer."""
    records = bench.submit(*(new_job(deadline_s=1e6) for _ in range(1500)))
    claimed = bench.claim(*(record.id for record in records[:900]))
    results = [
        finishing.JobResult(id=job.id, fence=job.fence, state=JobState.SUCCEEDED, output={})
        for job in claimed[20:]
    ]
    bench.finish(results, now=bench.now)
    if not bench.database.sqlite:
        with bench.database.begin() as connection:
            connection.execute(text("ANALYZE"))
    return bench


def plan(bench, function, *args, **kwargs) -> str:
    """How the database runs the statements of `function`, in its own words."""
    seen = []

    def note(connection, cursor, statement, parameters, context, many):
        if not statement.startswith(("EXPLAIN", "SAVEPOINT", "RELEASE")):
            seen.append((statement, parameters))

    from sqlalchemy import event

    explain = "EXPLAIN QUERY PLAN " if bench.database.sqlite else "EXPLAIN "
    with bench.database.begin() as connection:
        event.listen(connection, "before_cursor_execute", note)
        function(connection, *args, **kwargs)
        event.remove(connection, "before_cursor_execute", note)
        return "\n".join(
            str(row)
            for statement, parameters in seen
            for row in connection.exec_driver_sql(explain + statement, parameters)
        )


INDEXED = {
    "publishable": ("jobs_queued_of", sweep.publishable, (MODEL,), {"limit": 4, "now": NOW}),
    "expire": ("jobs_due", sweep.expire, (NOW,), {}),
    "reap": ("jobs_running", sweep.reap, (NOW,), {}),
    "list_stored": (
        "jobs_stored",
        stored.list_stored,
        (),
        {"tenant": DEFAULT_TENANT, "limit": 20, "ascending": True, "metadata": {"k": "v"}},
    ),
    "rows_of_the_minute": (
        "jobs_rows_started",
        quotas._row_minute,
        (DEFAULT_TENANT, Quotas(requests_per_minute=1), NOW),
        {},
    ),
    "list": ("jobs_newest", store.list_jobs, (), {"tenant": DEFAULT_TENANT, "limit": 20}),
}


@pytest.mark.parametrize("name", INDEXED)
def test_the_queries_that_run_all_day_use_their_index(full, name):
    index, function, args, kwargs = INDEXED[name]
    words = plan(full, function, *args, **kwargs)
    assert index in words
    # PostgreSQL may scan a table in one piece, SQLite calls that SCAN jobs
    assert "Seq Scan on jobs" not in words
    assert not any(line.endswith(("'SCAN jobs')", "'SCAN ahead')")) for line in words.splitlines())
    if name in ("publishable", "list") and not full.database.sqlite:
        assert "Sort" not in words.split("Index")[-1]


@pytest.mark.parametrize("function", [finishing.finish, account_wasted, count_prompts])
def test_writes_by_id_go_through_the_primary_key(full, function):
    result = finishing.JobResult(id="job_1", fence=1, state=JobState.SUCCEEDED, output={})
    arguments = {
        finishing.finish: ([result], {"now": NOW}),
        account_wasted: ([Wasted("job_1", 1)], {}),
        count_prompts: ([Counted("job_1", 2, 3)], {}),
    }
    rows, named = arguments[function]
    words = plan(full, function, rows, **named)
    assert "sqlite_autoindex_jobs_1" in words or "jobs_pkey" in words
    assert "Seq Scan on jobs" not in words
