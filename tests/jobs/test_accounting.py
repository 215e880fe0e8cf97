"""What is learnt of a job's tokens, whoever holds it and whatever has become of it."""

from jobs import claims, finishing, store
from jobs.accounting import Counted, Wasted, account_wasted, count_prompts
from jobs.finishing import JobResult
from jobs.lifecycle import ErrorCode, JobState
from jobs.tenants import DEFAULT_TENANT
from tests.jobs.conftest import NOW, held, new_job


def test_wasted_tokens_add_up_whatever_became_of_the_job(bench):
    (record,) = bench.submit(new_job())
    bench.register()
    bench.claim(record.id)
    bench.call(store.cancel, record.id, tenant=DEFAULT_TENANT, now=NOW)
    bench.call(
        account_wasted, [Wasted(i, n) for i, n in ((record.id, 5), (record.id, 3), ("x", 1))]
    )
    bench.call(account_wasted, [Wasted(record.id, 2)])
    bench.call(account_wasted, [])
    ended = bench.get(record.id)
    assert (ended.wasted_tokens, ended.first_token_at) == (10, None)


def test_waste_says_when_the_first_token_came_where_no_beat_has(bench):
    unseen, seen = bench.submit(new_job(), new_job())
    bench.register()
    claimed = {job.id: job for job in bench.claim(unseen.id, seen.id)}
    bench.call(
        claims.beat, "w1", now=NOW + 5, lease_s=30, stats={}, checkpoints={},
        first_tokens={held(claimed[seen.id]): NOW + 4}, held=[held(claimed[seen.id])],
    )  # fmt: skip
    for record in (unseen, seen):
        bench.call(store.cancel, record.id, tenant=DEFAULT_TENANT, now=NOW + 6)
        late = [Wasted(record.id, 1, NOW + 7), Wasted(record.id, 2, NOW + 3), Wasted(record.id, 4)]
        bench.call(account_wasted, late)
    assert bench.get(unseen.id).first_token_at == NOW + 3
    assert bench.get(seen.id).first_token_at == NOW + 4


def test_a_first_token_told_at_a_beat_leaves_an_earlier_checkpoint(bench):
    (record,) = bench.submit(new_job())
    bench.register()
    (claimed,) = bench.claim(record.id)
    each = held(claimed)
    common = {"now": NOW, "lease_s": 30, "stats": {}, "held": [each]}
    bench.call(claims.beat, "w1", checkpoints={each: [[7, 8]]}, **common)
    bench.call(claims.beat, "w1", checkpoints={}, first_tokens={each: NOW - 1}, **common)
    assert bench.get(record.id).first_token_at == NOW - 1
    bench.call(store.cancel, record.id, tenant=DEFAULT_TENANT, now=NOW)
    assert bench.get(record.id).wasted_tokens == 2


def test_handing_back_a_job_that_has_no_token_invents_no_first_one(bench):
    (record,) = bench.submit(new_job())
    bench.register()
    (claimed,) = bench.claim(record.id)
    each = held(claimed)
    bench.call(
        claims.release, [each], now=NOW + 9, crashed=False, max_crashes=3, checkpoints={each: []}
    )
    assert bench.get(record.id).first_token_at is None


def test_a_result_that_cannot_be_stored_keeps_its_counts_and_times(bench):
    (record,) = bench.submit(new_job())
    bench.register()
    (claimed,) = bench.claim(record.id)
    result = JobResult(
        id=claimed.id, fence=claimed.fence, state=JobState.SUCCEEDED, output={"x": float("nan")},
        prompt_tokens=31, completion_tokens=5, first_token_at=NOW + 2,
    )  # fmt: skip
    bench.call(finishing.finish, [result], now=NOW + 3)
    failed = bench.get(record.id)
    assert failed.error["code"] == ErrorCode.UNSTORABLE
    assert (failed.prompt_tokens, failed.wasted_tokens, failed.first_token_at) == (31, 5, NOW + 2)


def test_a_prompt_is_counted_once_whatever_became_of_the_job(bench):
    sent, cancelled, known = bench.submit(new_job(), new_job(), new_job(prompt_tokens=9))
    bench.call(store.cancel, cancelled.id, tenant=DEFAULT_TENANT, now=NOW)
    for prompt_tokens in (5, 6):
        counted = [Counted(record.id, prompt_tokens, 20) for record in (sent, cancelled, known)]
        bench.call(count_prompts, counted)
    bench.call(count_prompts, [])
    rows = [bench.get(record.id) for record in (sent, cancelled, known)]
    assert [(row.prompt_tokens, row.max_tokens) for row in rows] == [(5, 20), (5, 20), (9, 0)]
