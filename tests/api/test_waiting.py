"""A job that ends with its caller, when the caller's API process has ended first."""

import contextlib
import threading
import time

import httpx
import pytest
from sqlalchemy import select

from jobs.lifecycle import JobState
from jobs.models import api_processes, jobs
from tests.api.conftest import chat, process, submit, until
from tests.api.test_completions import newest
from worker.sweeper import Sweeper

LEASE_S = 2.0
CALLS = [
    ("/v1/chat/completions", {}, {}, True),
    ("/v1/chat/completions", {"stream": True}, {}, True),
    ("/v1/responses", {"store": False}, {}, True),
    ("/v1/chat/completions", {"store": True}, {}, False),
    ("/v1/chat/completions", {}, {"idempotency-key": "k"}, False),
    ("/v1/responses", {}, {}, False),
    ("/v1/responses", {"background": True}, {}, False),
]


def body_of(url: str) -> dict:
    if url == "/v1/responses":
        return {"model": "tiny", "input": "what is the capital?", "max_output_tokens": 4}
    return chat()["body"]


def leases(hands) -> set[str]:
    with hands.database.read() as connection:
        return set(connection.scalars(select(api_processes.c.id)))


def waiter_of(hands, job_id: str) -> str | None:
    with hands.database.read() as connection:
        return connection.scalar(select(jobs.c.waiter_id).where(jobs.c.id == job_id))


@contextlib.contextmanager
def sweeping(settings):
    stop = threading.Event()

    def work() -> None:
        with Sweeper(settings) as sweeper:
            while not stop.wait(0.1):
                sweeper.sweep()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


def test_a_killed_process_takes_its_callers_jobs_with_it(settings, hands, monkeypatch):
    monkeypatch.setenv("TOKENMILL_LEASE_S", str(LEASE_S))
    hasty = type(settings)(
        database_url=settings.database_url, redis_url=settings.redis_url, models=settings.models,
        lease_s=LEASE_S, beat_s=LEASE_S / 6,
    )  # fmt: skip
    with process(settings) as (client, child), sweeping(hasty):
        until(lambda: leases(hands))

        def call() -> None:
            with contextlib.suppress(httpx.TransportError):
                client.post("/v1/chat/completions", json=chat()["body"])

        caller = threading.Thread(target=call)
        caller.start()
        job = newest(hands)
        hands.claim(job.id)
        kept = submit(client)["id"]
        time.sleep(2 * LEASE_S)  # it is waited for: no lease runs out
        assert newest(hands, JobState.RUNNING).id == job.id
        child.kill()
        caller.join(30)
        killed_at = time.monotonic()
        until(lambda: _state(hands, job.id) == JobState.CANCELLED, 5 * LEASE_S)
        assert time.monotonic() - killed_at > LEASE_S / 2
        assert _state(hands, kept) == JobState.QUEUED


def _state(hands, job_id: str) -> str:
    with hands.database.read() as connection:
        return connection.scalar(select(jobs.c.state).where(jobs.c.id == job_id))


@pytest.mark.parametrize(("url", "fields", "headers", "ends"), CALLS)
def test_only_what_nobody_can_come_back_for_ends_so(
    sqlite_client, hands, url, fields, headers, ends
):
    until(lambda: leases(hands))
    with contextlib.suppress(httpx.ReadTimeout):
        sqlite_client.post(url, json=body_of(url) | fields, headers=headers, timeout=0.5)
    assert {waiter_of(hands, newest(hands).id)} == (leases(hands) if ends else {None})


def test_a_process_that_ends_in_good_order_leaves_no_lease(sqlite_settings, hands):
    with process(sqlite_settings) as (_, child):
        until(lambda: leases(hands))
        child.terminate()
        assert child.wait(20) == 0
    assert leases(hands) == set()
