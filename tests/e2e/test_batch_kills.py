"""A batch through kill -9 of worker, engine, API, and of everything with the sweeper."""

import contextlib
import json
import os
import signal

import httpx
import psutil
import pytest

from cli.batch_client import ENDED, BatchClient
from tests.e2e.conftest import start_up, wait_until

NUM_TOKENS = 24


def rows(num):
    return [
        {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/completions", "body": {
            "model": "tiny", "prompt": f"row {i % 97} of {i}", "max_tokens": NUM_TOKENS,
            "ignore_eos": True, "temperature": 0.8, "seed": i,
        }} | ({"body": {"model": "tiny", "prompt": "x", "n": 0}} if i % 50 == 7 else {})
        for i in range(num)
    ]  # fmt: skip


def begin(client, tmp_path, num, key="once"):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(num)))
    return client.create(client.upload(file), "/v1/completions", key=key)["id"]


def num_done(client, batch_id):
    counts = client.batch(batch_id)["request_counts"]
    return counts["completed"] + counts["failed"]


def content(url, file_id):
    reply = httpx.get(f"{url}/v1/files/{file_id}/content", timeout=60)
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def answers(url, batch):
    """Text or status by custom_id, after a look at order, ids and counts."""
    output, errors = content(url, batch["output_file_id"]), content(url, batch["error_file_id"])
    counts = batch["request_counts"]
    assert (len(output), len(errors)) == (counts["completed"], counts["failed"])
    for part in (output, errors):
        numbers = [int(line["custom_id"][4:]) for line in part]
        assert numbers == sorted(set(numbers))
    texts = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in output
    } | {line["custom_id"]: line["response"]["status_code"] for line in errors}
    assert len(texts) == counts["total"] == len(output) + len(errors)
    return texts


def ended(client, batch_id, timeout_s):
    wait_until(lambda: client.batch(batch_id)["status"] in ENDED, timeout_s)
    return client.batch(batch_id)


def part(up, *words):
    """Of the processes that are there now: one that was killed a moment ago is a zombie."""

    def found():
        with contextlib.suppress(psutil.Error, AssertionError):
            return up.descendant(*words)

    return wait_until(found)


def kill(process):
    os.kill(process.pid, signal.SIGKILL)


def away(up):
    """Until the API has been started again."""

    def is_there():
        try:
            return httpx.get(f"{up.url}/health/live", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(is_there, 60)


@pytest.mark.parametrize(
    "num", [pytest.param(120, id="short"), pytest.param(2000, id="whole", marks=pytest.mark.long)]
)
def test_every_row_is_answered_once_whatever_is_killed(num, tmp_path, tiny_llama_dir):
    settings = {"max_num_seqs": 8, "drain_grace_s": 1}
    up = start_up(tmp_path, tiny_llama_dir, **settings)
    client = BatchClient(up.url)
    try:
        undisturbed = answers(up.url, ended(client, begin(client, tmp_path, num, "calm"), 300))
        assert len(undisturbed) == num
        batch_id = begin(client, tmp_path, num, "killed")
        step = num // 6
        wait_until(lambda: num_done(client, batch_id) > step, 120)
        kill(part(up, "worker.engine_process"))
        wait_until(lambda: num_done(client, batch_id) > 2 * step, 120)
        kill(part(up, "worker", "--model"))
        kill(part(up, "cli.main", "api"))
        away(up)
        wait_until(lambda: num_done(client, batch_id) > 3 * step, 120)
        tree = up.descendants()
        kill(up.process)  # and with it the sweeper, in the middle of whatever it did
        up.process.wait()
        psutil.wait_procs(tree, 20)
        client.close()
        up = start_up(tmp_path, tiny_llama_dir, **settings)
        client = BatchClient(up.url)
        batch = ended(client, batch_id, 300)
        assert batch["status"] == "completed"
        assert answers(up.url, batch) == undisturbed
        assert set(os.listdir(up.data_dir / "files")) >= {
            batch["output_file_id"],
            batch["error_file_id"],
            batch["input_file_id"],
        }
    finally:
        client.close()
        up.end()


@pytest.mark.long
def test_the_sweeper_is_killed_while_it_makes_the_files(tmp_path, tiny_llama_dir):
    """Again and again, at whatever place it has come to: one right pair of files in the end."""
    num = 150
    up = start_up(tmp_path, tiny_llama_dir, kernels="auto", sweep_s=0.05)
    client = BatchClient(up.url)
    try:
        batch_id = begin(client, tmp_path, num)
        for _ in range(3):
            wait_until(lambda client=client: num_done(client, batch_id) == num, 60)
            tree = up.descendants()
            kill(up.process)
            up.process.wait()
            psutil.wait_procs(tree, 20)
            client.close()
            up = start_up(tmp_path, tiny_llama_dir, kernels="auto", sweep_s=0.05)
            client = BatchClient(up.url)
        batch = ended(client, batch_id, 60)
        assert batch["status"] == "completed"
        assert len(answers(up.url, batch)) == num
        kept = {batch[name] for name in ("output_file_id", "error_file_id", "input_file_id")}
        page = httpx.get(f"{up.url}/v1/files").json()["data"]
        assert {each["id"] for each in page} == kept
    finally:
        client.close()
        up.end()


def test_rows_that_are_the_same_are_answered_alike_whatever_is_killed(tmp_path, tiny_llama_dir):
    """One that ran when its engine died goes on, and all that wait for it take what it comes to."""
    settings = {"max_num_seqs": 4, "drain_grace_s": 1}
    up = start_up(tmp_path, tiny_llama_dir, **settings)
    client = BatchClient(up.url)
    bodies = [
        {"model": "tiny", "prompt": f"kind {kind}", "max_tokens": 100, "ignore_eos": True,
         **({"seed": kind, "temperature": 0.9} if kind % 2 else {"temperature": 0})}
        for kind in range(8)
    ]  # fmt: skip
    oracle = [client.answer("/v1/completions", body)["choices"][0]["text"] for body in bodies]
    file = tmp_path / "rows.jsonl"
    with file.open("w") as lines:
        for i in range(80):
            row = {"custom_id": f"row-{i}", "url": "/v1/completions", "body": bodies[i % 8]}
            lines.write(json.dumps(row) + "\n")
    try:
        file_id = client.upload(file)
        batch_id = client.create(file_id, "/v1/completions", key="same", dedupe=True)["id"]
        wait_until(lambda: num_done(client, batch_id) > 0, 60)
        kill(part(up, "worker.engine_process"))
        wait_until(lambda: num_done(client, batch_id) > 8, 60)
        tree = up.descendants()
        kill(up.process)
        up.process.wait()
        psutil.wait_procs(tree, 20)
        client.close()
        up = start_up(tmp_path, tiny_llama_dir, **settings)
        client = BatchClient(up.url)
        batch = ended(client, batch_id, 120)
        assert batch["request_counts"] == {"total": 80, "completed": 80, "failed": 0}
        output = content(up.url, batch["output_file_id"])
        assert [line["custom_id"] for line in output] == [f"row-{i}" for i in range(80)]
        replies = [line["response"]["body"] for line in output]
        assert [reply["choices"][0]["text"] for reply in replies] == oracle * 10
        assert len({reply["id"] for reply in replies}) == 80
        assert batch["progress"]["saved"]["rows"] == 72
        assert batch["usage"]["output_tokens"] == 800
    finally:
        client.close()
        up.end()
