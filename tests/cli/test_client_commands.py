"""What `tokenmill status` shows, on a terminal as narrow as they come."""

import time

import pytest
from click.testing import CliRunner
from rich.cells import cell_len
from rich.console import Console

from cli.client_commands import _show_service, submit, text_of
from jobs.openai_response_object import output_items
from jobs.openai_tools import ToolCall
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


CELERY_ID = "job_0f8fad5bd9cb469fa16570867728950e"  # as a Celery client's: 36 characters
UUID = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
MANY = {
    "plain": [job() for _ in range(3)],
    "short custom ids": [job(id=CELERY_ID, custom_id="request-2")],
    "long custom ids": [job(id=CELERY_ID, custom_id=UUID), job(custom_id="request-2")],
    "longer than any terminal": [job(id=CELERY_ID, custom_id=UUID * 10)],
    "two models": [job(id=CELERY_ID, model="qwen3-0.6b", custom_id="row-17"), job()],
    "of long ago": [job(created_at=NOW - 40 * 86_400)],
    "in markup": [job(custom_id="[red]x[/red]")],
    "in two lines": [job(custom_id="row\n17")],
    "wide": [job(custom_id="作業" * 5)],
}


@pytest.mark.parametrize("jobs", MANY.values(), ids=MANY)
@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_job_has_one_line_and_what_does_not_fit_whole_is_left_out_by_name(jobs, width):
    lines = shown(jobs, width)
    assert max(map(cell_len, lines)) <= width
    several = len({each["model"] for each in jobs}) > 1
    head = next(i for i, line in enumerate(lines) if line.startswith("job "))
    rows, left_out = lines[head + 1 : head + 1 + len(jobs)], lines[head + 1 + len(jobs) :]
    for each, line in zip(jobs, rows, strict=True):
        moment = time.localtime(each["created_at"])
        old = NOW - each["created_at"] > 86_400
        cells = {
            "job": each["id"],
            "created": time.strftime("%m-%d %H:%M" if old else "%H:%M:%S", moment),
            "tokens": "123456",
            "total s": "1234.50",
            "custom id": (each["custom_id"] or "").replace("\n", "\\n"),
        } | ({"model": each["model"]} if several else {})
        for name, cell in cells.items():
            if name in lines[head]:
                assert cell in line
            elif any(other["custom_id"] for other in jobs) or name != "custom id":
                assert name in " ".join(left_out)
    assert "…" not in "".join(lines)
    assert "status" in lines[head] or width == 40
    if width == 200 and all(len(each["custom_id"] or "") < 100 for each in jobs):
        assert left_out == []


def test_an_id_goes_before_moments_and_numbers():
    [*_, head, line, left_out] = shown([job(id=CELERY_ID, custom_id="a" * 28)], 80)
    assert head.split("  ")[0] == "job"
    assert line.split() == [CELERY_ID, "succeeded", "a" * 28]
    assert left_out == "no room for: created, tokens, total s; --json shows all"


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


@pytest.mark.parametrize(
    ("content", "thought", "calls", "shown"),
    [
        ("", "", 0, ""),
        ("Hi", "hm", 0, "Hi"),
        ("", "hm", 0, "hm"),
        ("", "hm", 2, 'f({"a": 1})\nf({"a": 1})'),
        ("So:", "", 1, 'So:\nf({"a": 1})'),
    ],
)
def test_a_response_shows_the_same(content, thought, calls, shown):
    items = output_items("job_1", content, thought, [ToolCall("f", '{"a": 1}')] * calls, None)
    assert text_of({"response": {"body": {"output": items}}}) == shown


@pytest.mark.parametrize(
    "option", ["--system=Be brief.", "--max-tokens=1", "--temperature=0", "--priority=0"]
)
def test_what_a_files_lines_say_themselves_is_no_option_beside_it(option, tmp_path):
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"url": "/v1/completions", "body": {"prompt": "Once"}}\n')
    done = CliRunner().invoke(submit, ["--file", str(file), option])
    assert done.exit_code == 2
    assert f"{option.partition('=')[0]} is for --prompt" in done.output
