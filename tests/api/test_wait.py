"""Long-polls: woken by the end, by the safety net, by the shutdown, or by the clock."""

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from dataclasses import replace

import httpx
import pytest
import redis

from api.waiters import REREAD_S
from cli.servers import Valkey
from jobs.celery_app import queue_for
from jobs.events import Channel
from jobs.settings import ModelEntry, Settings
from tests.api.conftest import MODEL, error_of, hands_on, process, serving, submit, until


class Waiting:
    """A GET with `wait` in a thread of its own."""

    def __init__(self, client: httpx.Client, job_id: str, wait: float) -> None:
        self.client = client
        self.url = f"/v1/jobs/{job_id}?wait={wait}"
        self.thread = threading.Thread(target=self._get)
        self.start = time.monotonic()
        self.thread.start()

    def _get(self) -> None:
        self.reply = self.client.get(self.url, timeout=90)
        self.seconds = time.monotonic() - self.start

    def join(self) -> httpx.Response:
        self.thread.join(90)
        return self.reply


def test_a_wait_ends_when_the_job_does(client, hands):
    job = submit(client)
    claimed = hands.claim(job["id"])
    waiting = Waiting(client, job["id"], 30)
    time.sleep(0.5)
    hands.finish(claimed)
    assert waiting.join().json()["status"] == "succeeded"
    assert 0.5 <= waiting.seconds < 10


def test_the_news_comes_at_once_by_redis(sqlite_client, hands, monkeypatch):
    monkeypatch.setattr("api.waiters.REREAD_S", 60.0)  # takes the safety net away
    job = submit(sqlite_client)
    claimed = hands.claim(job["id"])
    time.sleep(REREAD_S + 0.5)  # past the first re-read
    waiting = Waiting(sqlite_client, job["id"], 30)
    time.sleep(0.5)
    hands.finish(claimed)
    assert waiting.join().json()["status"] == "succeeded"
    assert waiting.seconds < 10


def test_the_news_still_comes_by_redis_after_bytes_that_are_no_ids(
    sqlite_client, sqlite_settings, hands, monkeypatch
):
    monkeypatch.setattr("api.waiters.REREAD_S", 60.0)
    job = submit(sqlite_client)
    claimed = hands.claim(job["id"])
    time.sleep(REREAD_S + 0.5)
    with redis.Redis.from_url(sqlite_settings.redis_url) as broker:
        broker.publish(f"{sqlite_settings.key_prefix}{Channel.ENDED}", b"\xff\xfe")
    waiting = Waiting(sqlite_client, job["id"], 30)
    time.sleep(0.5)
    hands.finish(claimed)
    assert waiting.join().json()["status"] == "succeeded"
    assert waiting.seconds < 10


def test_a_lost_hint_only_delays_the_news(client, hands):
    job = submit(client)
    claimed = hands.claim(job["id"])
    waiting = Waiting(client, job["id"], 30)
    time.sleep(0.3)
    hands.finish(claimed, announce=False)
    assert waiting.join().json()["status"] == "succeeded"
    assert waiting.seconds < 10


def test_a_cancel_wakes_who_waits(client):
    job = submit(client)
    waiting = Waiting(client, job["id"], 30)
    time.sleep(0.3)
    client.post(f"/v1/jobs/{job['id']}/cancel")
    assert waiting.join().json()["status"] == "cancelled"
    assert waiting.seconds < 10


def test_a_wait_that_is_over_answers_with_the_state_of_now(client):
    job = submit(client)
    waiting = Waiting(client, job["id"], 1)
    assert waiting.join().json()["status"] == "queued"
    assert 1 <= waiting.seconds < 10


def test_a_wait_for_an_ended_job_does_not_wait(client, hands):
    job = submit(client)
    hands.finish(hands.claim(job["id"]))
    waiting = Waiting(client, job["id"], 30)
    assert waiting.join().json()["status"] == "succeeded"
    assert waiting.seconds < 10


def test_sixty_waiters_are_all_woken(sqlite_client, hands):
    jobs = [submit(sqlite_client) for _ in range(20)]
    claims = [hands.claim(job["id"]) for job in jobs]
    waiting = [Waiting(sqlite_client, job["id"], 30) for job in jobs * 3]
    time.sleep(0.5)
    for claimed in claims:
        hands.finish(claimed)
    assert {each.join().json()["status"] for each in waiting} == {"succeeded"}
    assert max(each.seconds for each in waiting) < 20


def test_too_many_waiters_are_told_to_come_back(sqlite_settings):
    with serving(replace(sqlite_settings, max_waiters=1)) as client:
        job = submit(client)
        waiting = Waiting(client, job["id"], 2)
        time.sleep(0.5)
        reply = client.get(f"/v1/jobs/{job['id']}?wait=1")
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert error_of(reply)["code"] == "overloaded"
        assert client.get(f"/v1/jobs/{job['id']}").status_code == 200
        assert waiting.join().status_code == 200
        # and its place is free again
        assert client.get(f"/v1/jobs/{job['id']}?wait=0.1").status_code == 200


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("path", ["?wait=60", "/events"], ids=["long-poll", "stream"])
def test_who_waits_and_leaves_gives_the_place_back(sqlite_settings, path, reset):
    with serving(replace(sqlite_settings, max_waiters=3)) as client:
        job = submit(client)
        address = (client.base_url.host, client.base_url.port)
        request = f"GET /v1/jobs/{job['id']}{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()

        def status() -> int:
            return client.get(f"/v1/jobs/{job['id']}?wait=0.1").status_code

        for _ in range(3):
            with contextlib.ExitStack() as stack:
                for _ in range(3):
                    link = stack.enter_context(socket.create_connection(address, 10))
                    link.sendall(request)
                    if reset:
                        no_linger = struct.pack("ii", 1, 0)
                        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
                time.sleep(0.5)  # asking would take a place itself
                assert status() == 429
            until(lambda: status() == 200, timeout_s=10)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_shutdown_answers_waiters_and_exits_in_good_order(sqlite_settings, signal_number):
    with process(sqlite_settings) as (client, child):
        job = submit(client)
        waiting = Waiting(client, job["id"], 60)
        time.sleep(0.5)
        child.send_signal(signal_number)
        reply = waiting.join()
        assert reply.status_code == 200
        assert reply.json()["status"] == "queued"
        assert child.wait(15) == 0
        assert waiting.seconds < 15


@pytest.mark.parametrize("freeze", [False, True], ids=["killed", "frozen"])
def test_everything_works_while_redis_is_away(database_url, tiny_llama_dir, tmp_path, freeze):
    valkey = Valkey(tmp_path / "valkey", persist=False)
    valkey.start()
    settings = Settings(
        database_url=database_url,
        redis_url=valkey.url,
        models=(ModelEntry(name=MODEL, path=str(tiny_llama_dir)),),
    )
    with process(settings) as (client, _), hands_on(settings) as hands:
        hands.register()
        before = submit(client)
        claimed = hands.claim(before["id"])
        if freeze:
            os.kill(valkey.pid, signal.SIGSTOP)
        else:
            valkey.kill()
        waiting = Waiting(client, before["id"], 30)
        time.sleep(0.3)
        start = time.monotonic()
        after = [submit(client) for _ in range(20)]
        assert client.post(f"/v1/jobs/{after[0]['id']}/cancel").json()["status"] == "cancelled"
        assert time.monotonic() - start < 10
        hands.finish(claimed, announce=False)
        assert waiting.join().json()["status"] == "succeeded"
        assert waiting.seconds < 15
        listed = client.get("/v1/jobs", params={"status": "queued"}).json()["data"]
        assert len(listed) == 19
        ready = client.get("/health/ready")
        assert ready.status_code == 503
        assert [each["code"] for each in ready.json()["reasons"]] == ["redis"]
        if freeze:
            os.kill(valkey.pid, signal.SIGCONT)
        else:
            valkey.start()
        until(lambda: client.get("/health/ready").status_code == 200)
        # and hints are told again
        waiting = Waiting(client, after[1]["id"], 30)
        hands.finish(hands.claim(after[1]["id"]))
        assert waiting.join().json()["status"] == "succeeded"
        with redis.Redis.from_url(valkey.url) as broker:
            key = f"{settings.key_prefix}{queue_for(MODEL)}"
            until(lambda: submit(client) and broker.llen(key) > 0)
    valkey.stop()
