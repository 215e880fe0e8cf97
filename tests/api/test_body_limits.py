"""Bodies: how large, how slow, how many; and what they may cost the server."""

import contextlib
import json
import socket
import threading
import time
from dataclasses import replace

import httpx
import psutil
import pytest

from tests.api.conftest import completion, error_of, process, serving, submit, until

MIB = 2**20


@pytest.fixture
def server(sqlite_settings):
    with process(sqlite_settings) as (client, child):
        yield client, psutil.Process(child.pid)


def big(num_bytes: int) -> bytes:
    """One job of about this size."""
    return json.dumps(completion(prompt="the quick brown fox " * (num_bytes // 20))).encode()


def in_chunks(content: bytes, size: int = 65536):
    for start in range(0, len(content), size):
        yield content[start : start + size]


def post(client, content, **headers) -> httpx.Response:
    headers = {"content-type": "application/json"} | headers
    return client.post("/v1/jobs", content=content, headers=headers)


def test_a_body_over_the_limit_is_refused_whether_its_length_is_declared_or_not(server):
    client, _ = server
    content = big(5 * MIB)
    for reply in (post(client, content), post(client, in_chunks(content))):
        assert reply.status_code == 413
        error = error_of(reply)
        assert error["code"] == "body_too_large"
        assert str(4 * MIB) in error["message"]
    assert submit(client)["status"] == "queued"


def test_a_huge_body_costs_no_memory(server):
    client, memory = server
    submit(client)
    before = memory.memory_info().rss
    peak = before
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, memory.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    chunk = b" " * MIB
    try:
        for _ in range(3):
            try:
                reply = post(client, (chunk for _ in range(300)))
                assert reply.status_code == 413
            except httpx.TransportError:
                pass  # the server closed on a sender that would not stop
    finally:
        done.set()
        watcher.join()
    assert peak - before < 40 * MIB
    assert submit(client)["status"] == "queued"


def test_a_declared_length_is_refused_before_the_body_is_sent(server):
    client, _ = server
    with socket.create_connection((client.base_url.host, client.base_url.port), 10) as raw:
        raw.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"expect: 100-continue\r\ncontent-length: 10000000000\r\n\r\n"
        )
        reply = b"".join(iter(lambda: raw.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in reply


def test_one_job_may_have_one_mebibyte(sqlite_client):
    reply = post(sqlite_client, big(MIB + 1000))
    assert reply.status_code == 413
    assert str(MIB) in error_of(reply)["message"]
    large = json.dumps([completion(), completion(prompt="fox " * 300_000)]).encode()
    reply = post(sqlite_client, large)
    assert reply.status_code == 413
    assert error_of(reply)["param"] == "[1]"


def test_many_jobs_may_together_have_more(sqlite_client):
    jobs = [completion() | {"metadata": {str(i): "m" * 500 for i in range(16)}}] * 300
    content = json.dumps(jobs).encode()
    assert 2 * MIB < len(content) < 4 * MIB
    assert post(sqlite_client, content).status_code == 202


def test_a_slow_sender_is_cut_off(sqlite_settings, monkeypatch):
    monkeypatch.setattr("api.body.READ_TIMEOUT_S", 1.0)

    def slowly():
        for byte in b'{"url": "/v1/completions"}':
            time.sleep(0.2)
            yield bytes([byte])

    with serving(sqlite_settings) as client:
        start = time.monotonic()
        reply = post(client, slowly())
        assert reply.status_code == 408
        assert error_of(reply)["message"]
        assert time.monotonic() - start < 10


def test_bodies_under_way_share_one_budget(sqlite_settings):
    settings = replace(sqlite_settings, body_memory_bytes=4 * MIB)
    hold = threading.Event()

    def held_open():
        yield b" " * (3 * MIB)
        hold.wait(30)
        yield json.dumps(completion()).encode()

    with serving(settings) as client:
        replies = []
        first = threading.Thread(target=lambda: replies.append(post(client, held_open())))
        first.start()
        time.sleep(1)
        reply = post(client, b" " * (2 * MIB))
        assert reply.status_code == 429
        assert reply.headers["retry-after"]
        assert submit(client)["status"] == "queued"  # what fits is still taken
        hold.set()
        first.join(30)
        assert replies[0].status_code == 413  # one job of 3 MiB
        # and the budget is whole again
        assert post(client, b" " * (2 * MIB)).status_code == 400


def test_a_sender_that_leaves_frees_what_it_held(sqlite_settings):
    with serving(replace(sqlite_settings, body_memory_bytes=4 * MIB)) as client:
        for _ in range(4):
            address = (client.base_url.host, client.base_url.port)
            with socket.create_connection(address, 10) as raw:
                raw.sendall(
                    b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\n"
                    b"content-type: application/json\r\n"
                    b"content-length: 3000000\r\n\r\n" + b" " * 2_000_000
                )
                time.sleep(0.2)
        until(lambda: post(client, b" " * (3 * MIB)).status_code == 400)


def test_a_body_in_tiny_chunks_is_refused_before_it_holds_up_anybody(server):
    client, _ = server
    head = (
        b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    replies = []

    def send() -> None:
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address, 10) as raw:
            raw.sendall(head)
            with contextlib.suppress(OSError):
                for _ in range(200):
                    raw.sendall(b"1\r\n \r\n" * 20_000)
            with contextlib.suppress(OSError):
                replies.append(raw.recv(65536))

    senders = [threading.Thread(target=send) for _ in range(4)]
    start = time.monotonic()
    for sender in senders:
        sender.start()
    longest = 0.0
    while any(sender.is_alive() for sender in senders):
        asked = time.monotonic()
        assert client.get("/health/live").status_code == 200
        longest = max(longest, time.monotonic() - asked)
    assert time.monotonic() - start < 10
    assert longest < 2
    assert all(reply.startswith(b"HTTP/1.1 400") for reply in replies)


@pytest.mark.parametrize("chunks", [in_chunks(big(600), 1), in_chunks(big(200_000), 128)])
def test_chunks_may_be_small_if_they_are_few_or_hold_something(sqlite_client, chunks):
    assert post(sqlite_client, chunks).status_code in (202, 400)


def test_a_refused_chunk_is_told_in_the_one_shape(sqlite_client):
    with socket.create_connection(
        (sqlite_client.base_url.host, sqlite_client.base_url.port), 10
    ) as raw:
        raw.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 1040
        )
        received = b"".join(iter(lambda: raw.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 400")
    assert b'"code":"invalid_http"' in received
    assert b"tiny chunks" in received
