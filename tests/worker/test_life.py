"""How a worker starts, stops, is killed and comes back, and what becomes of the jobs it holds."""

import contextlib
import os
import signal
import time
from dataclasses import replace

import psutil
import pytest
from sqlalchemy import text as sql

import migrations
from cli.servers import Postgres
from jobs.lifecycle import JobState
from jobs.records import new_job_id
from tests.worker.deployment import TIMEOUT_S, Deployment, completion

SOON_S = 20.0  # far below the grace time given where a stop must not wait for it
LATE_S = 3.0
LONG = 4000  # tokens: seconds, on the quickest machine; all its jobs fit the KV cache together


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def text(row) -> str:
    return row.output["choices"][0]["text"]


@pytest.fixture
def start(sqlite_url, valkey_url, long_llama_dir, tmp_path):
    """A deployment with settings of its own."""
    started = []

    def start(**settings: str) -> Deployment:
        extra = {f"TOKENMILL_{name.upper()}": value for name, value in settings.items()}
        folder = tmp_path / tmp_path.name
        started.append(Deployment(folder, sqlite_url, valkey_url, long_llama_dir, extra))
        return started[-1]

    yield start
    for deployment in started:
        deployment.close()


def test_a_drain_finishes_what_fits_and_hands_back_the_rest(start):
    deployment = start(drain_grace_s="10")
    worker = deployment.start_worker()
    short, long = deployment.submit(completion(300), completion(15_000))
    deployment.running(short)
    deployment.running(long)
    began = time.monotonic()
    assert worker.stop() == 0
    assert time.monotonic() - began < 10 + SOON_S
    assert deployment.get(short).state == JobState.SUCCEEDED
    row = deployment.get(long)
    # a hand-back in good order does not use up an attempt
    assert (row.state, row.attempt, row.crash_count) == (JobState.QUEUED, 0, 0)
    assert deployment.unacknowledged() == 0
    assert deployment.row_of(worker) is None


def test_a_job_handed_back_goes_on_in_the_middle_of_its_text(start):
    deployment = start(drain_grace_s="600")
    job = completion(LONG, body={"seed": 3, "temperature": 1.0})
    first = deployment.start_worker()
    [interrupted] = deployment.submit(job)
    deployment.running(interrupted)
    began = time.monotonic()
    for _ in range(2):
        first.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # two signals at once are one to the kernel
    assert first.wait() == 0
    assert time.monotonic() - began < SOON_S
    assert deployment.get(interrupted).state == JobState.QUEUED

    second = deployment.start_worker()
    [whole] = deployment.submit(replace(job, id=new_job_id()))
    resumed, uninterrupted = deployment.ended(interrupted, whole)
    for row in (resumed, uninterrupted):
        assert (row.state, row.attempt, row.completion_tokens) == (JobState.SUCCEEDED, 1, LONG)
    # the engine may be in the middle of a step when the job is handed back
    assert (resumed.wasted_tokens <= 20, uninterrupted.wasted_tokens) == (True, 0)
    assert text(resumed) == text(uninterrupted)
    # less than both texts: one went on where the first worker had stopped
    assert LONG < deployment.next_beat(second).stats["generated_tokens"] < 2 * LONG


@pytest.mark.parametrize(
    "signals", [[signal.SIGQUIT], [signal.SIGTERM, signal.SIGQUIT]], ids=["QUIT", "TERM QUIT"]
)
def test_a_cold_stop_hands_back_at_once(start, signals):
    deployment = start(drain_grace_s="600")
    worker = deployment.start_worker()
    [job_id] = deployment.submit(completion(15_000))
    deployment.running(job_id)
    engine_pid = deployment.engine_pid(worker)
    began = time.monotonic()
    for sig in signals:
        worker.process.send_signal(sig)
        time.sleep(0.5)
    worker.wait()
    assert time.monotonic() - began < SOON_S
    row = deployment.get(job_id)
    assert (row.state, row.attempt) == (JobState.QUEUED, 0)
    assert gone(engine_pid)
    assert deployment.row_of(worker) is None


def test_a_killed_worker_leaves_no_process_and_its_jobs_run_again(sqlite_deployment):
    worker = sqlite_deployment.start_worker()
    [job_id] = sqlite_deployment.submit(completion(LONG))
    sqlite_deployment.running(job_id)
    engine_pid = sqlite_deployment.engine_pid(worker)
    worker.process.kill()
    worker.wait()
    sqlite_deployment.wait_for(lambda: gone(engine_pid))
    sqlite_deployment.start_worker()
    [row] = sqlite_deployment.ended(job_id)
    assert (row.state, row.attempt, row.completion_tokens) == (JobState.SUCCEEDED, 2, LONG)


def test_a_worker_that_slept_past_its_lease_writes_nothing(sqlite_deployment):
    sleeper = sqlite_deployment.start_worker()
    [job_id] = sqlite_deployment.submit(completion(LONG, body={"seed": 1}))
    sqlite_deployment.running(job_id)
    os.kill(sleeper.pid, signal.SIGSTOP)
    sqlite_deployment.wait_for(lambda: sqlite_deployment.get(job_id).state == JobState.QUEUED)
    sqlite_deployment.start_worker()
    sqlite_deployment.wait_for(lambda: sqlite_deployment.get(job_id).state == JobState.RUNNING)
    os.kill(sleeper.pid, signal.SIGCONT)
    [row] = sqlite_deployment.ended(job_id)
    assert (row.state, row.attempt, row.completion_tokens) == (JobState.SUCCEEDED, 2, LONG)
    sqlite_deployment.wait_for(lambda: "dropped: not ours" in sleeper.log_text())
    assert sqlite_deployment.get(job_id) == row


def test_a_lone_worker_that_slept_past_its_lease_takes_its_jobs_up_again_once(start):
    deployment = start()
    worker = deployment.start_worker()
    ids = deployment.submit(*(completion(LONG, max_attempts=2) for _ in range(3)))
    for job_id in ids:
        deployment.running(job_id)
    os.kill(worker.pid, signal.SIGSTOP)
    deployment.wait_for(
        lambda: all(deployment.get(job_id).state == JobState.QUEUED for job_id in ids)
    )
    os.kill(worker.pid, signal.SIGCONT)
    rows = deployment.ended(*ids)
    assert [(row.state, row.attempt) for row in rows] == [(JobState.SUCCEEDED, 2)] * 3
    generated = deployment.next_beat(worker).stats["generated_tokens"]
    rows = [deployment.get(job_id) for job_id in ids]
    assert generated == sum(row.completion_tokens + row.wasted_tokens for row in rows)
    assert worker.log_text().count("succeeded: ") == 3


def test_a_step_that_is_longer_than_the_lease_costs_no_attempt(start):
    deployment = start(lease_s="1.5", beat_s="0.25")
    worker = deployment.start_worker()
    [job_id] = deployment.submit(completion(LONG, max_attempts=1))
    deployment.running(job_id)
    engine_pid = deployment.engine_pid(worker)
    os.kill(engine_pid, signal.SIGSTOP)
    time.sleep(4.5)  # three leases; the sweeper looks ten times a second
    assert deployment.get(job_id).state == JobState.RUNNING
    os.kill(engine_pid, signal.SIGCONT)
    [row] = deployment.ended(job_id)
    assert (row.state, row.attempt, row.wasted_tokens) == (JobState.SUCCEEDED, 1, 0)
    assert deployment.engine_pid(worker) == engine_pid


def test_an_engine_that_stops_stepping_is_replaced(start):
    deployment = start(stall_s="2")
    worker = deployment.start_worker()
    [job_id] = deployment.submit(completion(LONG))
    deployment.running(job_id)
    os.kill(deployment.engine_pid(worker), signal.SIGSTOP)
    [row] = deployment.ended(job_id)
    assert (row.state, row.attempt, row.crash_count) == (JobState.SUCCEEDED, 2, 1)
    assert worker.process.poll() is None


def test_a_job_that_the_engine_keeps_dying_with_is_given_up(sqlite_deployment):
    worker = sqlite_deployment.start_worker()
    [poison] = sqlite_deployment.submit(completion(15_000))
    for deaths in (1, 2, 3):  # between them it waits, and a beat may be of before that
        sqlite_deployment.wait_for(
            lambda deaths=deaths: (
                sqlite_deployment.get(poison).attempt == deaths
                and sqlite_deployment.get(poison).state == JobState.RUNNING
                and sqlite_deployment.row_of(worker).stats.get("jobs_running") == 1
            )
        )
        os.kill(sqlite_deployment.engine_pid(worker), signal.SIGKILL)
        sqlite_deployment.wait_for(
            lambda deaths=deaths: sqlite_deployment.get(poison).crash_count == deaths
        )
    row = sqlite_deployment.get(poison)
    assert (row.state, row.error["code"]) == (JobState.FAILED, "poisoned")
    assert row.wasted_tokens > 0
    [other] = sqlite_deployment.ended(*sqlite_deployment.submit(completion(5)))
    assert other.state == JobState.SUCCEEDED


def test_a_hint_brings_the_news_of_a_cancel_long_before_the_next_beat(start):
    deployment = start(lease_s="3600", beat_s="1200")
    worker = deployment.start_worker()
    [job_id] = deployment.submit(completion(15_000))
    deployment.wait_for(lambda: deployment.get(job_id).state == JobState.RUNNING)
    deployment.cancel(job_id)
    deployment.wait_for(lambda: f"job {job_id} attempt 1 dropped: not ours" in worker.log_text())
    assert deployment.get(job_id).output is None


def test_a_worker_can_be_run_by_a_call_with_fewer_seats(sqlite_deployment):
    call = (
        "import sys; from jobs.settings import Settings; from worker.main import run_worker; "
        "sys.exit(run_worker(Settings.from_env(), concurrency=3))"
    )
    worker = sqlite_deployment.start_worker(command=("-c", call))
    [row] = sqlite_deployment.ended(*sqlite_deployment.submit(completion(5)))
    assert row.state == JobState.SUCCEEDED
    assert sqlite_deployment.row_of(worker).max_num_seqs == 3
    assert worker.stop() == 0


def test_a_missing_model_ends_the_worker_with_a_word_and_a_code(sqlite_deployment):
    sqlite_deployment.env["TOKENMILL_MODELS"] = "tiny=/nowhere/at/all"
    worker = sqlite_deployment.start_worker(wait=False)
    assert worker.wait() == 78
    assert "/nowhere/at/all does not exist" in worker.log_text()
    assert "Traceback" not in worker.log_text()


def test_a_model_that_cannot_be_loaded_ends_the_worker_with_the_engines_word(
    sqlite_deployment, long_llama_dir
):
    (long_llama_dir / "model.safetensors").rename(long_llama_dir / "gone.safetensors")
    try:
        worker = sqlite_deployment.start_worker(wait=False)
        assert worker.wait() == 78
    finally:
        (long_llama_dir / "gone.safetensors").rename(long_llama_dir / "model.safetensors")
    assert "worker cannot start: model tiny: " in worker.log_text()
    assert "Traceback" not in worker.log_text()


def test_results_wait_for_a_database_that_is_away(valkey_url, long_llama_dir, tmp_path):
    with Postgres() as server:
        migrations.upgrade(server.url)
        deployment = Deployment(
            tmp_path / tmp_path.name,
            server.url,
            valkey_url,
            long_llama_dir,
            {"TOKENMILL_LEASE_S": "60"},  # that nothing but the wait decides
        )
        try:
            worker = deployment.start_worker()
            ids = deployment.submit(*(completion(600) for _ in range(8)))
            deployment.running(ids[0])
            server.kill()
            # by then results are on their way and find nobody
            wait_for(lambda: "database away" in worker.log_text())
            server.start()
            deployment.database.dispose()  # the test's own connections went with it
            for row in deployment.ended(*ids):
                assert (row.state, row.attempt) == (JobState.SUCCEEDED, 1), row.error
        finally:
            deployment.close()


@contextlib.contextmanager
def away(server, how):
    """Until the end of the block."""
    pids = [server.pid, *(each.pid for each in psutil.Process(server.pid).children())]
    if how == "dead":
        server.kill()
    else:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if how == "dead":
            server.start()
        else:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("how", ["dead", "frozen"])
def test_a_drain_ends_in_time_though_the_database_is_away(
    how, valkey_url, long_llama_dir, tmp_path
):
    grace_s = 1.0
    with Postgres() as server:
        migrations.upgrade(server.url)
        deployment = Deployment(
            tmp_path / tmp_path.name,
            server.url,
            valkey_url,
            long_llama_dir,
            {"TOKENMILL_DRAIN_GRACE_S": f"{grace_s:g}"},
        )
        try:
            worker = deployment.start_worker()
            [job_id] = deployment.submit(completion(15_000))
            deployment.running(job_id)
            with away(server, how):
                began = time.monotonic()
                assert worker.stop() == 0
                # not its two seconds alone: the machine may be busy
                assert time.monotonic() - began < grace_s + 2 + LATE_S
            deployment.database.dispose()  # the test's own connections may be dead
            # nobody could be told: it waits for the lease, and its attempt counts
            deployment.wait_for(lambda: deployment.get(job_id).state == JobState.QUEUED)
            assert deployment.get(job_id).attempt == 1
        finally:
            deployment.close()


def wait_for(condition) -> None:
    """Without asking the database, unlike the deployment's own."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("column", ["workers.max_model_len", "workers.stats"])
def test_a_worker_takes_no_job_on_tables_of_another_version(sqlite_deployment, column):
    [job_id] = sqlite_deployment.submit(completion(5))
    # published: the sweeper, which runs on in this test, has looked at the tables
    sqlite_deployment.wait_for(lambda: _published(sqlite_deployment, job_id))
    table, _, name = column.partition(".")
    with sqlite_deployment.database.begin() as connection:
        connection.execute(sql(f"ALTER TABLE {table} RENAME COLUMN {name} TO other"))
    worker = sqlite_deployment.start_worker(wait=False)
    assert worker.wait() == 78
    assert "run `tokenmill migrate`" in worker.log_text()
    assert "Traceback" not in worker.log_text()
    row = sqlite_deployment.get(job_id)
    assert (row.state, row.attempt) == (JobState.QUEUED, 0)


def _published(deployment: Deployment, job_id: str) -> bool:
    query = sql("SELECT published_at FROM jobs WHERE id = :id")
    with deployment.database.read() as connection:
        return connection.execute(query, {"id": job_id}).scalar_one() is not None


def test_a_worker_whose_engine_cannot_be_started_again_says_so_and_goes_on_when_it_can(
    sqlite_deployment, long_llama_dir
):
    worker = sqlite_deployment.start_worker()
    weights = long_llama_dir / "model.safetensors"
    weights.rename(long_llama_dir / "gone.safetensors")
    try:
        os.kill(sqlite_deployment.engine_pid(worker), signal.SIGKILL)
        sqlite_deployment.wait_for(
            lambda: sqlite_deployment.next_beat(worker).stats["engine_failing"] is True
        )
        [job_id] = sqlite_deployment.submit(completion(5))
    finally:
        (long_llama_dir / "gone.safetensors").rename(weights)
    [row] = sqlite_deployment.ended(job_id)
    assert (row.state, row.attempt) == (JobState.SUCCEEDED, 1)
    assert sqlite_deployment.next_beat(worker).stats["engine_failing"] is False
