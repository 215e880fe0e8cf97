"""A quota over HTTP: 429 with the quota's name and when to come back."""

from concurrent.futures import ThreadPoolExecutor

from tests.api.conftest import completion, error_of, submit
from tests.api.test_guard import door  # noqa: F401  a server that asks for keys


def test_a_tenant_over_its_quota_is_told_when_to_come_back(door):  # noqa: F811
    door.client.headers.update(door.key("acme"))
    admin = door.key(scopes=["admin"])
    changed = door.client.post(
        "/admin/v1/tenants/acme", json={"requests_per_minute": 10}, headers=admin
    )
    assert changed.status_code == 200, changed.text
    with ThreadPoolExecutor(16) as threads:
        replies = list(
            threads.map(lambda _: door.client.post("/v1/jobs", json=completion()), range(50))
        )
    statuses = [reply.status_code for reply in replies]
    assert (statuses.count(202), statuses.count(429)) == (10, 40)
    [refused, *_] = [reply for reply in replies if reply.status_code == 429]
    assert error_of(refused)["code"] == "requests_per_minute"
    assert error_of(refused)["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert "x-should-retry" not in refused.headers


def test_what_no_waiting_helps_is_said_to_be_so(door):  # noqa: F811
    door.client.headers.update(door.key("acme"))
    door.client.post(
        "/admin/v1/tenants/acme", json={"max_queued_jobs": 2}, headers=door.key(scopes=["admin"])
    )
    reply = door.client.post("/v1/jobs", json=[completion()] * 3)
    assert reply.status_code == 429
    assert reply.headers["x-should-retry"] == "false"
    submit(door.client)
    submit(door.client)
    reply = door.client.post("/v1/jobs", json=completion())
    assert reply.status_code == 429
    assert error_of(reply)["code"] == "max_queued_jobs"
    assert int(reply.headers["retry-after"]) >= 1
    assert "x-should-retry" not in reply.headers
