"""What is no request by HTTP/1.1 is refused below the application, in the same one shape."""

import contextlib
import http.client
import json
import socket
import time

import httpx
import pytest

from tests.api.conftest import error_of, submit

HOST = b"Host: localhost\r\n"

NO_REQUESTS = {
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a request of one word": b"hello\r\n\r\n",
    "raw bytes in the path": b"GET /v1/jobs/\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
    "a space in the path": b"GET /v1/jobs /x HTTP/1.1\r\n" + HOST + b"\r\n",
    "no host": b"GET /v1/jobs HTTP/1.1\r\n\r\n",
    "a header without a colon": b"GET /v1/jobs HTTP/1.1\r\n" + HOST + b"nonsense\r\n\r\n",
    "a space before the colon": b"GET /v1/jobs HTTP/1.1\r\n" + HOST + b"a : b\r\n\r\n",
    "a NUL in a header": b"GET /v1/jobs HTTP/1.1\r\n" + HOST + b"a: b\x00\r\n\r\n",
    "headers without an end": b"GET /v1/jobs HTTP/1.1\r\n" + HOST + b"a: " + b"x" * 100_000,
    "two lengths that differ": b"POST /v1/jobs HTTP/1.1\r\n"
    + HOST
    + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length that is no number": b"POST /v1/jobs HTTP/1.1\r\n"
    + HOST
    + b"Content-Length: two\r\n\r\n{}",
    "a negative length": b"POST /v1/jobs HTTP/1.1\r\n" + HOST + b"Content-Length: -2\r\n\r\n{}",
    "a length beside chunks": b"POST /v1/jobs HTTP/1.1\r\n"
    + HOST
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": b"POST /v1/jobs HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: x\r\n\r\n",
    "a chunk without a length": b"POST /v1/jobs HTTP/1.1\r\n"
    + HOST
    + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
}


def exchange(client: httpx.Client, sent: bytes) -> tuple[httpx.Response, bytes]:
    """The one reply to these bytes; and, as the server has closed, what came behind it."""
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=10) as link:
        link.sendall(sent)
        received = b""
        while part := link.recv(65536):
            received += part
    head, _, rest = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = [tuple(line.split(": ", 1)) for line in lines]
    if ("transfer-encoding", "chunked") in headers:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = rest[: int(size, 16)], rest[int(size, 16) :].removeprefix(b"\r\n0\r\n\r\n")
        headers.remove(("transfer-encoding", "chunked"))
    else:
        length = int(dict(headers)["content-length"])
        body, rest = rest[:length], rest[length:]
    return httpx.Response(int(status.split()[1]), headers=headers, content=body), rest


@pytest.mark.parametrize("sent", NO_REQUESTS.values(), ids=NO_REQUESTS)
def test_it_is_refused_in_the_one_shape_and_the_connection_closed(sqlite_client, sent):
    reply, rest = exchange(sqlite_client, sent)
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["connection"] == "close"
    assert error_of(reply)["code"] == "invalid_http"
    assert rest == b""
    assert submit(sqlite_client)["status"] == "queued"


def test_a_method_nobody_knows_is_405(sqlite_client):
    reply = sqlite_client.request("FOO", "/v1/jobs")
    assert reply.status_code == 405
    assert error_of(reply)["code"] == "method"


def test_a_request_to_change_to_a_websocket_is_answered_as_any_other(sqlite_client):
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    reply = sqlite_client.get("/v1/engines", headers=upgrade | {"sec-websocket-key": "eA=="})
    assert reply.status_code == 404
    assert error_of(reply)["code"] == "unknown_path"


def test_rubbish_behind_a_half_sent_reply_ends_the_connection(sqlite_client):
    job = json.dumps({"url": "/v1/completions"}).encode()
    head = b"POST /v1/jobs HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
    sent = head + b"Content-Length: %d\r\n\r\n" % len(job) + job + b"rubbish\r\n\r\n"
    with socket.create_connection(
        (sqlite_client.base_url.host, sqlite_client.base_url.port), timeout=10
    ) as link:
        link.sendall(sent)
        received = b""
        while part := link.recv(65536):
            received += part
    first, _, second = received.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 400")
    assert b'"code":"invalid_http"' in second
    assert submit(sqlite_client)["status"] == "queued"


def test_an_idle_connection_is_kept_longer_than_clients_keep_it(sqlite_client):
    link = http.client.HTTPConnection(
        sqlite_client.base_url.host, sqlite_client.base_url.port, timeout=10
    )
    with contextlib.closing(link):
        link.connect()
        opened = link.sock
        for pause_s in (6.0, 0.0):  # OpenAI's client keeps one for five seconds
            link.request("GET", "/health/live")
            answer = link.getresponse()
            assert answer.status == 200
            assert answer.read() == b'{"status":"live"}\n'
            assert link.sock is opened  # not closed and opened anew
            time.sleep(pause_s)
