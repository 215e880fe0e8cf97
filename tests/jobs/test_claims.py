"""What workers do: claim, finish, hand back, beat, always under a fence."""

import logging
import threading

import pytest

from jobs import claims, finishing, store, sweep
from jobs.claims import Held, UnknownWorker
from jobs.database import Database
from jobs.finishing import JobResult
from jobs.lifecycle import ErrorCode, JobState, error_object
from jobs.tenants import DEFAULT_TENANT
from tests.jobs.conftest import MODEL, NOW, Bench, held, new_job


def success(job, **values) -> JobResult:
    return JobResult(
        **{"id": job.id, "fence": job.fence, "state": JobState.SUCCEEDED, "output": {"text": "hi"}}
        | values
    )


def beat(bench, held_jobs, checkpoints=None, worker_id="w1", stats=None, first_tokens=None):
    """The ids that are lost; checkpoints by id."""
    beaten = bench.call(
        claims.beat, worker_id, now=bench.now, lease_s=30, stats=stats or {},
        checkpoints=of(held_jobs, checkpoints), first_tokens=first_tokens,
        held=[held(job) for job in held_jobs],
    )  # fmt: skip
    return {each.id for each in beaten.lost}


def release(bench, *claimed, crashed=False, max_crashes=3, checkpoints=None):
    """The states by id; checkpoints by id."""
    states = bench.call(
        claims.release, [held(job) for job in claimed], now=bench.now, crashed=crashed,
        max_crashes=max_crashes, checkpoints=of(claimed, checkpoints),
    )  # fmt: skip
    return {each.id: state for each, state in states.items()}


def of(claimed, checkpoints):
    checkpoints = checkpoints or {}
    return {held(job): checkpoints[job.id] for job in claimed if job.id in checkpoints}


def test_a_claim_takes_queued_jobs_and_nothing_else(bench):
    first, second, third = bench.submit(new_job(), new_job(), new_job())
    bench.register()
    bench.call(store.cancel, third.id, tenant=DEFAULT_TENANT, now=NOW)
    (claimed,) = bench.claim(first.id)
    assert (claimed.fence, claimed.attempt, claimed.body) == (1, 1, first.body)
    assert claimed.checkpoint is None
    again = bench.claim(first.id, second.id, second.id, third.id, "job_gone")
    assert [job.id for job in again] == [second.id]
    record = bench.get(first.id)
    assert (record.state, record.worker_id, record.started_at) == (JobState.RUNNING, "w1", NOW)


def test_a_job_past_its_deadline_is_not_claimed(bench):
    (record,) = bench.submit(new_job(deadline_s=10))
    bench.register()
    bench.now += 10
    assert bench.claim(record.id) == []


def test_of_many_workers_at_once_each_job_goes_to_one(bench):
    ids = [record.id for record in bench.submit(*(new_job() for _ in range(40)))]
    start, taken, errors = threading.Barrier(6), [], []

    def work(number: int):
        mine = ids[::-1] if number % 2 else ids
        start.wait()
        try:
            for chunk in (mine[i : i + 10] for i in range(0, 40, 10)):
                taken.extend(job.id for job in bench.claim(*chunk, worker_id=f"w{number}"))
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(taken) == sorted(ids)


def test_a_result_is_written_once_with_its_counts_and_times(bench):
    (record,) = bench.submit(new_job(prompt_tokens=31))
    bench.register()
    bench.now = NOW + 1
    (claimed,) = bench.claim(record.id)
    result = success(
        claimed, finish_reason="stop", prompt_tokens=31, cached_tokens=16, completion_tokens=5,
        wasted_tokens=2, first_token_at=NOW + 1.5,
    )  # fmt: skip
    assert bench.finish([result], now=NOW + 3.5) == {record.id}
    ended = bench.get(record.id)
    assert (ended.state, ended.output, ended.error) == (
        JobState.SUCCEEDED, {"text": "hi"}, None,
    )  # fmt: skip
    assert ended.timings == {"queue_s": 1.0, "ttft_s": 1.5, "tpot_s": 0.5, "total_s": 3.5}
    assert ended.usage == {
        "prompt_tokens": 31, "cached_tokens": 16, "completion_tokens": 5, "wasted_tokens": 2,
        "total_tokens": 36,
    }  # fmt: skip
    other = success(claimed, output={"text": "again"})
    assert bench.finish([other], now=NOW + 9) == set()
    assert bench.get(record.id) == ended


def test_a_stale_fence_writes_nothing(bench):
    (record,) = bench.submit(new_job())
    bench.register()
    (stale,) = bench.claim(record.id)
    release(bench, stale)
    (fresh,) = bench.claim(record.id, worker_id="w2")
    assert fresh.fence > stale.fence
    assert bench.finish([success(stale)], now=NOW) == set()
    assert release(bench, stale) == {}
    assert beat(bench, [stale], {stale.id: [[1]]}) == {stale.id}
    assert bench.get(record.id).worker_id == "w2"
    assert bench.finish([success(fresh)], now=NOW) == {record.id}


def test_results_of_an_old_and_a_new_claim_in_one_call_are_told_apart(bench):
    (record,) = bench.submit(new_job())
    bench.register()
    (old,) = bench.claim(record.id)
    release(bench, old)
    (new,) = bench.claim(record.id)
    results = [success(job, output={"fence": job.fence}) for job in (old, new)]
    results.append(success(new, output={"fence": "twice"}))
    assert bench.finish(results, now=NOW) == {record.id}
    assert bench.get(record.id).output == {"fence": new.fence}


def test_a_batch_of_claims_and_results_is_one_call(bench):
    ids = [record.id for record in bench.submit(*(new_job() for _ in range(600)))]
    bench.register()
    claimed = bench.claim(*ids)
    assert len(claimed) == 600
    results = [success(job, output={"of": job.id}) for job in claimed]
    assert bench.finish(results, now=NOW) == set(ids)
    assert bench.get(ids[321]).output == {"of": ids[321]}


@pytest.mark.parametrize("text", ["a\0b\0", "\ud800", "\\u0000", "😀\x01", '"\n'])
def test_any_text_a_model_makes_comes_back_unchanged(bench, text):
    (record,) = bench.submit(new_job())
    bench.register()
    (claimed,) = bench.claim(record.id)
    result = success(claimed, output={"text": text, text: [None, 1.5, True]})
    assert bench.finish([result], now=NOW) == {record.id}
    assert bench.get(record.id).output == {"text": text, text: [None, 1.5, True]}


def test_one_bad_result_does_not_sink_its_batch(bench, caplog):
    first, second, third = bench.submit(new_job(), new_job(), new_job())
    bench.register()
    claimed = {job.id: job for job in bench.claim(first.id, second.id, third.id)}
    results = [
        success(claimed[first.id]),
        success(claimed[second.id], output={"nan": float("nan")}, completion_tokens=7),
        # a plain text column takes no U+0000 on PostgreSQL and only half of it on SQLite
        success(claimed[third.id], finish_reason="se\0cret"),
    ]
    with caplog.at_level(logging.ERROR):
        assert bench.finish(results, now=NOW) == {first.id, second.id, third.id}
    assert bench.get(first.id).state == JobState.SUCCEEDED
    for job_id, num_tokens in ((second.id, 7), (third.id, 0)):
        failed = bench.get(job_id)
        assert (failed.state, failed.output) == (JobState.FAILED, None)
        assert failed.error["code"] == ErrorCode.UNSTORABLE
        assert failed.finish_reason == "error"
        assert failed.usage["wasted_tokens"] == num_tokens
    assert "cret" not in caplog.text


def test_handing_back_keeps_the_checkpoint_and_gives_the_attempt_back(bench):
    (record,) = bench.submit(new_job())
    bench.register()
    (claimed,) = bench.claim(record.id)
    assert beat(bench, [claimed], {record.id: [[5, 6], [7]]}) == set()
    assert release(bench, claimed) == {record.id: JobState.QUEUED}
    waiting = bench.get(record.id)
    assert (waiting.state, waiting.attempt, waiting.fence) == (JobState.QUEUED, 0, 2)
    assert (waiting.worker_id, waiting.published_at, waiting.started_at) == (None, None, None)
    (again,) = bench.claim(record.id)
    assert (again.checkpoint, again.attempt, again.fence) == ([[5, 6], [7]], 1, 3)


def test_a_checkpoint_given_on_hand_back_replaces_the_last_beats(bench):
    (record,) = bench.submit(new_job())
    bench.register()
    (claimed,) = bench.claim(record.id)
    beat(bench, [claimed], {record.id: [[5]]})
    release(bench, claimed, checkpoints={record.id: [[5, 6]]})
    assert bench.claim(record.id)[0].checkpoint == [[5, 6]]


def test_a_job_that_crashes_too_often_is_poisoned_and_its_neighbour_is_not(bench):
    poison, neighbour = bench.submit(new_job(), new_job())
    bench.register()
    for crash in (1, 2, 3):
        claimed = bench.claim(poison.id, *([neighbour.id] if crash == 1 else []))
        states = release(bench, *claimed, crashed=True)
        assert states[poison.id] == (JobState.FAILED if crash == 3 else JobState.QUEUED)
        assert bench.get(poison.id).crash_count == crash
        bench.now += 10  # past its wait
    failed = bench.get(poison.id)
    assert failed.error["code"] == ErrorCode.POISONED
    assert (failed.started_at, failed.finished_at) == (NOW + 20, NOW + 20)
    assert failed.finish_reason == "error"
    back = bench.get(neighbour.id)
    assert (back.state, back.started_at, back.finish_reason) == (JobState.QUEUED, None, None)
    assert bench.claim(poison.id) == []


def test_a_crash_in_the_last_attempt_fails_the_job(bench):
    (record,) = bench.submit(new_job(max_attempts=1))
    bench.register()
    assert release(bench, *bench.claim(record.id), crashed=True) == {record.id: JobState.FAILED}
    failed = bench.get(record.id)
    assert failed.error["code"] == ErrorCode.MAX_ATTEMPTS
    assert (failed.started_at, failed.finish_reason) == (NOW, "error")


def test_a_beat_extends_the_lease_and_tells_what_is_lost(bench):
    kept, cancelled, ended = bench.submit(new_job(), new_job(), new_job())
    bench.register(lease_s=30)
    jobs = {job.id: job for job in bench.claim(kept.id, cancelled.id, ended.id)}
    bench.call(store.cancel, cancelled.id, tenant=DEFAULT_TENANT, now=NOW)
    bench.finish([success(jobs[ended.id])], now=NOW)
    bench.now += 20
    checkpoints = {kept.id: [[1, 2]], cancelled.id: [[3]]}
    lost = beat(bench, jobs.values(), checkpoints, stats={"num_running": 3})
    assert lost == {cancelled.id, ended.id}
    with bench.database.read() as connection:
        (worker,) = store.live_workers(connection, NOW + 49)
    assert (worker.lease_until, worker.seen_at, worker.stats) == (
        NOW + 50, NOW + 20, {"num_running": 3},
    )  # fmt: skip


def test_two_attempts_of_one_job_in_one_call_are_told_apart(bench):
    """A worker that slept past its lease may claim anew what it still believes to hold."""
    (record,) = bench.submit(new_job())
    bench.register(lease_s=10)
    (old,) = bench.claim(record.id)
    bench.now += 11
    bench.call(sweep.reap, bench.now)
    bench.register(lease_s=10)
    (new,) = bench.claim(record.id)
    checkpoints = {held(old): [[1, 1, 1]], held(new): [[2]]}
    beaten = bench.call(
        claims.beat, "w1", now=bench.now, lease_s=30, stats={}, held=[held(old), held(new)],
        checkpoints=checkpoints,
    )  # fmt: skip
    assert (beaten.lost, beaten.stored) == ({held(old)}, {held(new)})
    states = bench.call(
        claims.release, [held(old), held(new)], now=bench.now, crashed=False, max_crashes=3
    )
    assert states == {held(new): JobState.QUEUED}
    (newest,) = bench.claim(record.id)
    assert newest.checkpoint == [[2]]
    results = [success(old), success(newest)]
    assert bench.call(finishing.finish, results, now=bench.now) == {held(newest)}
    both = [held(old), held(newest)]
    assert bench.call(finishing.ended_under, both) == {held(newest)}


def test_what_a_worker_cannot_claim_is_published_anew(bench):
    first, second = bench.submit(new_job(), new_job())
    bench.register(lease_s=10)
    assert bench.call(claims.lease_stands, "w1", now=bench.now + 9)
    assert not bench.call(claims.lease_stands, "w1", now=bench.now + 10)
    assert not bench.call(claims.lease_stands, "w2", now=bench.now)
    bench.call(sweep.publishable, MODEL, limit=9, now=bench.now)
    bench.claim(second.id)
    bench.call(claims.put_back, [first.id, second.id])
    assert bench.call(sweep.publishable, MODEL, limit=9, now=bench.now) == [first.id]


def test_a_beat_of_a_worker_without_a_row_changes_nothing(bench):
    (record,) = bench.submit(new_job())
    (claimed,) = bench.claim(record.id)
    with pytest.raises(UnknownWorker, match="w1"):
        beat(bench, [claimed], {record.id: [[1]]})
    bench.register()
    assert beat(bench, [claimed]) == set()


def test_the_first_token_is_the_earliest_anyone_saw(bench):
    on_time, resumed, silent = bench.submit(new_job(), new_job(), new_job())
    bench.register()
    jobs = {job.id: job for job in bench.claim(on_time.id, resumed.id, silent.id)}
    bench.now += 5
    both = [jobs[on_time.id], jobs[resumed.id]]
    beat(bench, both, first_tokens={held(job): NOW + 4 for job in both})
    # a later one of the same attempts, and a checkpoint alone, change nothing
    beat(bench, both, {on_time.id: [[1]]}, first_tokens={held(jobs[resumed.id]): NOW + 5})
    results = [
        success(jobs[on_time.id], first_token_at=NOW + 2),  # the engine's own time
        success(jobs[resumed.id], first_token_at=NOW + 9),  # of a second attempt
        success(jobs[silent.id]),
    ]
    bench.finish(results, now=NOW + 10)
    assert bench.get(on_time.id).first_token_at == NOW + 2
    assert bench.get(resumed.id).first_token_at == NOW + 4
    assert bench.get(silent.id).first_token_at is None


def test_a_job_that_came_whole_in_a_message_is_inserted_once(bench):
    bench.register()
    job = new_job(id="job_0123456789abcdef")
    bench.call(store.insert_new, [job, job, new_job()], now=NOW)
    (claimed,) = bench.claim(job.id)
    bench.call(store.insert_new, [job], now=NOW)
    bench.call(store.insert_new, [], now=NOW)
    assert bench.get(job.id).fence == claimed.fence
    assert bench.claim(job.id) == []
    with bench.database.read() as connection:
        assert len(store.list_jobs(connection, tenant=DEFAULT_TENANT, limit=10)) == 2


def test_a_job_in_a_message_that_no_row_can_hold_is_left_out(bench, caplog):
    good, bad = new_job(), new_job(body={"temperature": float("inf")})
    bench.call(store.insert_new, [bad, good], now=NOW)
    assert [job.id for job in bench.claim(bad.id, good.id)] == [good.id]
    assert bad.id in caplog.text
    assert good.id not in caplog.text


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**200])
def test_a_whole_job_with_a_number_no_database_takes_is_left_out_alone(bench, number, caplog):
    bench.register()
    bad, good = new_job(prompt_tokens=number), new_job()
    bench.call(store.insert_new, [bad, good], now=NOW)
    assert [job.id for job in bench.claim(bad.id, good.id)] == [good.id]
    assert bad.id in caplog.text


def test_a_beat_does_not_wait_for_a_result_being_written(postgres_url):
    """The two come from two threads of one worker, with the same rows in any order."""
    bench = Bench(Database(postgres_url))
    first, second = bench.submit(new_job(), new_job())
    bench.register()
    jobs = {job.id: job for job in bench.claim(first.id, second.id)}
    with bench.database.begin() as connection:
        finishing.finish(connection, [success(jobs[first.id])], now=NOW)
        checkpoints = {first.id: [[1]], second.id: [[2]]}
        assert beat(bench, jobs.values(), checkpoints) == set()
    assert bench.get(first.id).state == JobState.SUCCEEDED
    release(bench, jobs[second.id])
    assert bench.claim(second.id)[0].checkpoint == [[2]]
    bench.database.dispose()


def test_a_beat_says_whose_tokens_it_could_not_store(postgres_url):
    """A row that a cancel has locked is passed over, and is still ours until that has committed."""
    bench = Bench(Database(postgres_url))
    first, second = bench.submit(new_job(), new_job())
    bench.register()
    jobs = {job.id: job for job in bench.claim(first.id, second.id)}
    checkpoints = {held(jobs[first.id]): [[1]], held(jobs[second.id]): [[2]]}
    common = {"now": bench.now, "lease_s": 30, "stats": {}, "held": list(checkpoints)}
    with bench.database.begin() as connection:
        store.cancel(connection, first.id, tenant=DEFAULT_TENANT, now=NOW)
        beaten = bench.call(claims.beat, "w1", checkpoints=checkpoints, **common)
    assert (beaten.lost, beaten.stored) == (set(), {held(jobs[second.id])})
    beaten = bench.call(claims.beat, "w1", checkpoints=checkpoints, **common)
    assert beaten.lost == {held(jobs[first.id])}
    bench.database.dispose()


def test_a_hand_back_waits_for_a_beat_and_keeps_all_its_tokens(postgres_url):
    bench = Bench(Database(postgres_url))
    (record,) = bench.submit(new_job())
    bench.register()
    (job,) = bench.claim(record.id)
    done = threading.Event()

    def hand_back() -> None:
        release(bench, job, checkpoints={record.id: [[1, 2, 3]]})
        done.set()

    handing_back = threading.Thread(target=hand_back)
    with bench.database.begin() as connection:
        claims.beat(
            connection, "w1", now=NOW, lease_s=30, stats={}, held=[held(job)],
            checkpoints={held(job): [[1]]},
        )  # fmt: skip
        handing_back.start()
        assert not done.wait(0.3)
    handing_back.join(30)
    assert bench.claim(record.id)[0].checkpoint == [[1, 2, 3]]
    bench.database.dispose()


def test_a_commit_in_doubt_can_be_read_back(bench):
    first, second = bench.submit(new_job(), new_job())
    bench.register()
    mine, theirs = bench.claim(first.id)[0], bench.claim(second.id, worker_id="w2")[0]
    both = [first.id, second.id]
    assert bench.call(claims.claimed_by, both, worker_id="w1") == [mine]
    assert bench.call(claims.claimed_by, [], worker_id="w1") == []
    bench.finish([success(mine)], now=NOW)
    bench.call(store.cancel, second.id, tenant=DEFAULT_TENANT, now=NOW)
    assert bench.call(finishing.ended_under, [held(mine), held(theirs)]) == {held(mine)}
    assert bench.call(finishing.ended_under, [Held(first.id, mine.fence + 1)]) == set()


def test_registering_again_opens_the_same_lease(bench):
    bench.register(lease_s=10)
    bench.now += 60
    with bench.database.read() as connection:
        assert store.live_workers(connection, bench.now) == []
    bench.register(lease_s=10)
    with bench.database.read() as connection:
        (worker,) = store.live_workers(connection, bench.now)
    assert (worker.started_at, worker.lease_until) == (NOW, bench.now + 10)
    bench.call(claims.unregister_worker, "w1", now=bench.now)
    with bench.database.read() as connection:
        assert store.live_workers(connection, bench.now) == []


@pytest.mark.parametrize(
    "values",
    [
        {"state": JobState.QUEUED, "error": None},
        {"state": JobState.FAILED, "error": None},
        {"state": JobState.SUCCEEDED, "error": error_object(ErrorCode.ENGINE_ERROR, "no")},
    ],
)
def test_a_result_must_be_an_ending_with_its_reason(values):
    with pytest.raises(AssertionError):
        JobResult(id="job_1", fence=1, **values)
