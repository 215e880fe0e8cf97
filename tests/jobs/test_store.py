"""What clients do: submit, look, cancel."""

import threading
import time

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from jobs import store
from jobs.database import Database
from jobs.finishing import JobResult
from jobs.lifecycle import JobState
from jobs.models import Base
from jobs.store import IdempotencyConflict, UnknownCursor, WrongSchema
from jobs.tenants import DEFAULT_TENANT
from tests.jobs.conftest import MODEL, NOW, new_job

HASH, OTHER_HASH = b"\1" * 32, b"\2" * 32


def test_a_job_comes_back_as_it_was_submitted(bench):
    job = new_job(
        custom_id="row-17", priority=3, deadline_s=60, metadata={"k": "ü"}, max_tokens=9,
        body={"model": MODEL, "prompt": "naïve 😀 \ud800 \0 text", "logit": [1.5, None]},
    )  # fmt: skip
    (record,) = bench.submit(job)
    assert bench.get(job.id) == record
    assert record.body == job.body
    assert (record.state, record.attempt, record.created_at) == (JobState.QUEUED, 0, NOW)
    assert record.deadline_at == NOW + 60
    assert record.timings == {"queue_s": None, "ttft_s": None, "tpot_s": None, "total_s": None}


@pytest.mark.parametrize(
    "wrong",
    [
        {"custom_id": "é" * 129},
        {"custom_id": "a\0b"},
        {"model": "\ud800"},
        {"priority": 11},
        {"max_attempts": 0},
        {"deadline_s": 0},
        {"deadline_s": float("nan")},
        {"id": ""},
    ],
)
def test_values_no_row_may_hold_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        new_job(**wrong)


def test_all_jobs_of_a_submission_are_accepted_or_none(bench):
    taken = new_job()
    bench.submit(taken)
    other = new_job()
    with pytest.raises(Exception, match=r"UNIQUE|unique"):
        bench.submit(other, new_job(id=taken.id))
    with bench.database.read() as connection:
        assert store.get(connection, other.id, tenant=DEFAULT_TENANT) is None


def test_listing_is_newest_first_and_pages_by_cursor(bench):
    first = bench.submit(*(new_job() for _ in range(5)))
    bench.now += 1
    second = bench.submit(*(new_job() for _ in range(3)))
    newest_first = [record.id for record in (*first, *second)][::-1]
    with bench.database.read() as connection:
        pages, after = [], None
        while page := store.list_jobs(connection, tenant=DEFAULT_TENANT, limit=3, after=after):
            pages += [record.id for record in page]
            after = page[-1].id
    assert pages == newest_first


def test_a_cursor_that_is_no_job_is_refused(bench):
    with bench.database.read() as connection, pytest.raises(UnknownCursor, match="job_gone"):
        store.list_jobs(connection, tenant=DEFAULT_TENANT, limit=3, after="job_gone")


def test_filters_combine(bench):
    mine, theirs, batch, other = bench.submit(
        new_job(custom_id="a"), new_job(custom_id="b"), new_job(batch_id="batch_1"),
        new_job(model="other"),
    )  # fmt: skip
    bench.call(store.cancel, theirs.id, tenant=DEFAULT_TENANT, now=bench.now)

    def listed(**filters):
        with bench.database.read() as connection:
            return {
                record.id
                for record in store.list_jobs(
                    connection, tenant=DEFAULT_TENANT, limit=10, **filters
                )
            }

    assert listed(status=JobState.QUEUED) == {mine.id, batch.id, other.id}
    assert listed(status=JobState.QUEUED, model=MODEL) == {mine.id, batch.id}
    assert listed(custom_id="b") == {theirs.id}
    assert listed(batch_id="batch_1", status=JobState.CANCELLED) == set()
    assert listed(model="other") == {other.id}


def test_a_repeat_under_the_same_key_finds_the_first_jobs(bench):
    first = bench.submit(new_job(), new_job(), key="k", body_sha256=HASH)
    with bench.database.begin() as connection:
        again = store.submit(
            connection,
            [new_job(), new_job()],
            tenant=DEFAULT_TENANT,
            now=bench.now + 5,
            key="k",
            body_sha256=HASH,
        )
        assert again.replayed
        assert list(again.records) == first
        assert store.counts(connection) == {(MODEL, JobState.QUEUED): 2}


def test_another_body_under_a_used_key_is_a_conflict_and_leaves_nothing(bench):
    bench.submit(new_job(), key="k", body_sha256=HASH)
    with pytest.raises(IdempotencyConflict, match="'k'"):
        bench.submit(new_job(), key="k", body_sha256=OTHER_HASH)
    with bench.database.read() as connection:
        assert store.counts(connection) == {(MODEL, JobState.QUEUED): 1}


def test_a_key_is_free_again_after_its_time(bench):
    (first,) = bench.submit(new_job(), key="k", body_sha256=HASH, ttl_s=100)
    bench.now += 99
    assert bench.submit(new_job(), key="k", body_sha256=HASH, ttl_s=100) == [first]
    bench.now += 1
    (fresh,) = bench.submit(new_job(), key="k", body_sha256=OTHER_HASH, ttl_s=100)
    assert fresh.id != first.id
    assert bench.submit(new_job(), key="k", body_sha256=OTHER_HASH, ttl_s=100) == [fresh]


def test_a_failed_submission_does_not_use_up_its_key(bench):
    taken = new_job()
    bench.submit(taken)
    with pytest.raises(Exception, match=r"UNIQUE|unique"):
        bench.submit(new_job(id=taken.id), key="k", body_sha256=HASH)
    (record,) = bench.submit(new_job(), key="k", body_sha256=OTHER_HASH)
    assert bench.get(record.id).state == JobState.QUEUED


def test_twenty_parallel_submissions_under_one_key_make_one_set_of_jobs(bench):
    start = threading.Barrier(20)
    found: list[tuple[str, ...]] = []

    def submit():
        mine = [new_job(), new_job()]
        start.wait()
        with bench.database.begin() as connection:
            submitted = store.submit(
                connection, mine, tenant=DEFAULT_TENANT, now=NOW, key="k", body_sha256=HASH
            )
        found.append(tuple(record.id for record in submitted.records))

    threads = [threading.Thread(target=submit) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert len(set(found)) == 1
    with bench.database.read() as connection:
        assert store.counts(connection) == {(MODEL, JobState.QUEUED): 2}


def test_cancelling_ends_queued_and_running_jobs_for_good(bench):
    queued, running = bench.submit(new_job(), new_job())
    bench.register()
    (claimed,) = bench.claim(running.id)
    bench.now += 2
    for record in (queued, running):
        cancelled = bench.call(store.cancel, record.id, tenant=DEFAULT_TENANT, now=bench.now)
        assert (cancelled.state, cancelled.finished_at) == (JobState.CANCELLED, bench.now)
        assert cancelled.finish_reason == "abort"
        assert (
            bench.call(store.cancel, record.id, tenant=DEFAULT_TENANT, now=bench.now + 1)
            == cancelled
        )
    assert bench.claim(queued.id) == []
    late = JobResult(
        id=claimed.id, fence=claimed.fence, state=JobState.SUCCEEDED, output={"late": True}
    )
    assert bench.finish([late], now=bench.now) == set()
    assert bench.get(running.id).output is None


def test_cancelling_an_ended_job_returns_it_unchanged(bench):
    (record,) = bench.submit(new_job())
    bench.register()
    (claimed,) = bench.claim(record.id)
    result = JobResult(
        id=claimed.id, fence=claimed.fence, state=JobState.SUCCEEDED, output={"text": "done"}
    )
    bench.finish([result], now=bench.now)
    assert bench.call(
        store.cancel, record.id, tenant=DEFAULT_TENANT, now=bench.now + 9
    ) == bench.get(record.id)
    assert bench.get(record.id).state == JobState.SUCCEEDED
    assert bench.call(store.cancel, "job_gone", tenant=DEFAULT_TENANT, now=bench.now) is None


def test_counts_tell_what_happened(bench):
    records = bench.submit(*(new_job() for _ in range(4)))
    bench.register()
    claimed = bench.claim(*(record.id for record in records[:3]))
    results = [
        JobResult(id=job.id, fence=job.fence, state=JobState.SUCCEEDED, output={})
        for job in claimed[:2]
    ]
    bench.finish(results, now=NOW + 4)
    with bench.database.read() as connection:
        assert store.counts(connection) == {
            (MODEL, JobState.SUCCEEDED): 2,
            (MODEL, JobState.RUNNING): 1,
            (MODEL, JobState.QUEUED): 1,
        }


def test_live_workers_are_those_whose_lease_runs(bench):
    bench.register("w1", lease_s=10)
    bench.now += 5
    bench.register("w2", lease_s=10)
    with bench.database.read() as connection:
        assert [worker.id for worker in store.live_workers(connection, NOW + 9)] == ["w1", "w2"]
        (worker,) = store.live_workers(connection, NOW + 10)
    assert (worker.id, worker.kv_tokens, worker.stats) == ("w2", 4096, {})


def test_ended_are_those_in_a_terminal_state(bench):
    bench.register()
    queued, running, cancelled = bench.submit(new_job(), new_job(), new_job())
    bench.claim(running.id)
    bench.call(store.cancel, cancelled.id, tenant=DEFAULT_TENANT, now=bench.now)
    ids = [queued.id, running.id, cancelled.id, "job_unknown"]
    assert bench.call(store.ended, ids) == {cancelled.id}


def test_five_hundred_jobs_are_accepted_in_a_fraction_of_a_second(sqlite_url):
    database = Database(sqlite_url)
    text = "A prompt of some four hundred characters. " * 10
    new_jobs = [new_job(body={"model": MODEL, "prompt": text}) for _ in range(500)]
    started = time.process_time()  # a busy machine must not fail it
    with database.begin() as connection:
        store.submit(
            connection, new_jobs, tenant=DEFAULT_TENANT, now=NOW, key="k", body_sha256=HASH
        )
    assert time.process_time() - started < 0.5
    database.dispose()


def test_errors_never_quote_a_prompt(bench):
    secret = "nobody else's business"
    taken = new_job(body={"model": MODEL, "prompt": secret})
    bench.submit(taken)
    with pytest.raises(DBAPIError) as caught:
        bench.submit(taken)
    assert secret not in str(caught.value)
    assert secret not in repr(caught.value)


def test_tables_without_one_of_our_columns_are_of_another_version(bench):
    with bench.database.begin() as connection:
        store.need_schema(connection)
        for table in Base.metadata.sorted_tables:
            for column in table.columns:
                rename = f"ALTER TABLE {table.name} RENAME COLUMN {{}} TO {{}}"
                connection.execute(text(rename.format(column.name, "other")))
                with pytest.raises(WrongSchema):
                    store.need_schema(connection)
                connection.execute(text(rename.format("other", column.name)))
        store.need_schema(connection)


def test_a_database_without_tables_has_not_our_schema(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'empty.db'}")
    with database.begin() as connection, pytest.raises(WrongSchema, match="tokenmill migrate"):
        store.need_schema(connection)
    database.dispose()
