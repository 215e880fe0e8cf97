"""A few of the requests of `make fuzz`, on every commit; what such a service logs and traces."""

import gzip
import itertools
import json
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from jobs.celery_app import make_app
from jobs.settings import Settings
from tests.e2e import fuzz
from tests.e2e.conftest import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = "a canary in a coal mine"


@pytest.fixture(scope="module")
def collector():
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def up(tmp_path_factory, tiny_llama_dir, collector):
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    running = fuzz.start(tmp_path_factory.mktemp("fuzz"), tiny_llama_dir, environ)
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
    for canary in (PROMPT, said[:20], key, key.split("_", 2)[2], secret, *passwords):
        assert canary
        assert canary not in text
        assert json.dumps(canary)[1:-1] not in text
    others = [line for line in text.splitlines() if not line.startswith("{")]
    assert len(others) < 30, others  # what `up` itself tells whoever started it


class Collector:
    """Takes OTLP over HTTP, as a collector would."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []  # with the name of the service
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                asked = ExportTraceServiceRequest.FromString(body)
                for resource in asked.resource_spans:
                    names = {each.key: each.value for each in resource.resource.attributes}
                    collector.spans += [
                        (names["service.name"].string_value, span)
                        for scope in resource.scope_spans
                        for span in scope.spans
                    ]
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def of(self, trace_id: str) -> dict[str, tuple[str, Span]]:
        return {
            span.name: (service, span)
            for service, span in list(self.spans)
            if span.trace_id.hex() == trace_id
        }


def test_a_call_is_traced_down_to_the_engine(up, collector):
    trace_id, caller = "ab" * 16, "cd" * 8
    headers = {
        "authorization": f"Bearer {fuzz.key_of(up)}",
        "traceparent": f"00-{trace_id}-{caller}-01",
    }
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    reply = httpx.post(
        f"{up.url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=60
    )
    names = {"POST /v1/completions", "generate", "queue", "admit", "prefill", "decode"}
    wait_until(lambda: set(collector.of(trace_id)) >= names)
    spans = collector.of(trace_id)
    assert set(spans) == names
    call = spans["POST /v1/completions"][1]
    whole = spans["generate"][1]
    assert call.parent_span_id.hex() == caller
    assert whole.parent_span_id == call.span_id
    parts = [spans[name][1] for name in ("queue", "admit", "prefill", "decode")]
    assert {part.parent_span_id for part in parts} == {whole.span_id}
    for before, behind in itertools.pairwise(parts):
        assert before.start_time_unix_nano <= before.end_time_unix_nano
        assert before.end_time_unix_nano == behind.start_time_unix_nano
    assert {service for service, _ in spans.values()} == {"tokenmill-api", "tokenmill-worker"}
    attributes = {each.key: each.value for each in whole.attributes}
    job_id = reply.json()["id"].replace("cmpl-", "job_")
    assert attributes["tokenmill.job.id"].string_value == job_id
    assert attributes["gen_ai.usage.output_tokens"].int_value == 8
    assert PROMPT not in str(collector.spans)
    assert reply.json()["choices"][0]["text"] not in str(collector.spans)
