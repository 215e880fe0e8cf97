"""Live, ready, and the numbers."""

import redis
from sqlalchemy import text

from jobs import claims
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


def test_not_ready_on_tables_of_another_version(client, hands):
    with hands.database.begin() as connection:
        connection.execute(text("ALTER TABLE jobs RENAME COLUMN checkpoint TO other"))
    reply = client.get("/health/ready")
    assert reply.status_code == 503
    (reason,) = reply.json()["reasons"]
    assert reason["code"] == "schema"
    assert "tokenmill migrate" in reason["message"]


def test_not_ready_while_the_only_engine_of_a_model_does_not_start(client, hands):
    for failing, status in ((True, 503), (False, 200)):
        hands.call(
            claims.beat, hands.worker_id,
            lease_s=30, stats={"engine_failing": failing}, checkpoints={}, held=[],
        )  # fmt: skip
        reply = client.get("/health/ready")
        assert reply.status_code == status
        assert [reason["code"] for reason in reply.json()["reasons"]] == ["engine"] * failing


def test_a_redis_that_answers_and_takes_nothing_is_not_ready(sqlite_client, hands, valkey_url):
    with redis.Redis.from_url(valkey_url) as broker:
        before = broker.config_get("maxmemory")["maxmemory"]
        try:
            broker.config_set("maxmemory", 1)
            reply = sqlite_client.get("/health/ready")
        finally:
            broker.config_set("maxmemory", before)
    assert reply.status_code == 503
    (reason,) = reply.json()["reasons"]
    assert reason["code"] == "redis"
    assert "maxmemory" in reason["message"]
    assert sqlite_client.get("/health/ready").status_code == 200


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
