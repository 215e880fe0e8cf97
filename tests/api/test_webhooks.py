"""Webhook endpoints over HTTP: made, changed, tried, their log; nothing odd gets in."""

import pytest

from jobs import webhook_trials
from tests.api.conftest import error_of

NEW = {"name": "shop", "url": "https://shop.example/hooks", "event_types": ["batch.completed"]}
PATH = "/v1/webhook_endpoints"


def test_an_endpoint_from_its_making_to_its_end(client):
    made = client.post(PATH, json=NEW).json()
    assert made["signing_secret"].startswith("whsec_")
    shown = {name: value for name, value in made.items() if name != "signing_secret"}
    assert client.get(PATH).json()["data"] == [shown]
    changed = client.post(f"{PATH}/{made['id']}", json={"name": "other"}).json()
    assert (changed["name"], changed["url"]) == ("other", NEW["url"])
    rotated = client.post(f"{PATH}/{made['id']}/rotate_secret").json()
    assert rotated["signing_secret"] != made["signing_secret"]
    ping = client.post(f"{PATH}/{made['id']}/test").json()
    assert (ping["event_type"], ping["status"]) == ("webhook.ping", "pending")
    [logged] = client.get(f"{PATH}/{made['id']}/deliveries").json()["data"]
    assert logged == ping
    again = client.post(f"{PATH}/{made['id']}/deliveries/{ping['id']}/redeliver")
    assert again.status_code == 202  # it is put down to be sent
    assert again.json()["event_id"] == ping["event_id"]
    assert client.delete(f"{PATH}/{made['id']}").json()["deleted"] is True
    for method, path in (
        ("GET", ""), ("POST", "/test"), ("GET", "/deliveries"), ("DELETE", ""),
        ("POST", "/rotate_secret"), ("POST", f"/deliveries/{ping['id']}/redeliver"),
    ):  # fmt: skip
        reply = client.request(method, f"{PATH}/{made['id']}{path}")
        assert reply.status_code == 404
        assert error_of(reply)["code"] == "webhook_not_found"
    assert client.get(f"{PATH}/%00").status_code == 404


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"url": "ftp://shop.example"}, "url"),
        ({"url": "https://user:pass@shop.example/"}, "url"),
        ({"url": "https://shop.example/#x"}, "url"),
        ({"url": "https://"}, "url"),
        ({"url": "https://shop.example:99999/"}, "url"),
        ({"url": "http://a b/"}, "url"),
        ({"url": "https://127.0.0.1/"}, "url"),
        ({"url": "http://[::1]:8000/"}, "url"),
        ({"url": "http://169.254.169.254/latest"}, "url"),
        ({"url": "http://0x7f000001/"}, "url"),
        ({"url": "http://localhost:8000/"}, "url"),
        ({"event_types": []}, "event_types"),
        ({"event_types": ["job.completed"]}, "event_types[0]"),
        ({"event_types": ["batch.completed", "batch.failed", "batch.completed"]}, "event_types"),
        ({"name": ""}, "name"),
        ({"secret": "mine"}, "secret"),
    ],
)
def test_what_cannot_be_is_refused_by_name(sqlite_client, changes, param):
    reply = sqlite_client.post(PATH, json=NEW | changes)
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["param"] == param


KEYLESS = ["", "/{id}/rotate_secret", "/{id}/test", "/{id}/deliveries/x/redeliver"]


@pytest.mark.parametrize("path", KEYLESS)
def test_a_key_that_would_not_be_kept_to_is_refused(sqlite_client, path):
    made = sqlite_client.post(PATH, json=NEW).json()
    where = PATH + path.format(id=made["id"])
    reply = sqlite_client.post(where, json=NEW, headers={"idempotency-key": "k"})
    assert reply.status_code == 400
    error = error_of(reply)
    assert (error["param"], error["code"]) == ("idempotency-key", "unsupported_parameter")
    assert len(sqlite_client.get(PATH).json()["data"]) == 1


def test_an_endpoint_whose_deliveries_pile_up_is_not_tried_out(sqlite_client, monkeypatch):
    monkeypatch.setattr(webhook_trials, "MAX_WAITING", 3)
    made, other = (sqlite_client.post(PATH, json=NEW).json() for _ in range(2))
    for _ in range(3):
        assert sqlite_client.post(f"{PATH}/{made['id']}/test").status_code == 200
    reply = sqlite_client.post(f"{PATH}/{made['id']}/test")
    assert reply.status_code == 400
    assert "3 deliveries" in error_of(reply)["message"]
    assert len(sqlite_client.get(f"{PATH}/{made['id']}/deliveries").json()["data"]) == 3
    assert sqlite_client.post(f"{PATH}/{other['id']}/test").status_code == 200
