"""`tokenmill run-batch` as a user runs it: with a service, on its own, stopped and begun again."""

import json
import re
import signal
import subprocess
import time

import pytest

from tests.e2e.conftest import TOKENMILL, environment, wait_until

NUM_ROWS = 60
# the last row is not done when the others are: who waits for some lines of many finds them
LONG_ROW = {f"body{NUM_ROWS - 1}": {"max_tokens": 480}}


def write_rows(path, *, num=NUM_ROWS, **changes):
    rows = []
    for i in range(num):
        body = {"model": "tiny", "prompt": f"row {i} says", "max_tokens": 30, "ignore_eos": True,
                "temperature": 0} | changes.get(f"body{i}", {})  # fmt: skip
        rows.append({"custom_id": f"row-{i}", "method": "POST", "url": "/v1/completions",
                     "body": body})  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(folder, *arguments):
    return [
        *TOKENMILL, "run-batch", "-i", folder / "in.jsonl", "-o", folder / "out.jsonl", *arguments
    ]  # fmt: skip


def run(folder, environ, *arguments):
    return subprocess.run(
        command(folder, *arguments), env=environ, cwd=folder, capture_output=True, text=True
    )


def start(folder, environ, *arguments):
    output = (folder / "command.log").open("wb")
    with output:
        return subprocess.Popen(
            command(folder, *arguments), env=environ, cwd=folder, stdout=output, stderr=output
        )


def texts(folder, name="out.jsonl"):
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return {
        line["custom_id"]: line["response"]["body"]["choices"][0]["text"]
        for line in lines
        if line["response"]["status_code"] == 200
    }


def num_lines(path):
    return len(path.read_bytes().splitlines()) if path.exists() else 0


@pytest.fixture(scope="module")
def undisturbed(up, tmp_path_factory):
    """What the rows answer when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_rows(folder / "in.jsonl", **LONG_ROW)
    done = run(folder, up.environ, "--url", up.url)
    assert done.returncode == 0, done.stderr
    found = texts(folder)
    assert list(found) == [f"row-{i}" for i in range(NUM_ROWS)]
    return found


def test_every_row_has_its_line_in_order_and_an_error_is_one(up, tmp_path):
    write_rows(tmp_path / "in.jsonl", num=5, body2={"n": 0})
    done = run(tmp_path, up.environ, "--url", up.url)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"row-{i}" for i in range(5)]
    assert [line["response"]["status_code"] for line in lines] == [200, 200, 400, 200, 200]
    assert "4 rows answered, 1 failed" in done.stderr
    before = (tmp_path / "out.jsonl").stat().st_mtime_ns
    again = run(tmp_path, up.environ, "--url", up.url)
    assert (again.returncode, "is complete already" in again.stderr) == (0, True)
    assert (tmp_path / "out.jsonl").stat().st_mtime_ns == before


def test_another_input_is_another_batch(up, tmp_path):
    for num in (2, 3):
        write_rows(tmp_path / "in.jsonl", num=num)
        assert run(tmp_path, up.environ, "--url", up.url).returncode == 0
        assert len(texts(tmp_path)) == num


def test_a_line_that_is_no_row_is_told_and_nothing_is_made(up, tmp_path):
    file = write_rows(tmp_path / "in.jsonl", num=3)
    file.write_text(file.read_text() + "{\n")
    done = run(tmp_path, up.environ, "--url", up.url)
    assert done.returncode == 1
    assert "line 4: " in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_killed_and_begun_again_it_goes_on(up, undisturbed, tmp_path):
    write_rows(tmp_path / "in.jsonl", **LONG_ROW)
    first = start(tmp_path, up.environ, "--url", up.url)
    part = tmp_path / "out.jsonl.part"
    try:
        # rows run in planned order, and the file has them in its own
        wait_until(lambda: num_lines(part) > 5, timeout_s=120)
    finally:
        first.kill()
        first.wait()
    with part.open("ab") as file:
        file.write(b'{"half a line')
    assert not (tmp_path / "out.jsonl").exists()
    done = run(tmp_path, up.environ, "--url", up.url)
    assert (done.returncode, "going on with batch_" in done.stderr) == (0, True), done.stderr
    assert texts(tmp_path) == undisturbed
    assert num_lines(tmp_path / "out.jsonl") == NUM_ROWS


@pytest.mark.long
def test_without_a_service_it_brings_one_and_goes_on_after_a_kill(
    undisturbed, tmp_path, tiny_llama_dir
):
    write_rows(tmp_path / "in.jsonl", **LONG_ROW)
    environ = environment(
        tmp_path / "data", threads=1, kernels="reference", beat_s=0.3, lease_s=3
    )  # fmt: skip
    model = ("--model", f"tiny={tiny_llama_dir}")
    first = start(tmp_path, environ, *model)
    part = tmp_path / "out.jsonl.part"
    wait_until(lambda: num_lines(part) > 5, 120)
    first.kill()
    first.wait()
    time.sleep(0.5)
    done = run(tmp_path, environ, *model)
    assert done.returncode == 0, done.stderr
    assert "going on with batch_" in done.stderr
    assert texts(tmp_path) == undisturbed


@pytest.mark.long
def test_stopped_it_waits_for_no_row_and_goes_on_from_its_tokens(
    undisturbed, tmp_path, tiny_llama_dir
):
    write_rows(tmp_path / "in.jsonl", **LONG_ROW)
    environ = environment(tmp_path / "data", threads=1, kernels="reference")
    model = ("--model", f"tiny={tiny_llama_dir}")
    first = start(tmp_path, environ, *model)
    wait_until(lambda: num_lines(tmp_path / "out.jsonl.part") > 5, 120)
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130
    assert "the same command goes on" in (tmp_path / "command.log").read_text()
    log = (tmp_path / "data" / "logs" / "worker-tiny.log").read_text()
    [(held, handed_back)] = re.findall(
        r"draining: (\d+) jobs in hand.*?handing back (\d+) jobs", log, re.S
    )
    assert handed_back == held != "0"
    done = run(tmp_path, environ, *model)
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path) == undisturbed


def test_wrong_usage_is_said(up, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n")
    done = run(tmp_path, up.environ, "--url", up.url)
    assert (done.returncode, "has no rows" in done.stderr) == (1, True)
    (tmp_path / "in.jsonl").write_text("[]\n")
    assert "first line is no request" in run(tmp_path, up.environ, "--url", up.url).stderr
    assert run(tmp_path, up.environ, "--url", up.url, "--model", "x").returncode == 2
