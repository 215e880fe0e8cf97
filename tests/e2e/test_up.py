"""The service on the embedded default, from the outside: HTTP and commands."""

import json
import shutil
import signal
import stat
import subprocess

import httpx
import psutil
import pytest
from sqlalchemy import create_engine, text

from cli import client_commands
from cli.client import Client, ClientError, Refused
from tests.conftest import REPOSITORY
from tests.e2e.conftest import TOKENMILL, environment, start_up, wait_until


def completion(**body):
    return {
        "url": "/v1/completions",
        "body": {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 8, **body},
    }


def chat(content, **body):
    return {
        "url": "/v1/chat/completions",
        "body": {
            "model": "tiny",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": content}],
            **body,
        },
    }


def tokenmill(up, *arguments, stdin=None):
    return subprocess.run(
        [*TOKENMILL, *arguments],
        env=up.environ,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_job_goes_in_over_http_and_comes_out_with_text_usage_and_timings(client):
    [accepted] = client.submit([completion(ignore_eos=True) | {"custom_id": "row-17"}])
    assert accepted["status"] == "queued"
    job = client.job(accepted["id"], wait_s=60)
    assert (job["status"], job["custom_id"], job["attempt"]) == ("succeeded", "row-17", 1)
    body = job["response"]["body"]
    assert (body["object"], body["choices"][0]["finish_reason"]) == ("text_completion", "length")
    assert body["choices"][0]["text"]
    assert job["usage"]["completion_tokens"] == 8
    assert job["usage"]["prompt_tokens"] > 4
    timings = job["timings"]
    assert 0 <= timings["queue_s"] <= timings["ttft_s"] <= timings["total_s"]
    assert timings["tpot_s"] > 0


def test_what_http_shows_is_what_the_row_holds(up, client):
    [accepted] = client.submit([chat("what is a job?", ignore_eos=True)])
    job = client.wait([accepted["id"]])[accepted["id"]]
    engine = create_engine(f"sqlite:///{up.data_dir / 'tokenmill.db'}")
    with engine.connect() as connection:
        row = connection.execute(
            text("SELECT state, output, prompt_tokens, completion_tokens FROM jobs WHERE id = :id"),
            {"id": job["id"]},
        ).one()
    engine.dispose()
    assert row.state == job["status"] == "succeeded"
    assert json.loads(row.output) == job["response"]["body"]
    assert row.prompt_tokens == job["usage"]["prompt_tokens"]
    assert row.completion_tokens == job["usage"]["completion_tokens"] == 8


def test_many_jobs_share_steps_and_all_end_in_the_order_of_their_ids(client):
    jobs = client.submit(
        [completion(prompt=f"number {n}", max_tokens=24, ignore_eos=True) for n in range(40)]
    )
    ended = client.wait([job["id"] for job in jobs])
    assert {job["status"] for job in ended.values()} == {"succeeded"}
    assert {job["usage"]["completion_tokens"] for job in ended.values()} == {24}
    assert [job["id"] for job in client.newest(40)] == [job["id"] for job in reversed(jobs)]


def test_the_same_key_finds_the_same_job(client):
    first = client.submit([completion()], key="once")
    again = client.submit([completion()], key="once")
    assert [job["id"] for job in first] == [job["id"] for job in again]
    with pytest.raises(Refused) as refused:
        client.submit([completion(max_tokens=9)], key="once")
    assert refused.value.status == 409


def test_greedy_text_is_the_same_alone_and_in_company(client):
    [alone] = client.submit([completion(temperature=0, max_tokens=32, ignore_eos=True)])
    text_alone = client.wait([alone["id"]])[alone["id"]]["response"]["body"]["choices"][0]["text"]
    company = client.submit(
        [completion(temperature=0, max_tokens=32, ignore_eos=True)]
        + [completion(prompt=f"other {n}", max_tokens=16) for n in range(15)]
    )
    ended = client.wait([job["id"] for job in company])
    assert ended[company[0]["id"]]["response"]["body"]["choices"][0]["text"] == text_alone


def test_a_running_job_is_cancelled_and_never_shows_output(up, client):
    [victim] = client.submit([completion(max_tokens=480, ignore_eos=True)])
    wait_until(lambda: client.job(victim["id"])["status"] == "running")
    assert client.cancel(victim["id"])["status"] == "cancelled"
    # the engine goes on with others, and frees what the victim held
    [other] = client.submit([completion()])
    assert client.wait([other["id"]])[other["id"]]["status"] == "succeeded"
    job = client.job(victim["id"])
    assert (job["status"], job["response"]) == ("cancelled", None)
    assert client.cancel(victim["id"]) == job


BAD_BODIES = {
    "an unknown model": (completion(model="nobody"), "model", "tiny"),
    "an empty prompt": (completion(prompt=""), "prompt", "empty"),
    "more tokens than fit": (completion(max_tokens=5000), "max_tokens", "512"),
    "a token id out of range": (completion(prompt=[5, 2**31]), "prompt", "2147483648"),
    "a negative token id": (completion(prompt=[-1]), "prompt", "-1"),
    "a negative temperature": (completion(temperature=-1), "temperature", "[0, 2]"),
    "a temperature of NaN": (completion(temperature=float("nan")), "temperature", "NaN"),
    "no samples": (completion(n=0), "n", "1"),
    "an unknown field": (completion(colour="blue"), "colour", "colour"),
    "a lone surrogate": (completion(prompt="\ud800"), "prompt", "surrogate"),
}


@pytest.mark.parametrize(("wrong", "field", "word"), BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_bad_body_is_refused_by_name_and_the_engine_does_not_notice(up, wrong, field, word):
    engine = up.descendant("worker.engine_process")
    reply = post_jobs(up, json.dumps(wrong))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"].rpartition("body.")[2] == field
    assert word in error["message"]
    assert up.descendant("worker.engine_process") == engine


@pytest.mark.parametrize(
    ("content", "status", "word"),
    [
        pytest.param("[" * 100 + "]" * 100, 400, "32", id="deep"),
        pytest.param("[" * 100_000 + "]" * 100_000, 400, "32", id="deeper than a stack"),
        pytest.param(json.dumps(completion(prompt="x" * 5_000_000)), 413, "4194304", id="5 MB"),
    ],
)
def test_a_body_too_deep_or_too_large_is_refused_and_the_engine_does_not_notice(
    up, content, status, word
):
    engine = up.descendant("worker.engine_process")
    reply = post_jobs(up, content)
    assert reply.status_code == status, reply.text
    assert word in reply.json()["error"]["message"]
    assert up.descendant("worker.engine_process") == engine


def post_jobs(up, content):
    headers = {"content-type": "application/json"}
    return httpx.post(f"{up.url}/v1/jobs", content=content, headers=headers, trust_env=False)


def test_submit_prints_answers_and_its_exit_status_tells_failure(up, tmp_path):
    done = tokenmill(up, "submit", "-p", "hello", "--max-tokens", "4", "--json")
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    assert (job["status"], job["usage"]["completion_tokens"] <= 4) == ("succeeded", True)
    lines = "\n".join(json.dumps(chat(f"line {n}") | {"custom_id": str(n)}) for n in range(3))
    done = tokenmill(up, "submit", "--file", "-", "--json", stdin=lines)
    assert [json.loads(line)["custom_id"] for line in done.stdout.splitlines()] == ["0", "1", "2"]
    done = tokenmill(up, "submit", "-p", "hello", "--temperature", "-1")
    assert done.returncode == 1
    assert "temperature" in done.stderr


def test_submit_names_each_bad_line_of_a_file_in_one_way(up):
    good = json.dumps(chat("hello"))
    done = tokenmill(up, "submit", "--file", "-", stdin=f"{good}\n{{\n\n[]\n{good}\n")
    assert done.returncode == 1
    assert [line.partition(": ")[0] for line in done.stderr.splitlines()] == [
        "Error", "line 4"
    ]  # fmt: skip
    assert "line 2: not JSON: " in done.stderr
    assert "line 4: not a job: it has no object `body`" in done.stderr
    bad = json.dumps(chat("hello", temperature=-1))
    done = tokenmill(up, "submit", "--file", "-", stdin=f"{good}\n\n{bad}\n")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: line 3: "), done.stderr
    assert done.stderr.endswith("(body.temperature)\n"), done.stderr
    done = tokenmill(up, "submit", "-p", "hello", "--temperature", "-1")
    assert "job 0" not in done.stderr


def test_a_bad_line_behind_a_whole_call_is_named_by_its_line(client, monkeypatch):
    monkeypatch.setattr(client_commands, "MOST_JOBS_PER_CALL", 3)
    jobs = {f"line {n}: ": completion(max_tokens=1) for n in range(1, 6)}
    jobs["line 9: "] = completion(n=0)
    with pytest.raises(ClientError, match=r"line 9: n .*\(body.n\); the 3 jobs before were"):
        client_commands._submit_all(client, jobs, None)


def test_status_tells_ready_from_not_ready(up, client):
    done = tokenmill(up, "status")
    assert done.returncode == 0
    assert "is ready" in done.stdout
    [job] = client.submit([completion()])
    client.wait([job["id"]])
    done = tokenmill(up, "status", job["id"])
    assert (done.returncode, "succeeded" in done.stdout) == (0, True)
    assert tokenmill(up, "status", "job_unknown").returncode == 1
    assert tokenmill(up, "status", "--url", "http://127.0.0.1:9", "--quiet").returncode == 1


def test_the_doctor_sees_the_live_worker(up):
    database = f"sqlite:///{up.data_dir / 'tokenmill.db'}"
    environ = environment(up.data_dir, models="tiny") | {"DATABASE_URL": database}
    done = subprocess.run(
        [*TOKENMILL, "doctor", "--only", "workers", "--only", "this-host"],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_a_second_service_on_the_same_folder_or_port_is_refused(up, tiny_llama_dir, tmp_path):
    same = ("up", "--model", f"tiny={tiny_llama_dir}")
    done = tokenmill(up, *same)
    assert done.returncode == 1
    assert "is in use: is the service running already?" in done.stderr
    done = tokenmill(up, *same, "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert "cannot listen on 127.0.0.1" in done.stderr
    assert (up.data_dir / "env").exists()


def test_its_environment_can_be_read_while_it_is_ready_and_by_its_owner_alone(
    tmp_path, tiny_llama_dir
):
    up = start_up(tmp_path, tiny_llama_dir)
    file = up.data_dir / "env"
    try:
        assert f"set -a; . {file}; set +a" in wait_until(lambda: last_line(up, "set -a"))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        show = f"set -a; . {file}; set +a; exec {' '.join(TOKENMILL)} status"
        done = subprocess.run(
            ["/bin/sh", "-c", show],
            env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, f"{up.url} is ready" in done.stdout) == (0, True), done.stderr
    finally:
        assert up.end() == 0
    assert not file.exists()


def last_line(up, words):
    """The last line of the log that holds `words`, or nothing."""
    lines = [line for line in up.log.read_text().splitlines() if words in line]
    return lines[-1] if lines else ""


@pytest.mark.parametrize(
    "victim", [("cli.main", "worker"), ("cli.main", "api"), ("valkey-server",)]
)
def test_what_crashes_is_started_again_and_no_job_is_lost(up, client, victim):
    jobs = client.submit([completion(max_tokens=200, ignore_eos=True) for _ in range(12)])
    wait_until(lambda: client.job(jobs[0]["id"])["status"] != "queued")
    crashed = up.descendant(*victim)
    crashed.kill()
    ended = client.wait([job["id"] for job in jobs])
    assert {job["status"] for job in ended.values()} == {"succeeded"}
    assert {job["usage"]["completion_tokens"] for job in ended.values()} == {200}
    assert up.descendant(*victim) != crashed


def busy(up):
    """Give the service more than it can finish at once; returns the jobs, one of them running."""
    with Client(up.url) as client:
        jobs = client.submit([completion(max_tokens=300, ignore_eos=True) for _ in range(30)])
        wait_until(lambda: client.job(jobs[0]["id"])["status"] == "running")
    below = up.descendants()
    assert len(below) >= 4  # Valkey, API, worker, engine
    return [job["id"] for job in jobs], below


def test_the_end_leaves_no_process_behind_and_the_next_start_finishes_the_jobs(
    tmp_path, tiny_llama_dir
):
    up = start_up(tmp_path, tiny_llama_dir, drain_grace_s=0)
    ids, below = busy(up)
    assert up.end(signal.SIGTERM) == 0, up.log.read_text()
    _, alive = psutil.wait_procs(below, timeout=1)
    assert alive == []
    up = start_up(tmp_path, tiny_llama_dir)
    try:
        with Client(up.url) as client:
            ended = client.wait(ids)
        below = up.descendants()
    finally:
        assert up.end(signal.SIGINT) == 0, up.log.read_text()
    _, alive = psutil.wait_procs(below, timeout=1)
    assert alive == []
    assert {job["status"] for job in ended.values()} == {"succeeded"}
    assert {job["usage"]["completion_tokens"] for job in ended.values()} == {300}


def test_a_killed_supervisor_takes_every_process_with_it(tmp_path, tiny_llama_dir):
    up = start_up(tmp_path, tiny_llama_dir, drain_grace_s=1)
    _, below = busy(up)
    up.end(signal.SIGKILL)
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []


def test_a_signal_before_readiness_ends_the_start(tmp_path, tiny_llama_dir):
    log = tmp_path / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*TOKENMILL, "up", "--port", "0", "--model", f"tiny={tiny_llama_dir}"],
            env=environment(tmp_path / "data"),
            stderr=output,
        )
    wait_until(lambda: "worker-tiny: starting the engine" in log.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert "ended before it was ready" in log.read_text()


def test_a_start_says_what_it_waits_for_and_claims_no_compilation(up):
    start = up.log.read_text().partition("ready http")[0].splitlines()
    assert "worker-tiny: starting the engine" in start
    assert any(line.endswith("engine process: loading weights") for line in start)  # the worker's
    assert not any("compiling" in line for line in start)


def test_a_start_that_fails_ends_with_the_engines_own_reason(tmp_path, tiny_llama_dir):
    broken = shutil.copytree(tiny_llama_dir, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    done = subprocess.run(
        [*TOKENMILL, "up", "--port", "0", "--model", f"tiny={broken}"],
        env=environment(tmp_path / "data"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: worker-tiny could not start: model tiny: "), done.stderr
    assert str(weights) in last


def test_a_model_that_is_not_there_is_named(tmp_path):
    done = subprocess.run(
        [*TOKENMILL, "up", "--port", "0", "--model", "mine=/nowhere"],
        env=environment(tmp_path / "data"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "model mine: no checkpoint in /nowhere" in done.stderr
