"""Webhooks on their way: signed, to checked addresses only, by a real connection."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from standardwebhooks import Webhook

from jobs import webhooks
from jobs.database import Database
from jobs.settings import Settings
from jobs.webhooks import Delivery, Due
from worker.courier import Courier, deliver

SECRET = webhooks.new_secret()


@contextlib.contextmanager
def receiver(status=200, headers=()):
    """A receiver on this machine; the requests it got."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((dict(self.headers.items()), body))
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hooks", got
        server.shutdown()
        thread.join()


def due(url):
    payload = json.dumps({"id": "evt_1", "type": "batch.completed", "data": {"id": "batch_1"}})
    delivery = Delivery(
        id="whd_1", tenant_id="acme", endpoint_id="we_1", event_id="evt_1",
        event_type="batch.completed", payload=payload, num_tries=1, next_try_at=None,
        delivered_at=None, tried_at=None, status_code=None, error=None, created_at=0.0,
    )  # fmt: skip
    return Due(delivery, url, SECRET)


def test_a_receiver_can_check_who_sent_it():
    with receiver() as (url, got):
        assert deliver(due(url), timeout_s=30, private=True) == (200, None)
    [(headers, body)] = got
    assert Webhook(SECRET).verify(body, headers)["data"] == {"id": "batch_1"}
    assert {name.lower(): value for name, value in headers.items()}["webhook-id"] == "evt_1"
    with pytest.raises(Exception, match="No matching signature"):
        Webhook(SECRET).verify(body + b" ", headers)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0x7f000001", "[::ffff:127.0.0.1]", "127.1", "2130706433"]
)
def test_no_spelling_of_this_machine_is_connected_to(host):
    with receiver() as (url, got):
        status, error = deliver(due(url.replace("127.0.0.1", host)), timeout_s=30, private=False)
    assert (status, got) == (None, [])
    assert error == "its host has no address that may be connected to"


def test_a_name_that_turns_after_the_check_leads_nowhere(monkeypatch):
    """The address that was checked is the one connected to: there is no second look at the name."""
    answers = iter(["192.0.2.1", "127.0.0.1"])
    real, connected = socket.getaddrinfo, []

    def rebinding(host, port, *args, **kwargs):
        return real(next(answers) if host == "rebound.example" else host, port, *args, **kwargs)

    def connect(address, *args, **kwargs):
        connected.append(address)
        raise OSError("nobody there")

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr("worker.courier.is_public", lambda address: address == "192.0.2.1")
    monkeypatch.setattr(socket, "create_connection", connect)
    deliver(due("http://rebound.example:80/"), timeout_s=5, private=False)
    assert connected == [("192.0.2.1", 80)]


def test_a_redirect_is_not_followed():
    with receiver() as (there, got), receiver(302, [("location", there)]) as (url, _):
        assert deliver(due(url), timeout_s=30, private=True) == (302, "status 302")
        assert got == []


def test_who_drips_does_not_hold_us_for_longer_than_the_limit():
    def drip(listening):
        listening.settimeout(20)  # on a busy machine the second may pass before it connects
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                while True:
                    connection.sendall(b"H")
                    time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        dripping = threading.Thread(target=drip, args=(listening,))
        dripping.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        began = time.monotonic()
        status, error = deliver(due(url), timeout_s=1, private=True)
    assert status is None
    assert error is not None
    assert time.monotonic() - began < 20
    dripping.join(120)
    assert not dripping.is_alive()


def test_a_round_delivers_what_is_due_and_logs_no_secret(sqlite_url, caplog):
    settings = Settings(database_url=sqlite_url, webhook_private_addresses=True)
    database = Database(sqlite_url)
    courier = Courier(settings)
    with receiver() as (url, got), caplog.at_level("DEBUG"):
        with database.begin() as connection:
            now = database.clock(connection)
            hook = webhooks.create_endpoint(
                connection, "acme", name="x", url=url, event_types=["batch.failed"], now=now
            )
            webhooks.record(connection, "acme", "batch.failed", "batch_1", now=now)
        assert courier.round() == 1
        assert courier.round() == 0
    assert len(got) == 1
    with database.read() as connection:
        [delivery] = webhooks.list_deliveries(connection, "acme", hook.id, limit=5)
    assert (delivery.status_code, delivery.error) == (200, None)
    assert delivery.delivered_at is not None
    assert hook.secret not in caplog.text
    courier.__exit__()
    database.dispose()


def test_a_receiver_that_hangs_holds_up_no_other_tenant(sqlite_url, caplog):
    settings = Settings(
        database_url=sqlite_url, webhook_private_addresses=True, webhook_timeout_s=1
    )
    database, courier = Database(sqlite_url), Courier(settings)
    with (
        receiver() as (url, got),
        socket.create_server(("127.0.0.1", 0), backlog=64) as silent,
        caplog.at_level("INFO"),
    ):
        places = {"acme": f"http://127.0.0.1:{silent.getsockname()[1]}/", "globex": url}
        with database.begin() as connection:
            now = database.clock(connection)
            for tenant, place in places.items():
                webhooks.create_endpoint(
                    connection, tenant, name="x", url=place, event_types=["batch.failed"], now=now
                )
            for number in range(10):
                webhooks.record(connection, "acme", "batch.failed", f"batch_{number}", now=now - 1)
            webhooks.record(connection, "globex", "batch.failed", "batch_g", now=now)
        assert courier.round() == 11
    assert len(got) == 1
    first, *rest = [each.getMessage() for each in caplog.records if "tried" in each.getMessage()]
    assert "status=200" in first
    assert all("no reply" in each for each in rest)
    courier.__exit__()
    database.dispose()
