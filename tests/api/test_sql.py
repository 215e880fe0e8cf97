"""Statements take turns among their own kind only."""

import asyncio
import contextlib
import sqlite3
import threading
import time
from dataclasses import replace

import pytest

from api.app import create_app, num_database_connections
from tests.api.conftest import completion, serving, submit

NUM_BEFORE = 40  # more than any pool has threads


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.mark.parametrize("database_pool", [1, 2, 5])
@pytest.mark.parametrize("busy", ["read", "write", "check"])
def test_one_kind_of_statement_never_waits_for_another(settings, gate, busy, database_pool):
    async def scenario():
        sql = create_app(replace(settings, database_pool=database_pool)).state.services.sql
        held = [
            asyncio.create_task(getattr(sql, busy)(lambda connection, now: gate.wait(30)))
            for _ in range(NUM_BEFORE)
        ]
        await asyncio.sleep(0.3)
        sqlite = settings.database_url.startswith("sqlite")
        for kind in {"read", "write", "check"} - {busy}:
            call = getattr(sql, kind)(lambda connection, now: "done")
            assert await asyncio.wait_for(call, 2) == "done"
        with sql.database.begin() if busy != "write" or not sqlite else contextlib.nullcontext():
            pass  # the hints' connection
        assert not any(task.done() for task in held)
        gate.set()
        assert all(await asyncio.gather(*held))
        sql.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("database_pool", "most"), [(1, 4), (2, 4), (5, 7), (50, 52)])
def test_the_process_opens_as_many_connections_as_the_setting_says(
    sqlite_settings, database_pool, most
):
    assert num_database_connections(replace(sqlite_settings, database_pool=database_pool)) == most


def test_who_waits_to_write_holds_up_no_reader(sqlite_settings, hands, monkeypatch):
    monkeypatch.setattr("jobs.database.BUSY_TIMEOUT_S", 6.0)
    with serving(sqlite_settings) as client, contextlib.ExitStack() as stack:
        job = submit(client)
        file = sqlite_settings.database_url.removeprefix("sqlite:///")
        writer = stack.enter_context(
            contextlib.closing(sqlite3.connect(file, isolation_level=None))
        )
        writer.execute("BEGIN IMMEDIATE")
        replies = []
        threads = [
            threading.Thread(
                target=lambda: replies.append(client.post("/v1/jobs", json=completion()))
            )
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        for path in ("/v1/jobs?limit=1", f"/v1/jobs/{job['id']}", "/metrics", "/health/ready"):
            start = time.monotonic()
            assert client.get(path).status_code == 200, path
            assert time.monotonic() - start < 2, path
        assert replies == []
        writer.execute("ROLLBACK")
        for thread in threads:
            thread.join(30)
        assert [reply.status_code for reply in replies] == [202] * 12
