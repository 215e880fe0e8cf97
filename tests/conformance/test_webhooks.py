"""Webhooks: where events go, and what comes there."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

import openai
import pytest

from tests.conformance.conftest import URL

TYPES = ["response.completed", "response.incomplete", "batch.completed"]
here = pytest.mark.skipif(URL is not None, reason="the server may not reach this machine")


@pytest.fixture
def endpoint(client):
    made = client.webhooks.create(name="shop", url="https://shop.example/hooks", event_types=TYPES)
    yield made
    client.webhooks.delete(made.id)


@pytest.fixture
def receiver() -> Iterator[tuple[str, Queue]]:
    """A server of our own, and what is posted to it: bodies and headers."""
    received: Queue = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.put((body, dict(self.headers)))
            self.send_response(202)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hooks", received
        server.shutdown()
        thread.join()


def test_the_events_that_there_are_are_listed(client):
    kinds = ("completed", "failed", "cancelled")
    names = {f"{thing}.{kind}" for thing in ("response", "batch") for kind in kinds}
    known = set(client.webhooks.event_types.list().data)
    assert known == names | {"response.incomplete", "batch.expired"}


def test_an_endpoint_is_made_found_changed_and_gone(client):
    made = client.webhooks.create(name="a", url="https://shop.example/a", event_types=TYPES)
    assert made.signing_secret.startswith("whsec_")
    found = client.webhooks.retrieve(made.id)
    assert (found.name, found.url, found.event_types) == ("a", "https://shop.example/a", TYPES)
    assert client.webhooks.update(made.id, name="b").name == "b"
    assert client.webhooks.retrieve(made.id).url == "https://shop.example/a"
    assert client.webhooks.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.webhooks.retrieve(made.id)


def test_endpoints_are_listed_page_by_page(client, endpoint):
    other = client.webhooks.create(name="b", url="https://shop.example/b", event_types=TYPES)
    try:
        listed = [each.id for each in client.webhooks.list(limit=1)]
        assert {endpoint.id, other.id} <= set(listed)
        assert len(set(listed)) == len(listed)
    finally:
        client.webhooks.delete(other.id)


def test_a_secret_is_rotated_at_once_or_the_wish_is_refused_by_name(client, endpoint):
    assert client.webhooks.rotate_secret(endpoint.id).signing_secret != endpoint.signing_secret
    with pytest.raises(openai.BadRequestError) as raised:
        client.webhooks.rotate_secret(endpoint.id, keep_old_secret_active_for_24_hours=True)
    assert raised.value.param == "keep_old_secret_active_for_24_hours"


def test_an_event_nobody_knows_is_refused(client):
    with pytest.raises(openai.BadRequestError):
        client.webhooks.create(
            name="a", url="https://shop.example/a", event_types=["video.completed"]
        )


@here
def test_a_test_says_what_the_receiver_said(client, receiver):
    url, received = receiver
    made = client.webhooks.create(name="a", url=url, event_types=TYPES)
    try:
        tried = client.webhooks.test(made.id, event_type="batch.completed")
        assert (tried.status_code, tried.success) == (202, True)
        assert (tried.event_type, tried.webhook_endpoint_id) == ("batch.completed", made.id)
        assert received.get(timeout=5)
    finally:
        client.webhooks.delete(made.id)


@here
def test_the_end_of_a_background_response_is_told_and_unwrapped(client, respond, receiver):
    url, received = receiver
    made = client.webhooks.create(name="a", url=url, event_types=TYPES)
    try:
        response = respond(background=True)
        while True:
            body, headers = received.get(timeout=60)
            event = client.webhooks.unwrap(body, headers, secret=made.signing_secret)
            if event.data.id == response.id:
                break
        assert event.type in ("response.completed", "response.incomplete")
        assert event.id == headers["webhook-id"]
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(body + b" ", headers, secret=made.signing_secret)
    finally:
        client.webhooks.delete(made.id)
