"""A few of the requests of `make fuzz`, on every commit; and what such a service logs."""

import json
import shlex
from urllib.parse import urlsplit

import httpx
import pytest

from jobs.celery_app import make_app
from jobs.settings import Settings
from tests.e2e import fuzz
from tests.e2e.conftest import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = "a canary in a coal mine"


@pytest.fixture(scope="module")
def up(tmp_path_factory, tiny_llama_dir):
    running = fuzz.start(tmp_path_factory.mktemp("fuzz"), tiny_llama_dir)
    try:
        yield running
    finally:
        running.end()


def test_no_reply_is_a_fault_or_another_than_the_document_says(up, tmp_path):
    engine = up.descendant("worker.engine_process").pid
    report = fuzz.fuzz(up, tmp_path, num_requests=200, phases="fuzzing", seed=0)
    assert report.passed, report.text
    assert report.num_requests >= 150, report.text
    assert up.descendant("worker.engine_process").pid == engine


def test_no_line_of_a_whole_service_holds_what_is_secret(up):
    key = fuzz.key_of(up)
    headers = {"authorization": f"Bearer {key}"}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 30}
    with httpx.Client(base_url=up.url, headers=headers, trust_env=False, timeout=60) as client:
        reply = client.post("/v1/chat/completions", json=chat | {"ignore_eos": True})
        said = reply.json()["choices"][0]["message"]["content"]
        client.post("/v1/chat/completions", json=chat | {"stream": True})
        client.post("/v1/chat/completions", json=chat | {"temperature": PROMPT, PROMPT: 1})
        client.post(
            "/v1/responses", json={"model": "tiny", "input": PROMPT, "max_output_tokens": 2}
        )
        hook = {"name": "x", "url": "https://shop.example/", "event_types": ["batch.failed"]}
        secret = client.post("/v1/webhook_endpoints", json=hook).json()["signing_secret"]
        client.get("/v1/jobs", headers={"authorization": f"Bearer {key}x"})
        words = shlex.split((up.data_dir / "env").read_text())
        settings = Settings.from_env(dict(word.split("=", 1) for word in words))
        job = {"url": "/v1/completions", "body": {"model": "tiny", "prompt": PROMPT}}
        sent = make_app(settings).send_task("tokenmill.generate", kwargs=job)
        wait_until(lambda: sent.id in up.log.read_text())
    text = up.log.read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert {"debug", "info"} <= {line["level"] for line in lines}
    assert {"api.core", "worker.book"} <= {line["logger"] for line in lines}
    job_id = reply.json()["id"].replace("chatcmpl-", "job_")
    about = [line for line in lines if line.get("job_id") == job_id]
    request_ids = {line["request_id"] for line in about if "request_id" in line}
    assert request_ids == {reply.headers["x-request-id"]}
    assert {line["tenant"] for line in about if "tenant" in line} == {"default"}
    passwords = [urlsplit(settings.redis_url).password]
    for canary in (PROMPT, said[:20], key, key.rpartition("_")[2], secret, *passwords):
        assert canary
        assert canary not in text
        assert json.dumps(canary)[1:-1] not in text
    others = [line for line in text.splitlines() if not line.startswith("{")]
    assert len(others) < 30, others  # what `up` itself tells whoever started it
