"""A real worker full of what nobody waits for: chunks of rows, and a job that overtakes them."""

import pytest

from jobs.lifecycle import JobState
from tests.worker.deployment import Deployment, completion

LONG = 4000  # tokens: seconds, on the quickest machine


@pytest.fixture
def start(sqlite_url, valkey_url, long_llama_dir, tmp_path):
    started = []

    def start(**settings: str) -> Deployment:
        extra = {f"TOKENMILL_{name.upper()}": value for name, value in settings.items()}
        started.append(
            Deployment(tmp_path / "background", sqlite_url, valkey_url, long_llama_dir, extra)
        )
        return started[-1]

    yield start
    for deployment in started:
        deployment.close()


def test_a_job_somebody_waits_for_overtakes_an_engine_full_of_rows(start):
    """Two seats, both taken for long, and more rows in the worker's hands: the job is begun at
    once, in a seat that one of them gives up, and every row goes on afterwards."""
    deployment = start(max_num_seqs="2")
    deployment.start_worker()
    rows = deployment.submit(*(completion(LONG, priority=-5) for _ in range(40)))
    deployment.running(rows[0])
    for _ in range(3):
        (waited_for,) = deployment.submit(completion(5))
        [row] = deployment.ended(waited_for)
        assert row.state == JobState.SUCCEEDED
    ended = [job_id for job_id in rows if deployment.get(job_id).ended]
    assert len(ended) <= 4, "the job waited for rows to end"
    for job_id in rows:
        deployment.cancel(job_id)


def test_every_row_of_many_chunks_is_run_once(start):
    deployment = start(max_num_seqs="8")
    deployment.start_worker()
    ids = deployment.submit(*(completion(3, prompt=f"{i}", priority=-5) for i in range(200)))
    rows = deployment.ended(*ids)
    assert {(row.state, row.attempt) for row in rows} == {(JobState.SUCCEEDED, 1)}
    assert deployment.unacknowledged() == 0


def test_rows_that_a_killed_worker_had_not_begun_lose_no_attempt(start):
    """Two seats, a chunk of rows, and its worker killed three times: few rows have been tried."""
    deployment = start(max_num_seqs="2", lease_s="5")
    rows = deployment.submit(*(completion(LONG, priority=-5, max_attempts=3) for _ in range(30)))
    for _ in range(3):
        worker = deployment.start_worker()
        deployment.wait_for(lambda: deployment.counts().get(JobState.RUNNING, 0) >= 2)
        assert deployment.counts()[JobState.RUNNING] <= 3, "more claimed than run, and one"
        worker.process.kill()
        worker.wait()
        deployment.wait_for(lambda: deployment.counts().get(JobState.RUNNING, 0) == 0)
    tried = [row.attempt for row in map(deployment.get, rows)]
    assert sum(tried) <= 9, tried
    assert tried.count(0) >= 21, tried
    for job_id in rows:
        deployment.cancel(job_id)
