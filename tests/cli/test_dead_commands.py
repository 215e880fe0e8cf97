"""`tokenmill dead` and `tokenmill requeue`, against a database."""

import json

import pytest

from jobs.database import Database
from tests.jobs.conftest import Bench, new_job
from tests.jobs.test_dead import fail


@pytest.fixture
def bench(sqlite_url):
    database = Database(sqlite_url)
    with database.read() as connection:
        now = database.clock(connection)
    yield Bench(database, now - 7200)  # jobs of two hours ago
    database.dispose()


def dead(run, *options):
    return [json.loads(line) for line in run("dead", *options).stdout.splitlines()]


def test_failed_jobs_are_shown_and_queued_again_by_their_ids(run, bench):
    first, second = fail(bench, *bench.submit(new_job(), new_job()))
    newest, oldest = dead(run, "--json")
    assert (newest["id"], oldest["id"]) == (second, first)
    assert newest["error"] == "numerical_error"
    assert newest["attempts"] == "1/5"
    assert newest["reason"] == "numerical_error it was"
    assert "1 jobs queued again" in run("requeue", first).stdout
    assert [each["id"] for each in dead(run)] == [second]
    again = run("requeue", first, second, "job_none", status=1)
    assert "1 jobs queued again" in again.stdout
    assert f"{first} is left as it is: it has not failed: it is queued" in again.stderr
    assert "job_none is left as it is: there is no such job" in again.stderr
    assert dead(run) == []


def test_they_are_queued_again_by_what_they_died_of(run, bench):
    fail(bench, *bench.submit(new_job(), new_job(model="other")))
    assert len(dead(run, "--since", "1h")) == 0
    assert len(dead(run, "--since", "1d", "--error", "numerical_error")) == 2
    assert "0 jobs" in run("requeue", "--error", "poisoned").stdout
    assert "1 jobs" in run("requeue", "--error", "numerical_error", "--model", "other").stdout
    assert [each["model"] for each in dead(run)] == ["tiny"]


@pytest.mark.parametrize(
    "words",
    [
        ("requeue",),
        ("requeue", "job_1", "--model", "tiny"),
        ("requeue", "--error", "colour"),
        ("dead", "--since", "yesterday"),
        ("dead", "--limit", "0"),
    ],
)
def test_wrong_usage_is_refused(run, words):
    assert "Usage" in run(*words, status=2).stderr
