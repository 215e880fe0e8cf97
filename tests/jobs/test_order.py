"""Whose turn it is: priority, then the tenant with the least, then deadline and age; and no job
waits for ever."""

import random

import pytest

from jobs import order, sweep
from jobs.tenants import Quotas, create
from tests.jobs.conftest import MODEL, new_job


def submit(bench, tenant, *new_jobs):
    """Ids; each call a second after the one before."""
    bench.now += 1
    return [record.id for record in bench.submit(*new_jobs, tenant=tenant)]


def next_ids(bench, limit, num_before=0):
    return bench.call(sweep.publishable, MODEL, limit=limit, now=bench.now, num_before=num_before)


def test_a_tenant_with_one_job_does_not_wait_behind_another_s_thousand(bench):
    many = submit(bench, "big", *(new_job() for _ in range(1000)))
    [one] = submit(bench, "small", new_job())
    assert next_ids(bench, 4) == [many[0], one, *many[1:3]]


def test_what_runs_and_what_is_on_the_runway_counts(bench):
    busy = submit(bench, "busy", *(new_job() for _ in range(9)))
    bench.register()
    bench.claim(*next_ids(bench, 2))
    assert next_ids(bench, 2) == busy[2:4]  # two run, two wait on the runway
    idle = submit(bench, "idle", *(new_job() for _ in range(6)))
    assert next_ids(bench, 6) == [*idle[:4], busy[4], idle[4]]


def test_priority_is_before_tenants_and_deadlines_are_a_tenant_s_own(bench):
    plain, hurried = submit(bench, "a", new_job(), new_job(deadline_s=60))
    [high] = submit(bench, "a", new_job(priority=1))
    [other] = submit(bench, "b", new_job())
    assert next_ids(bench, 9) == [high, other, hurried, plain]


def test_each_eighth_place_is_the_oldest_s_over_many_refills_of_one_as_in_one(bench):
    low = submit(bench, "a", *(new_job(priority=-10) for _ in range(3)))
    high = submit(bench, "a", *(new_job(priority=10) for _ in range(60)))
    first = next_ids(bench, 16)
    assert first == [*high[:7], low[0], *high[7:14], low[1]]
    for number in range(16, 23):
        assert next_ids(bench, 1, number) == [high[number - 2]]
    assert next_ids(bench, 1, 23) == [low[2]]


def test_a_job_waits_for_eight_for_each_older_one_and_no_longer(bench):
    """However many come with a higher priority while it waits."""
    older = submit(bench, "a", *(new_job(priority=-5) for _ in range(4)))
    [mine] = submit(bench, "b", new_job(priority=-10))
    num_before = 0
    published: list[str] = []
    while mine not in published:
        submit(bench, "c", *(new_job(priority=10) for _ in range(5)))
        published += next_ids(bench, 5, num_before)
        num_before = len(published)
    assert len(published) <= order.EIGHTH * (len(older) + 1) + 5


def test_a_tenant_at_its_limit_rests_the_oldest_of_its_jobs_too(bench):
    bench.call(create, "limited", Quotas(max_running_jobs=1), now=bench.now)
    mine = submit(bench, "limited", new_job(), new_job())
    others = submit(bench, "free", *(new_job() for _ in range(8)))
    bench.register()
    bench.claim(next_ids(bench, 1)[0])
    assert next_ids(bench, 8) == others
    assert mine[1] not in others


@pytest.mark.parametrize("run", range(4))
def test_any_queue_gives_the_order_that_the_rule_says(bench, run):
    draw = random.Random(run)
    rows, tenants = {}, ["a", "b", "c"]
    for _ in range(60):
        tenant, priority = draw.choice(tenants), draw.choice([0, 0, 1])
        deadline_s = draw.choice([None, None, draw.uniform(1e3, 1e6)])
        [job_id] = submit(bench, tenant, new_job(priority=priority, deadline_s=deadline_s))
        due_at = 1e15 if deadline_s is None else bench.now + deadline_s
        rows[job_id] = (tenant, (-priority, due_at, bench.now, job_id))
    ahead, expected, waiting = dict.fromkeys(tenants, 0), [], dict(rows)
    for place in range(len(rows)):
        if place % 8 == 7:
            chosen = min(waiting, key=lambda job_id: waiting[job_id][1][2])
        else:
            heads = [
                min(job_id for job_id in waiting if waiting[job_id][1] == best)
                for tenant in tenants
                if (best := min((key for t, key in waiting.values() if t == tenant), default=None))
            ]
            chosen = min(
                heads,
                key=lambda job_id: (
                    waiting[job_id][1][0], ahead[waiting[job_id][0]], waiting[job_id][1],
                ),
            )  # fmt: skip
        expected.append(chosen)
        ahead[waiting.pop(chosen)[0]] += 1
    published: list[str] = []
    while len(published) < len(rows):
        published += next_ids(bench, draw.randint(1, 20), len(published))
    assert published == expected


def test_more_tenants_than_are_compared_are_served_by_age(bench, monkeypatch):
    monkeypatch.setattr(order, "MOST_TENANTS", 2)
    ids = [submit(bench, f"t{number}", *(new_job() for _ in range(8)))[0] for number in range(4)]
    published: list[str] = []
    while len(published) < 32:
        more = next_ids(bench, 8, len(published))
        assert len(more) == 8
        published += more
    assert set(ids) < set(published)
