"""The operator's API: tenants, keys, quotas."""

import pytest

from tests.api.conftest import error_of


def test_a_tenant_its_quotas_and_its_keys(client):
    made = client.post("/admin/v1/tenants", json={"id": "acme", "max_queued_jobs": 3})
    assert made.status_code == 201
    assert made.json()["max_queued_jobs"] == 3
    assert made.json()["tokens_per_minute"] is None
    changed = client.post(
        "/admin/v1/tenants/acme", json={"max_queued_jobs": None, "requests_per_minute": 9}
    ).json()
    assert (changed["max_queued_jobs"], changed["requests_per_minute"]) == (None, 9)
    listed = client.get("/admin/v1/tenants").json()["data"]
    assert {tenant["id"] for tenant in listed} == {"acme", "default"}

    key = client.post("/admin/v1/keys", json={"tenant": "acme", "name": "web"}).json()
    assert key["key"].startswith(f"tm_{key['id']}_")
    assert key["scopes"] == ["read", "write", "webhooks"]
    [shown] = client.get("/admin/v1/keys?tenant=acme").json()["data"]
    assert shown == {name: value for name, value in key.items() if name != "key"}
    revoked = client.delete(f"/admin/v1/keys/{key['id']}")
    assert revoked.status_code == 200
    assert revoked.json()["revoked_at"] is not None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/admin/v1/keys", {"name": "x", "scopes": ["root"]}, "scopes[0]"),
        ("/admin/v1/keys", {"name": "x", "scopes": []}, "scopes"),
        ("/admin/v1/keys", {"name": ""}, "name"),
        ("/admin/v1/keys", {}, "name"),
        ("/admin/v1/keys", {"name": "x", "secret": "mine"}, "secret"),
        ("/admin/v1/tenants", {"id": "acme", "max_queued_jobs": -1}, "max_queued_jobs"),
        ("/admin/v1/tenants", {"id": "acme", "max_queued_jobs": True}, "max_queued_jobs"),
        ("/admin/v1/tenants", {"id": "acme", "max_queued_jobs": 1.5}, "max_queued_jobs"),
        ("/admin/v1/tenants", {"id": 7}, "id"),
        ("/admin/v1/tenants/default", {"id": "other"}, "id"),
    ],
)
def test_a_wrong_field_is_named(sqlite_client, path, body, param):
    reply = sqlite_client.post(path, json=body)
    assert reply.status_code == 400
    assert error_of(reply)["param"] == param


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/admin/v1/tenants", {"id": "default"}, 400),
        ("POST", "/admin/v1/tenants", {"id": "No Spaces"}, 400),
        ("POST", "/admin/v1/tenants/nobody", {"max_queued_jobs": 1}, 404),
        ("POST", "/admin/v1/tenants/%00", {"max_queued_jobs": 1}, 404),
        ("POST", "/admin/v1/keys", {"tenant": "nobody", "name": "x"}, 404),
        ("POST", "/admin/v1/keys", {"tenant": "\0", "name": "x"}, 400),
        ("POST", "/admin/v1/keys", {"name": "\0"}, 400),
        ("DELETE", "/admin/v1/keys/000000000000", None, 404),
        ("DELETE", "/admin/v1/keys/%00", None, 404),
    ],
)
def test_what_is_not_there_or_cannot_be_is_said(client, method, path, body, status):
    reply = client.request(method, path, json=body)
    assert reply.status_code == status, reply.text
    error_of(reply)
