"""Every claim has a row that says what came of it, in the transaction that says so of the job."""

import pytest
from sqlalchemy import delete, func, select

from jobs import accounting, attempts, claims, finishing, store, sweep
from jobs.accounting import Wasted
from jobs.attempts import Count, Outcome
from jobs.finishing import JobResult
from jobs.lifecycle import ErrorCode, JobState, error_object
from jobs.models import Attempt, engine_deaths, jobs, tallies
from jobs.tenants import DEFAULT_TENANT
from tests.jobs.conftest import NOW, held, new_job
from tests.jobs.test_claims import beat, release, success


def tried(bench, job_id, tenant=DEFAULT_TENANT):
    return bench.call(attempts.of_job, job_id, tenant=tenant)


def counted(bench):
    return bench.call(attempts.totals)


def failure(job, **values):
    error = error_object(ErrorCode.NUMERICAL_ERROR, "NaN")
    return JobResult(**{
        "id": job.id, "fence": job.fence, "state": JobState.FAILED, "error": error,
    } | values)  # fmt: skip


@pytest.fixture
def claimed(bench):
    bench.submit(new_job(max_attempts=2))
    bench.register()
    [job_id] = bench.call(sweep.publishable, "tiny", limit=9, now=NOW)
    bench.now += 1
    return bench.claim(job_id)[0]


def test_a_claim_begins_one_and_a_result_closes_it(bench, claimed):
    [going_on] = tried(bench, claimed.id)
    assert (going_on.attempt, going_on.fence, going_on.worker_id) == (1, 1, "w1")
    assert (going_on.started_at, going_on.ended_at, going_on.outcome) == (NOW + 1, None, None)
    bench.finish([success(claimed, completion_tokens=7, wasted_tokens=2)], now=NOW + 3)
    [ended] = tried(bench, claimed.id)
    assert (ended.outcome, ended.error_code, ended.ended_at) == ("succeeded", None, NOW + 3)
    assert (ended.kept_tokens, ended.wasted_tokens) == (7, 2)
    assert counted(bench) == {
        (Count.ATTEMPTS, Outcome.SUCCEEDED): 1, (Count.WASTED_TOKENS, ""): 2,
    }  # fmt: skip


def test_a_failure_says_which(bench, claimed):
    bench.finish([failure(claimed, wasted_tokens=4)], now=NOW + 3)
    [ended] = tried(bench, claimed.id)
    assert (ended.outcome, ended.error_code) == ("failed", "numerical_error")
    assert (ended.kept_tokens, ended.wasted_tokens) == (0, 4)


def test_one_handed_back_keeps_what_is_in_the_checkpoint_and_the_next_has_its_own_alone(
    bench, claimed
):
    release(bench, claimed, checkpoints={claimed.id: [[1, 2, 3]]})
    [again] = bench.claim(claimed.id, worker_id="w2")
    bench.finish([success(again, completion_tokens=5)], now=NOW + 9)
    first, second = tried(bench, claimed.id)
    assert (first.outcome, first.kept_tokens, first.wasted_tokens) == ("handed_back", 3, 0)
    assert (second.outcome, second.kept_tokens, second.wasted_tokens) == ("succeeded", 2, 0)
    assert [(each.attempt, each.worker_id) for each in (first, second)] == [(1, "w1"), (1, "w2")]


def test_a_lapse_and_a_crash_end_attempts_the_last_of_which_ends_the_job(bench, claimed):
    beat(bench, [claimed], checkpoints={claimed.id: [[1, 2]]})
    bench.now += 31
    assert [each.state for each in bench.call(sweep.reap, bench.now)] == [JobState.QUEUED]
    bench.register("w2")
    [again] = bench.claim(claimed.id, worker_id="w2")
    states = release(bench, again, crashed=True, checkpoints={claimed.id: [[1, 2, 3, 4, 5]]})
    assert states == {claimed.id: JobState.FAILED}
    first, second = tried(bench, claimed.id)
    assert (first.outcome, first.error_code, first.kept_tokens) == ("lapsed", None, 2)
    assert (second.outcome, second.error_code) == ("suspect", "max_attempts")
    assert (second.kept_tokens, second.wasted_tokens) == (0, 5)
    assert bench.get(claimed.id).wasted_tokens == 5
    assert counted(bench) == {
        (Count.ATTEMPTS, Outcome.LAPSED): 1, (Count.ATTEMPTS, Outcome.SUSPECT): 1,
        (Count.WASTED_TOKENS, ""): 5,
    }  # fmt: skip


@pytest.mark.parametrize("by", ["client", "celery"])
def test_a_cancel_ends_the_attempt_under_way_and_tokens_told_of_later_are_added(bench, claimed, by):
    beat(bench, [claimed], checkpoints={claimed.id: [[1, 2]]})
    if by == "client":
        bench.call(store.cancel, claimed.id, tenant=DEFAULT_TENANT, now=NOW + 5)
    else:
        bench.call(finishing.revoke, claimed.id, now=NOW + 5)
    bench.call(accounting.account_wasted, [Wasted(claimed.id, 3, None, claimed.fence)])
    [ended] = tried(bench, claimed.id)
    assert (ended.outcome, ended.wasted_tokens, ended.ended_at) == ("cancelled", 5, NOW + 5)
    assert counted(bench)[Count.WASTED_TOKENS, ""] == bench.get(claimed.id).wasted_tokens == 5


@pytest.mark.parametrize("end", ["cancelled", "lapsed"])
def test_all_that_a_lost_attempt_had_is_waste_but_for_what_its_checkpoint_took(bench, claimed, end):
    beat(bench, [claimed], checkpoints={claimed.id: [[1, 2]]})
    if end == "cancelled":
        bench.call(store.cancel, claimed.id, tenant=DEFAULT_TENANT, now=NOW + 5)
    else:
        bench.call(sweep.reap, NOW + 60)
    left = [
        Wasted(claimed.id, 5, None, claimed.fence),
        Wasted(claimed.id, 1, None, claimed.fence + 9),  # of one that nobody knows
    ]
    bench.call(accounting.account_left, left)
    wasted = 5 + 1 if end == "cancelled" else 3 + 1
    assert bench.get(claimed.id).wasted_tokens == wasted == counted(bench)[Count.WASTED_TOKENS, ""]
    fewer = [Wasted(claimed.id, 1, None, claimed.fence)]
    bench.call(accounting.account_left, fewer)
    bench.call(accounting.account_left, [])
    assert bench.get(claimed.id).wasted_tokens == wasted


def test_what_has_not_been_claimed_has_no_attempt_whatever_its_end(bench):
    first, second = bench.submit(new_job(), new_job(deadline_s=1))
    bench.call(store.cancel, first.id, tenant=DEFAULT_TENANT, now=NOW)
    assert bench.call(sweep.expire, NOW + 2) == [second.id]
    assert tried(bench, first.id) == tried(bench, second.id) == []
    assert counted(bench) == {}


def test_who_is_fenced_out_closes_nothing(bench, claimed):
    bench.now += 31
    bench.call(sweep.reap, bench.now)
    assert bench.finish([success(claimed)], now=bench.now) == set()
    assert release(bench, claimed) == {}
    [lapsed] = tried(bench, claimed.id)
    assert lapsed.outcome == "lapsed"


def test_attempts_are_their_tenants_and_go_with_the_job(bench, claimed):
    assert tried(bench, claimed.id, tenant="other") == []
    assert bench.call(store.delete, claimed.id, tenant=DEFAULT_TENANT)
    with bench.database.read() as connection:
        assert connection.scalar(select(func.count()).select_from(Attempt)) == 0
    assert bench.finish([success(claimed)], now=NOW + 3) == set()


def test_rows_deleted_by_hand_take_their_attempts_along(bench, claimed):
    bench.finish([success(claimed)], now=NOW + 3)
    with bench.database.begin() as connection:
        connection.execute(delete(jobs))
    assert tried(bench, claimed.id) == []
    assert counted(bench)[Count.ATTEMPTS, Outcome.SUCCEEDED] == 1  # a count never goes down


def test_a_death_told_twice_is_one_and_is_forgotten_after_a_month(bench):
    told = {"worker_id": "w1", "model": "tiny", "ending": "SIGKILL", "job_ids": ["job_1"]}
    for _ in range(2):
        bench.call(attempts.record_death, "one", now=NOW, **told)
    assert counted(bench) == {(Count.ENGINE_DEATHS, "SIGKILL"): 1}
    with bench.database.read() as connection:
        [row] = connection.execute(select(engine_deaths))
    assert (row.ending, row.job_ids, row.died_at) == ("SIGKILL", '["job_1"]', NOW)
    bench.call(attempts.purge, NOW + attempts.FORGET_DEATHS_S - 1)
    assert number_of(bench, engine_deaths) == 1
    bench.call(attempts.purge, NOW + attempts.FORGET_DEATHS_S)
    assert number_of(bench, engine_deaths) == 0
    assert counted(bench) == {(Count.ENGINE_DEATHS, "SIGKILL"): 1}


def number_of(bench, table):
    with bench.database.read() as connection:
        return connection.scalar(select(func.count()).select_from(table))


def test_many_tallies_become_one_of_each_and_none_is_lost(bench):
    for _ in range(30):
        bench.call(attempts.count, {("attempts", "failed"): 2, ("stale_writes", "result"): 1})
    bench.call(attempts.purge, NOW)
    assert number_of(bench, tallies) == 2
    assert counted(bench) == {("attempts", "failed"): 60, ("stale_writes", "result"): 30}


def test_every_claim_is_recorded_once_however_many_come_together(bench):
    records = bench.submit(*(new_job() for _ in range(300)))
    bench.register()
    taken = bench.call(claims.claim, [each.id for each in records], worker_id="w1", now=NOW)
    bench.finish([success(job, completion_tokens=1) for job in taken], now=NOW + 1)
    assert counted(bench) == {(Count.ATTEMPTS, Outcome.SUCCEEDED): 300}
    assert {held(job).fence for job in taken} == {1}
