"""What a call costs the database, in statements: the same for one job and for a thousand."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, event

from tests.api.conftest import completion, submit

MOST_FOR_A_FORECAST = 7  # begin, clock, the page; live workers, ended lately, running, the queue
MOST_FOR_A_ROW = 3  # begin, clock, the row
MOST_FOR_ITS_ATTEMPTS = 1  # in the reply


@contextlib.contextmanager
def counted():
    """The statements of the API's calls, not those of its background threads."""
    statements: list[str] = []

    def note(connection, cursor, statement, parameters, context, executemany):
        if threading.current_thread().name.startswith("api-the database"):
            statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture
def many(client, monkeypatch):
    """A queue of 600 jobs."""
    monkeypatch.setattr("api.waiters.REREAD_S", 3600.0)  # one statement a second, whoever waits
    reply = client.post("/v1/jobs", json=[completion()] * 600)
    return [job["id"] for job in reply.json()["data"]]


def test_a_page_of_a_thousand_costs_as_many_statements_as_a_page_of_one(client, hands, many):
    for limit in (1, 1000):
        time.sleep(1.1)  # past what a forecast is kept for
        with counted() as statements:
            page = client.get(f"/v1/jobs?limit={limit}").json()["data"]
        assert len(page) == min(limit, len(many))
        assert all(job["queue_position"] for job in page)
        assert 3 <= len(statements) <= MOST_FOR_A_FORECAST, statements


def test_jobs_that_joined_since_cost_no_statement_each(client, many):
    submit(client)
    with counted() as statements:
        page = client.get("/v1/jobs?limit=1000").json()["data"]
    assert [job["queue_position"] for job in page] == list(range(601, 0, -1))
    assert len(statements) <= MOST_FOR_A_FORECAST


def test_who_waits_reads_one_row_and_makes_a_forecast_for_the_reply_alone(client, many):
    num_waiting = 40
    with ThreadPoolExecutor(num_waiting) as threads, counted() as statements:
        replies = list(
            threads.map(lambda job_id: client.get(f"/v1/jobs/{job_id}?wait=1"), many[:num_waiting])
        )
    assert all(reply.json()["queue_position"] for reply in replies)
    queue_read = [s for s in statements if "LIMIT" in s]
    # at most one forecast for each of the few moments at which they all answer
    assert len(queue_read) <= 4 * 3, len(queue_read)
    assert len(statements) <= (
        num_waiting * (2 * MOST_FOR_A_ROW + MOST_FOR_ITS_ATTEMPTS) + 4 * MOST_FOR_A_FORECAST
    )


def test_a_list_does_not_read_what_it_does_not_show(client, many):
    with counted() as statements:
        client.get("/v1/jobs?limit=1000")
    [page] = [s for s in statements if "jobs.custom_id" in s]
    assert "jobs.body" not in page
    assert "jobs.output" in page
