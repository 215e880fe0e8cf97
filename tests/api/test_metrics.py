"""GET /metrics, read as Prometheus reads it."""

from dataclasses import fields

from prometheus_client.parser import text_string_to_metric_families

from api.routes.metrics import COUNTERS, GAUGES, OTHER
from engine.outputs import EngineStats
from jobs import attempts, claims, store
from jobs.records import NewJob
from jobs.tenants import DEFAULT_TENANT
from tests.api.conftest import MODEL, completion, submit

STATS = {
    "num_steps": 120.0,
    "num_running": 3.0,
    "num_waiting": 1.0,
    "num_blocks": 64.0,
    "num_free_blocks": 60.0,
    "num_preemptions": 2.0,
    "prompt_tokens": 400.0,
    "cached_tokens": 100.0,
    "generated_tokens": 900.0,
    "last_step_seqs": 3.0,
    "last_step_tokens": 17.0,
    "max_num_batched_tokens": 256.0,
    "peak_step_seqs": 8.0,
    "step_bounds_s": [0.001, 0.002, 0.005, 10.0],
    "steps_by_time": [0, 100, 15, 0, 5],
    "step_s": 71.5,
    "engine_restarts": 1,
    "engine_pid": 4711,
}

DEATH = {"worker_id": "w1", "model": MODEL, "ending": "SIGKILL", "job_ids": ["job_1"]}


def samples(client) -> dict[tuple, float]:
    reply = client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def test_jobs_are_counted_by_state_and_model(client, hands):
    submit(client, completion(max_tokens=7))
    hands.finish(hands.claim(submit(client)["id"]))
    seen = samples(client)
    assert seen["tokenmill_jobs", "queued", MODEL] == 1
    assert seen["tokenmill_jobs", "succeeded", MODEL] == 1
    assert seen["tokenmill_jobs", "failed", MODEL] == 0
    assert seen["tokenmill_waiting_max_tokens", "0", MODEL] == 7
    assert seen["tokenmill_waiting_prompt_tokens", "0", MODEL] > 0
    assert seen["tokenmill_queue_age_seconds", MODEL] >= 0
    assert seen["tokenmill_workers", MODEL] == 1


def test_tokens_wait_by_priority(client):
    submit(client, completion(max_tokens=7), priority=3)
    submit(client, completion(max_tokens=5), priority=-1)
    seen = samples(client)
    assert seen["tokenmill_waiting_max_tokens", "3", MODEL] == 7
    assert seen["tokenmill_waiting_max_tokens", "-1", MODEL] == 5


def test_the_last_minutes_say_how_long_jobs_took_and_what_they_wasted(client, hands):
    for wasted in (0, 6):
        claimed = hands.claim(submit(client)["id"])
        moment = hands.call(lambda connection, now: now)
        hands.finish(claimed, first_token_at=moment, finished_at=moment + 6, wasted_tokens=wasted)
    seen = samples(client)
    assert seen["tokenmill_recent_jobs", MODEL] == 2
    assert seen["tokenmill_recent_attempts", MODEL] == 2
    assert seen["tokenmill_recent_wasted_tokens", MODEL] == 6
    assert abs(seen["tokenmill_recent_tpot_seconds", "0.5", MODEL] - 2) < 1e-3
    assert 0 < seen["tokenmill_recent_ttft_seconds", "0.99", MODEL] < 60
    assert 0 <= seen["tokenmill_recent_queue_seconds", "0.9", MODEL] < 60


def test_jobs_of_models_not_served_are_one_series(client, hands):
    """As of Celery messages, which may name any model."""
    now = hands.call(lambda connection, now: now)
    with hands.database.begin() as connection:
        strangers = [
            NewJob(url="/v1/completions", model=f"m{i}", body={}, prompt_tokens=2, max_tokens=3)
            for i in range(3)
        ]
        store.submit(connection, strangers, tenant=DEFAULT_TENANT, now=now)
        store.cancel(connection, strangers[0].id, tenant=DEFAULT_TENANT, now=now)
    submit(client, completion(max_tokens=7))
    seen = samples(client)
    assert {key[1] for key in seen if key[0] == "tokenmill_queue_age_seconds"} == {MODEL, OTHER}
    assert seen["tokenmill_jobs", *sorted(("queued", OTHER))] == 2
    assert seen["tokenmill_jobs", "cancelled", OTHER] == 1
    assert seen["tokenmill_waiting_prompt_tokens", "0", OTHER] == 4
    assert seen["tokenmill_waiting_max_tokens", "0", OTHER] == 6
    assert seen["tokenmill_waiting_max_tokens", "0", MODEL] == 7


def test_counts_outlive_the_jobs_they_were_made_of(client, hands):
    before = samples(client)
    assert before["tokenmill_attempts_total", "succeeded"] == 0
    assert before["tokenmill_stale_writes_refused_total", "result"] == 0
    claimed = hands.claim(submit(client)["id"])
    hands.finish(claimed, wasted_tokens=6)
    hands.call(attempts.record_death, "one", **DEATH)
    with hands.database.begin() as connection:
        assert store.delete(connection, claimed.id, tenant=DEFAULT_TENANT)
    seen = samples(client)
    assert seen["tokenmill_attempts_total", "succeeded"] == 1
    assert seen["tokenmill_attempts_total", "suspect"] == 0
    assert seen["tokenmill_wasted_tokens_total",] == 6
    assert seen["tokenmill_engine_deaths_total", "SIGKILL"] == 1


def test_engines_show_what_their_workers_said(client, hands):
    hands.call(claims.beat, hands.worker_id, lease_s=30, stats=STATS, checkpoints={}, held=[])
    seen = samples(client)
    label = (MODEL, hands.worker_id)
    assert seen["tokenmill_engine_steps_total", *label] == 120
    assert seen["tokenmill_engine_batch_sequences", *label] == 3
    assert seen["tokenmill_engine_batch_tokens_limit", *label] == 256
    assert seen["tokenmill_engine_kv_blocks", *label] == 64
    assert seen["tokenmill_engine_kv_blocks_free", *label] == 60
    assert seen["tokenmill_engine_preemptions_total", *label] == 2
    assert seen["tokenmill_engine_restarts_total", *label] == 1
    assert seen["tokenmill_prompt_tokens_total", *label] == 400
    assert seen["tokenmill_prefix_hit_tokens_total", *label] == 100
    assert seen["tokenmill_generated_tokens_total", *label] == 900


def test_how_long_steps_took_is_a_histogram(client, hands):
    hands.call(claims.beat, hands.worker_id, lease_s=30, stats=STATS, checkpoints={}, held=[])
    seen = samples(client)
    name, label = "tokenmill_engine_step_seconds", (MODEL, hands.worker_id)
    up_to = {
        bound: seen[f"{name}_bucket", *sorted((bound, *label))]
        for bound in ("0.001", "0.002", "0.005", "10.0", "+Inf")
    }
    assert up_to == {"0.001": 0, "0.002": 100, "0.005": 115, "10.0": 115, "+Inf": 120}
    assert seen[f"{name}_count", *label] == 120
    assert seen[f"{name}_sum", *label] == 71.5


def test_every_name_is_ours_and_has_a_meaning(sqlite_client, hands):
    submit(sqlite_client)
    text = sqlite_client.get("/metrics").text
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("tokenmill_")
        assert family.documentation


def test_the_numbers_asked_of_workers_are_those_an_engine_has():
    told = {field.name for field in fields(EngineStats)} | {"engine_restarts"}
    assert told >= GAUGES.keys() | COUNTERS.keys() | {"step_bounds_s", "steps_by_time", "step_s"}
