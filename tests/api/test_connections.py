"""Connections: how long they may say nothing, and how many there may be."""

import contextlib
import os
import resource
import socket
import time
from dataclasses import replace

import httpx
import psutil
import pytest

from api.connections import (
    DESCRIPTORS_PER_DATABASE_CONNECTION,
    MAX_NOT_WAITING,
    MAX_REFUSED,
    REFUSED_S,
    RESERVED_DESCRIPTORS,
    Gate,
)
from tests.api.conftest import completion, error_of, process, serving, submit, until
from tests.api.test_http import exchange

LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALVES = {
    "one letter": b"G",
    "a request line": b"GET /health/live HTTP/1.1\r\n",
    "headers without the last blank line": LIVE[:-2],
    "a header that goes on": LIVE[:-2] + b"X-A: ",
    "headers of a body": b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n",
}


def link_to(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=10)


def is_alive(link: socket.socket) -> bool:
    """Whether this one connection is served."""
    link.sendall(LIVE)
    reply = b""
    while not reply.rstrip().endswith(b'"live"}'):
        if not (part := link.recv(65536)):
            return False
        reply += part
    return reply.startswith(b"HTTP/1.1 200")


def address_of(client: httpx.Client) -> tuple[str, int]:
    return client.base_url.host, client.base_url.port


@pytest.fixture
def hasty(sqlite_settings, monkeypatch):
    """A server with little patience."""
    monkeypatch.setattr("api.http.HEAD_TIMEOUT_S", 1.0)
    monkeypatch.setattr("api.main.KEEP_ALIVE_S", 1)
    with serving(sqlite_settings) as client:
        yield client


def test_a_connection_that_says_nothing_is_closed(hasty):
    with link_to(hasty) as link:
        start = time.monotonic()
        assert link.recv(1) == b""
        assert 0.5 < time.monotonic() - start < 5


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
def test_half_a_request_is_a_408_and_the_connection_closed(hasty, half):
    reply, rest = exchange(hasty, half)
    assert reply.status_code == 408
    assert error_of(reply)["code"] == "slow"
    assert reply.headers["connection"] == "close"
    assert rest == b""


@pytest.mark.parametrize("half", [b"", *HALVES.values()], ids=["nothing", *HALVES])
def test_a_kept_connection_has_no_longer_for_its_next_request(hasty, half):
    with link_to(hasty) as link:
        assert is_alive(link)
        start = time.monotonic()
        if half:
            link.sendall(half)
        received = b"".join(iter(lambda: link.recv(65536), b""))
        assert 0.5 < time.monotonic() - start < 5
        assert received.startswith(b"HTTP/1.1 408" if half else b"")


def test_headers_that_come_byte_by_byte_have_no_longer(hasty):
    with link_to(hasty) as link:
        start = time.monotonic()
        with contextlib.suppress(OSError):
            for number in range(50):
                link.sendall(LIVE[number : number + 1])
                time.sleep(0.2)
        assert time.monotonic() - start < 5


def test_a_wait_and_a_body_may_take_longer_than_headers(hasty):
    def slowly():
        yield b'[{"url": "/v1/completions"'
        time.sleep(2.5)
        yield b"}]"

    job = submit(hasty)
    assert hasty.get(f"/v1/jobs/{job['id']}?wait=2.5").status_code == 200
    headers = {"content-type": "application/json"}
    reply = hasty.post("/v1/jobs", content=slowly(), headers=headers)
    assert error_of(reply)["param"] == "[0].body"


def test_a_connection_that_takes_nothing_of_its_reply_is_ended(sqlite_settings, monkeypatch):
    monkeypatch.setattr("api.http.UNREAD_TIMEOUT_S", 2.0)
    metadata = {"metadata": {str(number): "m" * 500 for number in range(16)}}
    with serving(sqlite_settings) as client, socket.socket() as link:
        for _ in range(3):
            reply = client.post("/v1/jobs", json=[completion() | metadata] * 300)
            assert reply.status_code == 202
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect(address_of(client))
        link.sendall(b"GET /v1/jobs?limit=1000 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        mine = link.getsockname()

        def is_held() -> bool:
            connections = psutil.Process().net_connections("tcp")
            return any(each.raddr == mine and each.status == "ESTABLISHED" for each in connections)

        until(is_held)
        until(lambda: not is_held(), timeout_s=20)


@pytest.fixture
def narrow(sqlite_settings, monkeypatch):
    """A server that has room for six connections."""
    monkeypatch.setattr("api.connections.MAX_NOT_WAITING", 5)
    with serving(replace(sqlite_settings, max_waiters=1)) as client:
        yield client


def test_a_connection_beyond_the_cap_is_told_to_come_back(narrow):
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(link_to(narrow)) for _ in range(6)]
        assert all(is_alive(link) for link in held)
        for call in (
            lambda: httpx.get(f"{narrow.base_url}/health/live"),
            lambda: httpx.post(f"{narrow.base_url}/v1/jobs", json=[completion()] * 900),
        ):
            reply = call()
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.headers["connection"] == "close"
            assert error_of(reply)["code"] == "overloaded"
        assert is_alive(held[0])  # who is inside is served
    until(lambda: httpx.get(f"{narrow.base_url}/health/live").status_code == 200)


def test_who_is_told_to_come_back_is_not_waited_for(narrow, monkeypatch):
    monkeypatch.setattr("api.connections.REFUSED_S", 0.3)
    monkeypatch.setattr("api.connections.MAX_REFUSED", 2)
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(link_to(narrow))
        replies = []
        refused = [stack.enter_context(link_to(narrow)) for _ in range(5)]
        for link in refused:
            with contextlib.suppress(ConnectionResetError):
                replies.append(link.recv(65536)[:12])
        assert sorted(filter(None, replies)) == [b"HTTP/1.1 503"] * 2
        time.sleep(0.6)  # neither of the two has closed, and their places are free again
        with link_to(narrow) as link:
            assert link.recv(65536).startswith(b"HTTP/1.1 503")


@contextlib.contextmanager
def descriptors(number: int, pid: int = 0):
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (number, before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_the_cap_leaves_descriptors_for_database_redis_and_files(sqlite_settings):
    gate = Gate(sqlite_settings, num_database_connections=7)
    with descriptors(1024):
        reserved = RESERVED_DESCRIPTORS + MAX_REFUSED + 7 * DESCRIPTORS_PER_DATABASE_CONNECTION
        assert gate.limit() == 1024 - reserved
    with descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        assert gate.limit() <= sqlite_settings.max_waiters + MAX_NOT_WAITING


def test_the_process_takes_as_many_descriptors_as_it_may_have(sqlite_settings):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with descriptors(min(512, hard)), process(sqlite_settings) as (_, child):
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_more_connections_than_descriptors_take_none_from_anyone_else(sqlite_settings, capfd):
    with process(sqlite_settings) as (client, child), contextlib.ExitStack() as stack:
        submit(client)
        stack.enter_context(descriptors(250, child.pid))
        for _ in range(400):
            stack.enter_context(link_to(client))
        assert client.get("/v1/jobs").status_code == 200
        time.sleep(REFUSED_S + 0.5)
        reply = httpx.get(f"{client.base_url}/health/live")
        assert reply.status_code == 503
        assert error_of(reply)["code"] == "overloaded"
        assert len(os.listdir(f"/proc/{child.pid}/fd")) < 250
    assert capfd.readouterr().err.count("connection refused") == 1


def test_without_a_descriptor_left_the_loop_neither_spins_nor_floods_the_log(
    sqlite_settings, capfd
):
    with process(sqlite_settings) as (client, child):
        number = len(os.listdir(f"/proc/{child.pid}/fd"))
        with descriptors(number, child.pid), contextlib.ExitStack() as stack:
            for _ in range(50):
                stack.enter_context(link_to(client))
            before = sum(psutil.Process(child.pid).cpu_times()[:2])
            time.sleep(3.5)
            assert sum(psutil.Process(child.pid).cpu_times()[:2]) - before < 1
            assert client.get("/health/live").status_code == 200  # a connection that is there
        assert httpx.get(f"{client.base_url}/health/live", timeout=10).status_code == 200
    log = capfd.readouterr().err
    assert log.count("no connection accepted") == 1
    assert "Traceback" not in log
