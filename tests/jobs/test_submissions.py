"""Calls accepted in one transaction: each by itself, as if it had come alone."""

from jobs import store, submissions, tenants
from jobs.quotas import QuotaExceeded
from jobs.submissions import IdempotencyConflict, Submission, Submitted
from jobs.tenants import Quotas
from tests.jobs.conftest import NOW, new_job

HASH, OTHER_HASH = b"\1" * 32, b"\2" * 32


def together(bench, *given: Submission) -> list:
    with bench.database.begin() as connection:
        return submissions.submit_together(connection, given, now=bench.now)


def ids(bench, tenant: str) -> set[str]:
    with bench.database.read() as connection:
        return {each.id for each in store.list_jobs(connection, tenant=tenant, limit=1000)}


def call(tenant: str, *jobs, **values) -> Submission:
    return Submission(tenant=tenant, new_jobs=jobs, **values)


def test_each_is_accepted_or_refused_by_itself(bench):
    bench.call(tenants.create, "acme", Quotas(max_queued_jobs=3), now=NOW)
    bench.call(tenants.create, "globex", Quotas(tokens_per_minute=10), now=NOW)
    used = new_job()
    bench.submit(used, tenant="acme", key="used", body_sha256=HASH)
    calls = [
        call("globex", new_job(max_tokens=7)),
        call("acme", new_job()),
        call("acme", new_job(), new_job()),  # one too many
        call("globex", new_job(max_tokens=7), key="k", body_sha256=HASH),  # too many tokens
        call("acme", new_job(), key="used", body_sha256=HASH),
        call("acme", new_job(), key="used too", body_sha256=HASH),
        call("globex", new_job(max_tokens=3)),
        call("initech", new_job(), new_job()),  # without quotas
    ]
    outcomes = together(bench, *calls)
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [
        Submitted, Submitted, QuotaExceeded, QuotaExceeded, Submitted, Submitted, Submitted,
        Submitted,
    ]  # fmt: skip
    assert outcomes[4].replayed
    assert [each.id for each in outcomes[4].records] == [used.id]
    accepted = [record for i in (0, 1, 5, 6, 7) for record in outcomes[i].records]
    assert [each.id for each in accepted] == [
        job.id for i in (0, 1, 5, 6, 7) for job in calls[i].new_jobs
    ]
    assert sorted(accepted, key=lambda each: each.created_at) == accepted
    assert ids(bench, "acme") == {used.id, calls[1].new_jobs[0].id, calls[5].new_jobs[0].id}
    assert ids(bench, "globex") == {calls[0].new_jobs[0].id, calls[6].new_jobs[0].id}
    assert len(ids(bench, "initech")) == 2


def test_a_key_whose_call_was_refused_is_free(bench):
    bench.call(tenants.create, "acme", Quotas(max_queued_jobs=0), now=NOW)
    [refused] = together(bench, call("acme", new_job(), key="k", body_sha256=HASH))
    assert isinstance(refused, QuotaExceeded)
    bench.call(tenants.change, "acme", {"max_queued_jobs": None})
    [accepted] = together(bench, call("acme", new_job(), key="k", body_sha256=OTHER_HASH))
    assert not accepted.replayed


def test_a_key_of_another_body_is_that_calls_conflict_alone(bench):
    bench.submit(new_job(), key="k", body_sha256=HASH)
    conflict, accepted = together(
        bench,
        call("default", new_job(), key="k", body_sha256=OTHER_HASH),
        call("default", new_job(), key="l", body_sha256=HASH),
    )
    assert isinstance(conflict, IdempotencyConflict)
    assert ids(bench, "default") >= {accepted.records[0].id}
    assert len(ids(bench, "default")) == 2
