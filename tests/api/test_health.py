"""Live, ready, and the numbers."""

import redis

from tests.api.conftest import MODEL


def test_live_says_nothing_of_anything_else(sqlite_client):
    reply = sqlite_client.get("/health/live")
    assert (reply.status_code, reply.json()) == (200, {"status": "live"})


def test_not_ready_without_a_live_worker_for_a_served_model(client):
    reply = client.get("/health/ready")
    assert reply.status_code == 503
    (reason,) = reply.json()["reasons"]
    assert reason["code"] == "worker"
    assert MODEL in reason["message"]


def test_ready_with_database_redis_and_a_worker(client, hands):
    reply = client.get("/health/ready")
    assert reply.status_code == 200
    assert reply.json() == {"status": "ready", "reasons": [], "warnings": []}


def test_a_policy_that_evicts_messages_is_a_warning(sqlite_client, hands, valkey_url):
    with redis.Redis.from_url(valkey_url) as broker:
        before = broker.config_get("maxmemory-policy")["maxmemory-policy"]
        try:
            broker.config_set("maxmemory-policy", "allkeys-lru")
            reply = sqlite_client.get("/health/ready")
        finally:
            broker.config_set("maxmemory-policy", before)
    assert reply.status_code == 200
    (warning,) = reply.json()["warnings"]
    assert warning["code"] == "redis_eviction"
    assert "allkeys-lru" in warning["message"]
