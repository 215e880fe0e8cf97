"""The sweeper against real databases and a real Redis, one of them away at times."""

import threading

import pytest

from cli.servers import Valkey
from jobs import claims, store
from jobs.celery_app import make_app
from jobs.database import Database
from jobs.events import Channel, Subscription
from jobs.lifecycle import JobState
from jobs.records import JobRecord, NewJob, WorkerInfo
from jobs.runway import Lane, Runway
from jobs.settings import ModelEntry, Settings
from jobs.tenants import DEFAULT_TENANT
from worker.sweeper import Sweeper, run

TIMEOUT_S = 30.0
LANE = Lane("tiny", background=False)


class Bench:
    """A sweeper turned by hand, and the rows it looks after."""

    def __init__(self, database_url: str, redis_url: str) -> None:
        self.settings = Settings(
            database_url=database_url,
            redis_url=redis_url,
            models=(ModelEntry(name="tiny", path="tiny"),),
            runway=4,
        )
        self.database = Database(database_url)
        self.sweeper = Sweeper(self.settings)
        self.runway = Runway(self.settings, make_app(self.settings))

    def submit(self, num_jobs: int = 1, **values) -> list[str]:
        body = {"model": "tiny", "prompt": "x"}
        usual = {"url": "/v1/completions", "model": "tiny", "body": body}
        jobs = [NewJob(**usual | values) for _ in range(num_jobs)]
        with self.database.begin() as connection:
            store.submit(
                connection, jobs, tenant=DEFAULT_TENANT, now=self.database.clock(connection)
            )
        return [job.id for job in jobs]

    def claim(self, job_id: str, *, lease_s: float) -> None:
        info = WorkerInfo(
            id="w1", hostname="here", pid=7, model="tiny",
            max_num_seqs=8, kv_tokens=4096, max_model_len=512,
        )  # fmt: skip
        with self.database.begin() as connection:
            now = self.database.clock(connection)
            claims.register_worker(connection, info, now=now, lease_s=lease_s)
            assert claims.claim(connection, [job_id], worker_id="w1", now=now)

    def get(self, job_id: str) -> JobRecord:
        with self.database.read() as connection:
            record = store.get(connection, job_id, tenant=DEFAULT_TENANT)
        assert record is not None
        return record

    def close(self) -> None:
        self.sweeper.close()
        self.runway.close()
        self.database.dispose()


@pytest.fixture
def bench(database_url, valkey_url):
    bench = Bench(database_url, valkey_url)
    yield bench
    bench.close()


def test_a_silent_workers_job_goes_back_onto_the_runway_in_one_pass(bench):
    [job_id] = bench.submit()
    bench.claim(job_id, lease_s=-1)
    bench.sweeper.sweep()
    row = bench.get(job_id)
    assert (row.state, row.attempt) == (JobState.QUEUED, 1)
    assert bench.runway.lengths()[LANE] == 1


def test_a_living_workers_job_is_left_alone(bench):
    [job_id] = bench.submit()
    bench.claim(job_id, lease_s=30)
    bench.sweeper.sweep()
    assert bench.get(job_id).state == JobState.RUNNING


def test_the_runway_is_filled_to_its_bound(bench):
    bench.submit(10)
    for _ in range(3):
        bench.sweeper.sweep()
    assert bench.runway.lengths()[LANE] == 4


def test_what_it_ends_is_announced(bench):
    spent, late = [*bench.submit(max_attempts=1), *bench.submit(deadline_s=1e-6)]
    bench.claim(spent, lease_s=-1)
    heard = Subscription(bench.settings, Channel.ENDED)
    heard.wait(0.1)  # subscribes
    bench.sweeper.sweep()
    assert set(heard.wait(TIMEOUT_S)) == {spent, late}
    heard.close()
    assert bench.get(spent).error["code"] == "max_attempts"
    assert bench.get(late).state == JobState.EXPIRED


def test_a_job_of_a_lost_api_process_ends_once_others_could_have_extended_their_leases(
    bench, monkeypatch
):
    clock = [1000.0]
    monkeypatch.setattr("worker.sweeper.time.monotonic", lambda: clock[0])
    [job_id] = bench.submit(waiter_id="gone")
    heard = Subscription(bench.settings, Channel.CANCELLED)
    heard.wait(0.1)  # subscribes

    def after(seconds: float) -> JobState:
        clock[0] += seconds
        bench.sweeper.sweep()
        return bench.get(job_id).state

    steps = [0, 5, 5, 4.9, 6, 5, 5]  # too long a pause before the last three
    assert {after(seconds) for seconds in steps} == {JobState.QUEUED}
    assert after(5) == JobState.CANCELLED
    assert set(heard.wait(TIMEOUT_S)) == {job_id}
    heard.close()


def test_many_sweepers_do_the_work_of_one(bench):
    ids = bench.submit(8)
    bench.claim(ids[0], lease_s=-1)
    sweepers = [Sweeper(bench.settings) for _ in range(4)]
    threads = [threading.Thread(target=each.sweep) for each in sweepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in sweepers:
        each.close()
    assert bench.get(ids[0]).fence == 2  # the claim, and one rescue
    published = [job_id for job_id in ids if bench.get(job_id).published_at is not None]
    assert bench.runway.lengths()[LANE] == len(published)


def test_redis_away_is_logged_once_and_stops_no_rescue(sqlite_url, tmp_path, caplog):
    with Valkey(tmp_path / "valkey", persist=False) as server:
        bench = Bench(sqlite_url, server.url)
        server.kill()
        [job_id] = bench.submit()
        bench.claim(job_id, lease_s=-1)
        for _ in range(3):
            bench.sweeper.sweep()
        assert bench.get(job_id).state == JobState.QUEUED
        server.start()
        bench.submit()
        bench.sweeper.sweep()
        said = [each.getMessage() for each in caplog.records if each.name == "worker.sweeper"]
        assert [line.split()[:2] for line in said if line.startswith("redis")] == [
            ["redis", "away"],
            ["redis", "back"],
        ]
        assert bench.runway.lengths()[LANE] > 0
        bench.close()


def test_a_database_away_is_logged_once_and_ends_nothing(valkey_url, postgres_server, caplog):
    url = postgres_server.url.replace(f":{postgres_server.port}/", ":1/")
    with Sweeper(Settings(database_url=url, redis_url=valkey_url)) as sweeper:
        for _ in range(3):
            sweeper.sweep()
    said = [each.getMessage() for each in caplog.records if each.name == "worker.sweeper"]
    assert [line.split()[:2] for line in said] == [["database", "away"]]


def test_it_runs_until_told_to_stop(bench):
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(bench.settings, stop))
    thread.start()
    [job_id] = bench.submit()
    while bench.get(job_id).published_at is None:
        assert thread.is_alive()
    stop.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
