"""Queue positions and the interval in which a job is said to end."""

import random
import statistics
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from jobs import places, sweep
from jobs.finishing import JobResult
from jobs.forecast import Forecast, Run, backlogs, forecast, measure
from jobs.lifecycle import JobState
from jobs.records import JobRecord
from tests.jobs.conftest import MODEL, new_job


@dataclass
class Simulated:
    max_tokens: int
    tokens: float  # it will use
    left: float
    created: float = 0.0
    start: float | None = None
    end: float | None = None


def simulate(seed: int, *, slots: int, step_s: float = 0.05):
    """An engine of `slots` sequences whose tokens/s flatten out with the load; yields each step."""
    draw = random.Random(seed)
    jobs: list[Simulated] = []
    queue: list[Simulated] = []
    running: list[Simulated] = []
    now = 0.0
    while now < 200:
        for _ in range(draw.choice((0, 0, 0, 1)) if now < 120 else 0):
            max_tokens = draw.randint(16, 128)
            tokens = max(1.0, max_tokens * draw.uniform(0.3, 1.0))
            job = Simulated(max_tokens, tokens, tokens, created=now)
            jobs.append(job)
            queue.append(job)
        while queue and len(running) < slots:
            running.append(queue.pop(0))
            running[-1].start = now
        rate = 300.0 / (len(running) + 4)  # tokens/s of each sequence
        for job in list(running):
            job.left -= rate * step_s
            if job.left <= 0:
                job.end = now + step_s
                running.remove(job)
        now += step_s
        yield now, jobs, queue, running


def record(job: Simulated, state: JobState):
    return SimpleNamespace(
        id=f"{job.created:012.3f} {id(job)}",
        tenant_id="default",
        priority=0,
        deadline_at=None,
        created_at=job.created,
        started_at=job.start,
        max_tokens=job.max_tokens,
        state=state,
    )


@pytest.mark.parametrize("slots", [4, 16])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_most_jobs_end_within_the_interval_that_was_forecast(seed, slots):
    promises = []  # job, moment, low, high
    for index, (now, jobs, queue, running) in enumerate(simulate(seed, slots=slots)):
        if index % 100 or now < 10:
            continue
        recent = [
            Run(j.start, j.end, j.tokens, j.max_tokens)
            for j in jobs
            if j.end is not None and j.end > now - 300
        ]
        pace = measure(recent, [(j.start, j.max_tokens) for j in running], now)
        waiting = [places.place(record(job, JobState.QUEUED)) for job in queue]
        seen = Forecast(now, pace, places.Line(waiting))
        for job, state in [(j, JobState.QUEUED) for j in queue] + [
            (j, JobState.RUNNING) for j in running
        ]:
            eta_s = seen.eta_s(record(job, state), now)
            if eta_s is not None:
                promises.append((job, now, *eta_s))
    kept = [low <= job.end - now <= high for job, now, low, high in promises]
    assert len(kept) > 200
    share = statistics.fmean(kept)
    width = statistics.median((high - low) / (job.end - now) for job, now, low, high in promises)
    assert share > 0.8
    assert width < 2.5


def end(bench, job, *, run_s: float, completion_tokens: int):
    result = JobResult(
        id=job.id,
        fence=job.fence,
        state=JobState.SUCCEEDED,
        output={},
        completion_tokens=completion_tokens,
        started_at=bench.now,
        finished_at=bench.now + run_s,
    )
    bench.now += run_s
    assert bench.finish([result], now=bench.now) == {job.id}


def run_some(bench, number: int):
    for _ in range(number):
        (job,) = bench.submit(new_job(max_tokens=10))
        (claimed,) = bench.claim(job.id)
        end(bench, claimed, run_s=2.0, completion_tokens=5)


def test_positions_follow_priority_then_deadline_then_age(bench):
    ordinary, urgent, late = bench.submit(
        new_job(max_tokens=1), new_job(priority=3), new_job(deadline_s=60)
    )
    seen = bench.call(forecast, MODEL, bench.now)
    positions = {job.id: seen.position(job) for job in (urgent, late, ordinary)}
    assert list(positions.values()) == [1, 2, 3]


def test_a_job_far_back_has_no_position(bench, monkeypatch):
    monkeypatch.setattr(places, "MAX_POSITION", 3)
    records = bench.submit(*(new_job() for _ in range(5)))
    seen = bench.call(forecast, MODEL, bench.now)
    assert [seen.position(record) for record in records] == [1, 2, 3, None, None]


def test_a_running_job_has_no_position_and_is_not_ahead_of_anyone(bench):
    bench.register()
    first, second = bench.submit(new_job(), new_job())
    bench.claim(first.id)
    seen = bench.call(forecast, MODEL, bench.now)
    assert seen.position(first) is None
    assert seen.position(second) == 1


def test_a_job_that_started_since_has_no_position_any_more(bench):
    bench.register()
    (job,) = bench.submit(new_job())
    seen = bench.call(forecast, MODEL, bench.now)
    assert seen.position(job) == 1
    bench.claim(job.id)
    assert seen.position(bench.get(job.id)) is None


def test_jobs_that_joined_since_take_their_place(bench):
    first, last = bench.submit(new_job(), new_job(priority=-1))
    seen = bench.call(forecast, MODEL, bench.now)
    bench.now += 1
    later = bench.submit(new_job(), new_job(priority=9), new_job(priority=-1))
    joined = seen.with_jobs([*later, first])
    order = [later[1], first, later[0], last, later[2]]
    assert [joined.position(job) for job in order] == [1, 2, 3, 4, 5]
    assert joined.taken_at == seen.taken_at
    assert seen.position(later[0]) is None
    fresh = bench.call(forecast, MODEL, bench.now)
    assert [fresh.position(job) for job in order] == [1, 2, 3, 4, 5]


def drawn(bench, draw, num: int) -> list[JobRecord]:
    """Jobs of three tenants, of several priorities, some with a deadline."""
    made = []
    for _ in range(num):
        bench.now += 1
        job = new_job(
            priority=draw.choice([-1, 0, 0, 0, 1]),
            deadline_s=draw.choice([None, None, draw.uniform(1e3, 1e6)]),
        )
        made += bench.submit(job, tenant=draw.choice(["a", "a", "a", "b", "c"]))
    return made


def in_order(seen: Forecast, records) -> list[str]:
    found = {seen.position(record): record.id for record in records}
    assert sorted(found) == list(range(1, len(records) + 1))
    return [found[position] for position in sorted(found)]


@pytest.mark.parametrize("run", range(4))
def test_positions_are_the_order_in_which_jobs_come_onto_the_runway(bench, run):
    draw = random.Random(run)
    records = {record.id: record for record in drawn(bench, draw, 60)}
    bench.register(lease_s=1e6)
    first = bench.call(sweep.publishable, MODEL, limit=7, now=bench.now, background=False)
    bench.claim(*first[:3])
    for job_id in first[:3]:
        del records[job_id]
    positions = in_order(bench.call(forecast, MODEL, bench.now), records.values())
    # what is on the runway already, whatever comes now; eighths are counted from the front again
    assert set(positions[:4]) == set(first[3:])
    published: list[str] = []
    for background in (False, True):
        num_before = 0
        while taken := bench.call(
            sweep.publishable,
            MODEL,
            limit=1,
            now=bench.now,
            num_before=num_before,
            background=background,
        ):
            num_before += len(taken)
            published += taken
            left = records.keys() - {*published, *first}
            if not background and all(records[job_id].priority < 0 for job_id in left):
                break
    assert positions[4:] == published


@pytest.mark.parametrize("run", range(8))
def test_jobs_that_joined_since_have_their_tenant_s_turn(bench, run):
    draw = random.Random(run)
    records = drawn(bench, draw, 3)
    seen = bench.call(forecast, MODEL, bench.now)
    for _ in range(4):  # seven in all: there is no eighth place
        bench.now += 1
        records += bench.submit(new_job(priority=draw.choice([-1, -2])), tenant=draw.choice("abcd"))
    joined = in_order(seen.with_jobs(records), records)
    assert joined == in_order(bench.call(forecast, MODEL, bench.now), records)


def test_a_small_tenant_has_a_position_however_many_jobs_another_has(bench, monkeypatch):
    monkeypatch.setattr(places, "MAX_POSITION", 20)
    many = bench.submit(*(new_job() for _ in range(30)), tenant="big")
    bench.now += 1
    [one] = bench.submit(new_job(), tenant="small")
    seen = bench.call(forecast, MODEL, bench.now)
    assert seen.position(one) == 2
    assert [seen.position(job) for job in many[:19]] == [1, *range(3, 21)]
    assert seen.position(many[19]) is None


def test_no_forecast_without_a_live_worker_or_before_enough_jobs_ended(bench):
    bench.register(lease_s=1000)
    run_some(bench, 4)
    (queued,) = bench.submit(new_job(max_tokens=10))
    assert bench.call(forecast, MODEL, bench.now).eta_s(queued, bench.now) is None
    run_some(bench, 1)
    (queued,) = bench.submit(new_job(max_tokens=10))
    assert bench.call(forecast, MODEL, bench.now).eta_s(queued, bench.now) is not None
    bench.now += 2000  # the lease lapsed
    assert bench.call(forecast, MODEL, bench.now).eta_s(queued, bench.now) is None


def test_the_forecast_is_tokens_ahead_over_tokens_per_second(bench):
    bench.register(lease_s=1000)
    run_some(bench, 8)  # 5 of 10 tokens in 2 s each, one after the other: 2.5 tokens/s
    next_, last = bench.submit(new_job(max_tokens=10, priority=1), new_job(max_tokens=20))
    seen = bench.call(forecast, MODEL, bench.now)
    assert seen.eta_s(next_, bench.now) == pytest.approx((2.0, 2.0))
    assert seen.eta_s(last, bench.now) == pytest.approx(
        (6.0, 6.0)
    )  # 2 s of the other, 4 s of its own
    (claimed,) = bench.claim(next_.id)
    running = bench.get(claimed.id)
    assert seen.eta_s(running, bench.now + 0.5) == pytest.approx((1.5, 1.5))


def test_an_earlier_forecast_is_kept_for_as_long_as_its_queue_is_long(bench):
    bench.submit(*(new_job() for _ in range(100)))
    earlier = bench.call(forecast, MODEL, bench.now)
    assert bench.call(forecast, MODEL, bench.now + 0.09, earlier) is earlier
    assert bench.call(forecast, MODEL, bench.now + 0.11, earlier) is not earlier
    empty = bench.call(forecast, "other", bench.now)
    assert bench.call(forecast, "other", bench.now + 0.001, empty) is not empty


def test_a_pace_is_measured_again_after_a_second(bench):
    bench.register(lease_s=1000)
    run_some(bench, 5)
    earlier = bench.call(forecast, MODEL, bench.now)
    again = bench.call(forecast, MODEL, bench.now + 0.9, earlier)
    assert again.pace is earlier.pace
    assert bench.call(forecast, MODEL, bench.now + 1.1, again).pace is not earlier.pace


def test_a_backlog_is_the_queued_jobs_of_a_model(bench):
    bench.register()
    first, _, _ = bench.submit(
        new_job(prompt_tokens=3, max_tokens=10),
        new_job(prompt_tokens=4, max_tokens=20),
        new_job(prompt_tokens=5, max_tokens=40, model="other"),
    )
    bench.claim(first.id)
    found = bench.call(backlogs)
    assert (found[MODEL, 0].prompt_tokens, found[MODEL, 0].max_tokens) == (4, 20)
    assert found[MODEL, 0].oldest_created_at == pytest.approx(bench.now, abs=0.001)
    assert found["other", 0].max_tokens == 40
