"""The README's examples, run as they stand there."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.conftest import REPOSITORY
from tests.e2e.conftest import TOKENMILL

README = (REPOSITORY / "README.md").read_text()
MODEL = "smollm2-135m-instruct"
URL = "http://127.0.0.1:8000"


def blocks(kind):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M)
    return [block for named, block in fenced if named == kind]


def python_example(first_line):
    [example] = [block for block in blocks("python") if block.startswith(first_line)]
    return example


def curl_commands():
    """Without the prompt and the reply."""
    [example] = [block for block in blocks("") if block.startswith("$ curl")]
    return re.findall(r"^\$ (curl .*?)\n(?=\{)", example, re.S | re.M)


@pytest.fixture
def shell(up, tmp_path):
    """Runs lines in a shell at the top of a checkout, where `make up` has been run."""
    (tmp_path / ".tokenmill").symlink_to(up.data_dir)
    activate = Path(sys.prefix) / "bin" / "activate"
    assert activate.exists(), "the tests run in the environment that make has set up"
    (tmp_path / ".venv").symlink_to(sys.prefix)
    path = "/usr/bin:/bin"
    if not (Path(sys.prefix) / "bin" / "tokenmill").exists():  # not installed: a bare checkout
        wrapper = tmp_path / "bin" / "tokenmill"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(TOKENMILL)} "$@"\n')
        wrapper.chmod(0o755)
        path = f"{wrapper.parent}:{path}"

    def run(lines):
        done = subprocess.run(
            ["/bin/sh", "-e", "-c", lines],
            env={"PATH": path, "PYTHONPATH": str(REPOSITORY)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def without_curl(command):
    """What curl would do with it, its content type of -d included."""
    program, *words = shlex.split(command.replace("\\\n", ""))
    assert program == "curl"
    url, headers, data = None, {}, None
    while words:
        word = words.pop(0)
        if word == "-H":
            name, _, value = words.pop(0).partition(": ")
            headers[name.lower()] = value
        elif word == "-d":
            data = words.pop(0)
        elif word != "-s":
            url = word
    if data is None:
        return httpx.get(url, headers=headers, timeout=90).text
    form = {"content-type": "application/x-www-form-urlencoded"}
    return httpx.post(url, headers=form | headers, content=data, timeout=90).text


@pytest.mark.parametrize("by", ["curl", "httpx"])
def test_the_curl_commands_submit_a_job_and_wait_for_it(up, shell, by):
    if by == "curl" and not shutil.which("curl"):
        pytest.skip("no curl here")
    submit, wait = (
        command.replace(URL, up.url).replace(MODEL, "tiny").replace("row-17", f"row-{by}")
        for command in curl_commands()
    )
    run = shell if by == "curl" else without_curl
    accepted = json.loads(run(submit))
    assert (accepted.get("status"), accepted.get("custom_id")) == ("queued", f"row-{by}"), accepted
    job = json.loads(run(wait.replace("job_…", accepted["id"])))
    assert job["status"] == "succeeded"
    assert job["response"]["body"]["object"] == "chat.completion"


def test_the_commands_for_a_terminal_run_in_a_shell_of_the_readme(shell, tmp_path):
    [activate, environment] = blocks("sh")
    [commands] = [block for block in blocks("") if "tokenmill submit --prompt" in block]
    shown = shell(activate + environment + commands.replace(MODEL, "tiny"))
    assert "is ready" in shown
    [result] = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(result)["status"] == "succeeded"


def celery_example(up):
    """Its lines up to the job sent, and those that wait for the answer."""
    example = python_example("import os, time").replace(MODEL, "tiny").replace(URL, up.url)
    sent, separator, answered = example.partition("# no result backend")
    return sent, separator + answered


def run_python(shell, code):
    """In a shell that has read what the README's shells read."""
    return shell("".join(blocks("sh")) + f"python -c {shlex.quote(code)}").strip()


def test_the_celery_example_sends_a_job_and_prints_its_text(up, shell, client):
    sent, answered = celery_example(up)
    job_id, status, text = run_python(shell, sent + answered).split(maxsplit=2)
    job = client.job(job_id, wait_s=0)
    assert status == job["status"] == "succeeded"
    assert text.strip() == job["response"]["body"]["choices"][0]["text"].strip() != ""
    assert job["usage"]["completion_tokens"] > 0


def test_the_line_that_revokes_cancels_a_job_of_the_celery_example(up, shell, client):
    sent, answered = celery_example(up)
    longer = sent.replace('"max_tokens": 64', '"max_tokens": 480, "ignore_eos": True, "n": 16')
    assert longer != sent
    revoked = "time.sleep(0.2)\n" + python_example("task.revoke")
    job_id, *shown = run_python(shell, longer + revoked + answered).split()
    assert shown == ["cancelled", "None"]
    assert client.job(job_id, wait_s=0)["status"] == "cancelled"


@pytest.mark.slow
def test_the_library_example_prints_text(smollm2_dir):
    example = python_example("from engine import").replace(
        f".tokenmill/models/{MODEL}", str(smollm2_dir)
    )
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "prompt_tokens=" in done.stdout


ANSWER = """
import json, sys
from engine import EngineConfig, LLMEngine, SamplingParams
model, body = sys.argv[1], json.loads(sys.argv[2])["body"]
engine = LLMEngine(EngineConfig(model=model))
params = SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"])
engine.add_request("a", messages=body["messages"], params=params)
text = ""
while engine.has_unfinished:
    for update in engine.step():
        text += "".join(delta.text for delta in update.deltas)
print(text)
"""


@pytest.mark.slow
def test_the_reply_shown_is_what_the_demo_model_answers(smollm2_dir):
    job = shlex.split(curl_commands()[0])[-1]
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, str(smollm2_dir), job],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f'"content": {json.dumps(done.stdout.strip())}' in README
