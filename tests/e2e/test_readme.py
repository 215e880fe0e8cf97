"""The README's examples, run as they stand there."""

import json
import re
import subprocess
import sys

import pytest

from cli.client import ENDED, Refused
from tests.conftest import REPOSITORY
from tests.e2e.conftest import environment, wait_until

README = (REPOSITORY / "README.md").read_text()
MODEL = "smollm2-135m-instruct"


def python_example(first_line):
    [example] = [
        block for block in re.findall(r"```python\n(.*?)```", README, re.S)
        if block.startswith(first_line)
    ]  # fmt: skip
    return example


def ended(client, job_id):
    """The job once a worker has put its row in and it has ended."""
    try:
        job = client.job(job_id, wait_s=5)
    except Refused:
        return None
    return job if job["status"] in ENDED else None


def test_the_http_example_is_a_job_that_is_accepted_and_done(client):
    [written] = re.findall(r"-d '(\{.*?\})'\n", README, re.S)
    [accepted] = client.submit([json.loads(written.replace(MODEL, "tiny"))], key="row-17")
    job = client.wait([accepted["id"]])[accepted["id"]]
    assert (job["status"], job["custom_id"]) == ("succeeded", "row-17")
    assert job["response"]["body"]["object"] == "chat.completion"


def test_the_celery_example_sends_a_job_and_cancels_it(up, client):
    redis_url = up.descendant("cli.main", "api").environ()["REDIS_URL"]
    example = python_example("import os\nfrom celery").replace(MODEL, "tiny")
    sent, revoked = example.split("task.revoke")

    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(up.data_dir) | {"REDIS_URL": redis_url},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    job_id = run(sent)
    job = wait_until(lambda: ended(client, job_id))
    assert (job["status"], job["usage"]["completion_tokens"] > 0) == ("succeeded", True)
    job_id = run(sent.replace('"max_tokens": 64', '"max_tokens": 480, "ignore_eos": True')
                 + "import time; time.sleep(0.5)\ntask.revoke" + revoked)  # fmt: skip
    assert wait_until(lambda: ended(client, job_id))["status"] == "cancelled"


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
