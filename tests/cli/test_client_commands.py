"""What `tokenmill status` shows, on a terminal as narrow as they come."""

import time

import pytest
from rich.console import Console

from cli.client_commands import _show_service, text_of
from jobs.records import new_job_id

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
NOW = time.time()


def job(**values):
    return {
        "id": new_job_id(),
        "custom_id": None,
        "model": "smollm2-135m-instruct",
        "status": "succeeded",
        "created_at": NOW,
        "usage": {"total_tokens": 123_456},
        "timings": {"total_s": 1234.5},
    } | values


def shown(jobs, width=80, is_ready=True, **parts):
    console = Console(width=width)
    with console.capture() as capture:
        _show_service(console, "http://127.0.0.1:8000", is_ready, {"status": "", **parts}, jobs)
    return capture.get().splitlines()


MANY = {
    "plain": [job() for _ in range(3)],
    "long custom ids": [job(custom_id=f"a-very-long-custom-id-that-goes-on-{n}") for n in range(3)],
    "two models": [job(model="qwen3-0.6b", custom_id="row-17"), job()],
    "of long ago": [job(created_at=NOW - 40 * 86_400)],
    "in markup": [job(custom_id="[red]x[/red]")],
}


@pytest.mark.parametrize("jobs", MANY.values(), ids=MANY)
@pytest.mark.parametrize("width", [80, 200])
def test_no_id_is_cut_and_no_moment_folded(jobs, width):
    lines = shown(jobs, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for each in jobs:
        [line] = [line for line in lines if each["id"] in line]
        moment = time.localtime(each["created_at"])
        old = NOW - each["created_at"] > 86_400
        assert time.strftime("%m-%d %H:%M" if old else "%H:%M:%S", moment) in line
        assert "123456" in line
        assert "1234.50" in line
        for name in ("custom_id", "model"):
            folded = "".join(text.split())
            start = (each[name] or "")[:3]
            assert start in folded


def test_a_ready_service_with_nothing_to_say_says_no_more():
    assert shown([], reasons=[], warnings=[]) == ["http://127.0.0.1:8000 is ready"]


def test_reasons_and_warnings_are_sentences():
    reasons = [{"code": "worker", "message": "no live worker for model [tiny]"}]
    warnings = [{"code": "redis_eviction", "message": "Redis may evict"}]
    assert shown([], is_ready=False, reasons=reasons, warnings=warnings) == [
        "http://127.0.0.1:8000 is not ready",
        "  no live worker for model [tiny]",
        "  warning: Redis may evict",
    ]


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ({"text": "a time"}, "a time"),
        ({"message": {"content": "Hi"}}, "Hi"),
        ({"message": {"content": None, "reasoning_content": "hm"}}, "hm"),
        ({"message": {"content": None, "tool_calls": [CALL, CALL]}}, 'f({"a": 1})\nf({"a": 1})'),
        ({"message": {"content": "So:", "tool_calls": [CALL]}}, 'So:\nf({"a": 1})'),
    ],
)
def test_a_reply_without_content_shows_its_calls_or_its_thought(choice, shown):
    assert text_of({"response": {"body": {"choices": [choice]}}}) == shown
