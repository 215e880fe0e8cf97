"""Quotas: exactly what fits is admitted, however many ask at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import insert

from jobs import claims, quotas, store, sweep, tenants
from jobs.models import jobs
from jobs.quotas import MINUTE_S, NEVER, QuotaExceeded
from jobs.tenants import Quotas
from tests.jobs.conftest import MODEL, NOW, new_job
from tests.jobs.test_claims import success

HASH = b"\1" * 32


@pytest.fixture
def acme(bench):
    """The store, and a tenant whose quotas the test sets."""

    def limited(**limits):
        bench.call(tenants.create, "acme", Quotas(**limits), now=NOW)
        return bench

    return limited


def submit(bench, *new_jobs, now=None, **kwargs):
    with bench.database.begin() as connection:
        store.submit(connection, new_jobs, tenant="acme", now=now or bench.now, **kwargs)


def count(bench) -> int:
    with bench.database.read() as connection:
        return len(store.list_jobs(connection, tenant="acme", limit=1000))


@pytest.mark.parametrize(
    ("quota", "limit"),
    [("max_queued_jobs", 10), ("requests_per_minute", 10), ("tokens_per_minute", 10 * 7)],
)
def test_of_fifty_at_once_exactly_ten_are_admitted(acme, quota, limit):
    bench = acme(**{quota: limit})

    def one(_) -> tuple[str, int] | None:
        try:
            submit(bench, new_job(prompt_tokens=3, max_tokens=4))
        except QuotaExceeded as error:
            return (error.quota, error.limit)
        return None

    with ThreadPoolExecutor(25) as threads:
        refused = list(threads.map(one, range(50)))
    assert refused.count(None) == 10
    assert refused.count((quota, limit)) == 40
    assert count(bench) == 10


def test_a_submission_is_admitted_whole_or_not_at_all(acme):
    bench = acme(max_queued_jobs=3, tokens_per_minute=100)
    submit(bench, new_job(), new_job())
    with pytest.raises(QuotaExceeded):
        submit(bench, new_job(max_tokens=60), new_job())
    assert count(bench) == 2
    submit(bench, new_job(max_tokens=60))  # what was refused has used nothing
    with pytest.raises(QuotaExceeded) as raised:
        submit(bench, *(new_job() for _ in range(4)))
    assert raised.value.retry_after_s == NEVER


def test_every_sample_counts(acme):
    bench = acme(tokens_per_minute=50)
    three = {"model": MODEL, "prompt": "x", "n": 3}
    submit(bench, new_job(body=three, prompt_tokens=2, max_tokens=16))
    with pytest.raises(QuotaExceeded):
        submit(bench, new_job(prompt_tokens=1))


def test_a_minute_ends_and_the_next_begins_with_its_first_request(acme):
    bench = acme(requests_per_minute=2)
    submit(bench, new_job())
    submit(bench, new_job(), now=NOW + 30)
    with pytest.raises(QuotaExceeded) as raised:
        submit(bench, new_job(), now=NOW + 50)
    assert raised.value.retry_after_s == pytest.approx(MINUTE_S - 50)
    submit(bench, new_job(), new_job(), now=NOW + 61)
    with pytest.raises(QuotaExceeded):
        submit(bench, new_job(), now=NOW + 100)


def test_a_repeat_under_its_key_uses_nothing(acme):
    bench = acme(requests_per_minute=1)
    for _ in range(3):
        submit(bench, new_job(), key="k", body_sha256=HASH)
    assert count(bench) == 1


def test_queued_jobs_that_were_taken_make_room(acme):
    bench = acme(max_queued_jobs=1)
    job = new_job()
    submit(bench, job)
    with pytest.raises(QuotaExceeded):
        submit(bench, new_job())
    bench.register()
    bench.claim(job.id)
    submit(bench, new_job())


def test_other_tenants_have_no_part_in_it(acme):
    bench = acme(max_queued_jobs=1, requests_per_minute=1)
    submit(bench, new_job())
    bench.submit(*(new_job() for _ in range(5)))


def test_no_more_run_than_may_and_the_rest_waits_off_the_runway(acme):
    bench = acme(max_running_jobs=2)
    ours = [new_job() for _ in range(5)]
    submit(bench, *ours)
    theirs = bench.submit(new_job())[0]
    ids = bench.call(sweep.publishable, MODEL, limit=10, now=NOW)
    bench.register()
    back = bench.call(quotas.held_back, ids, now=NOW)
    assert back == {job.id for job in ours[2:]}
    bench.call(claims.put_back, sorted(back))
    claimed = bench.claim(*(job_id for job_id in ids if job_id not in back))
    assert {job.id for job in claimed} == {ours[0].id, ours[1].id, theirs.id}
    assert bench.call(sweep.publishable, MODEL, limit=10, now=NOW) == []
    [first] = [job for job in claimed if job.id == ours[0].id]
    bench.finish([success(first)], now=NOW + 1)
    assert ours[2].id in bench.call(sweep.publishable, MODEL, limit=10, now=NOW + 1)
    assert bench.call(quotas.held_back, [job.id for job in ours[2:]], now=NOW) == {
        job.id for job in ours[3:]
    }


def rows(bench, number: int, **values) -> list[str]:
    """Rows of a batch of acme's, queued."""
    made = [
        new_job(batch_id="batch_1", row_number=n, **values).accepted("acme", NOW + n * 1e-6)
        for n in range(number)
    ]
    bench.call(lambda connection: connection.execute(insert(jobs), [each.row() for each in made]))
    return [record.id for record in made]


@pytest.mark.parametrize("limits", [{"requests_per_minute": 3}, {"tokens_per_minute": 2 * 9 + 1}])
def test_rows_of_batches_wait_for_the_minute_and_calls_do_not_wait_for_them(acme, limits):
    """Rows have a minute of their own. Of those that have ended it counts what they took."""
    bench = acme(**limits)
    bench.register()
    ids = rows(bench, 8, prompt_tokens=4, max_tokens=5)
    call = new_job(prompt_tokens=1, max_tokens=1)
    submit(bench, call)

    def publishable(now: float) -> set[str]:
        return set(bench.call(sweep.publishable, MODEL, limit=10, now=now))

    published = publishable(NOW)
    assert published == {*ids, call.id}
    back = bench.call(quotas.held_back, sorted(published), now=NOW)
    assert back == set(ids[3:])
    bench.call(claims.put_back, sorted(back))
    claimed = bench.claim(*ids[:3])
    bench.now = NOW + 30
    assert publishable(NOW + 30) == set()
    bench.finish([success(job, completion_tokens=1) for job in claimed], now=NOW + 30)
    # their tokens were fewer than asked for
    assert publishable(NOW + 31) == (set(ids[3:]) if "tokens_per_minute" in limits else set())
    assert publishable(NOW + 61) == (set() if "tokens_per_minute" in limits else set(ids[3:]))


def test_a_batch_takes_nothing_of_the_callers_minute(acme):
    bench = acme(requests_per_minute=2)
    bench.register()
    bench.claim(*rows(bench, 2))
    submit(bench, new_job(), new_job())
    with pytest.raises(QuotaExceeded):
        submit(bench, new_job())
