"""A quota over HTTP: 429 with the quota's name and when to come back."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.api.conftest import completion, error_of, submit
from tests.api.test_guard import door  # noqa: F401  a server that asks for keys


@pytest.mark.parametrize("quota", ["requests_per_minute", "tokens_per_minute", "max_queued_jobs"])
def test_of_fifty_calls_at_once_exactly_ten_are_admitted(door, quota):  # noqa: F811
    """And who is not is told when to come back."""
    theirs = door.client.post("/v1/jobs", json=completion(), headers=door.key("globex")).json()
    tokens = theirs["usage"]["prompt_tokens"] + completion()["body"]["max_tokens"]
    limit = 10 * tokens + tokens - 1 if quota == "tokens_per_minute" else 10
    door.client.headers.update(door.key("acme"))
    changed = door.client.post(
        "/admin/v1/tenants/acme", json={quota: limit}, headers=door.key(scopes=["admin"])
    )
    assert changed.status_code == 200, changed.text
    with ThreadPoolExecutor(50) as threads:
        replies = list(
            threads.map(lambda _: door.client.post("/v1/jobs", json=completion()), range(50))
        )
    statuses = [reply.status_code for reply in replies]
    assert (statuses.count(202), statuses.count(429)) == (10, 40)
    assert len(door.client.get("/v1/jobs", params={"limit": 1000}).json()["data"]) == 10
    for refused in (reply for reply in replies if reply.status_code == 429):
        assert error_of(refused)["code"] == quota
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
