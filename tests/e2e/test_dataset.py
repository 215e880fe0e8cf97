"""`tokenmill dataset` as a user runs it: made, killed and gone on with, paused, judged."""

import contextlib
import csv
import json
import subprocess

import pyarrow.parquet as pq
import pytest

from bulk.state import State
from cli.client import Client
from tests.e2e.conftest import TOKENMILL, environment, wait_until

NUM_ROWS = 30
SPEC = {
    "model": "tiny",
    "input": {"path": "in.csv"},
    "output": {"path": "out", "rows_per_shard": 20},
    "endpoint": "/v1/completions",
    "prompt": "row {{ number }} says {{ word }}",
    "parameters": {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0},
    "samples": 2,
    "seed": 7,
}
LENGTH = "def good(text, row):\n    return None if len(text) % 2 else f'even: {len(text)}'\n"


def place(folder, *, num_rows=NUM_ROWS, **changes):
    with (folder / "in.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["number", "word"])
        writer.writerows((i, f"wörd\u2028{i}") for i in range(num_rows))
    (folder / "spec.yaml").write_text(json.dumps(SPEC | changes))  # JSON is YAML


def words(folder, up, *command):
    name, *rest = command
    service = ["--url", up.url] if name in ("run", "retry-failed", "regenerate") else []
    return [*TOKENMILL, "dataset", name, folder / "spec.yaml", *rest, *service]


def call(folder, up, *command, status=0):
    done = subprocess.run(
        words(folder, up, *command), env=up.environ, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    return done


def start(folder, up):
    with (folder / "command.log").open("ab") as log:
        return subprocess.Popen(
            words(folder, up, "run"), env=up.environ, cwd=folder, stdout=log, stderr=log
        )


def lines(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def delivered(folder):
    return [row for shard in sorted(folder.glob("out/data-*.jsonl")) for row in lines(shard)]


def texts(rows):
    return {(row["generation"]["row"], row["generation"]["sample"]): row["output"] for row in rows}


def num_delivered(folder):
    """What `status` says, without a process each time."""
    with contextlib.closing(State(folder / "out" / ".tokenmill" / "state.sqlite")) as state:
        return sum(num for (word, *_), (num, *_) in state.counts().items() if word == "delivered")


@pytest.fixture(scope="module")
def made(up, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    place(folder)
    call(folder, up, "run")
    return folder


def test_every_sample_is_there_in_order_with_its_columns_and_details(made):
    rows = delivered(made)
    assert list(texts(rows)) == [(i, sample) for i in range(NUM_ROWS) for sample in (0, 1)]
    assert [path.name for path in sorted(made.glob("out/[!.]*"))] == [
        "data-00000-of-00002.jsonl", "data-00001-of-00002.jsonl", "manifest.json", "rejects.jsonl"
    ]  # fmt: skip
    for row in rows:
        details = row["generation"]
        assert row["number"] == str(details["row"])
        assert row["word"] == f"wörd\u2028{details['row']}"
        assert (details["completion_tokens"], details["finish_reason"]) == (24, "length")
        assert "truncated" in details["flags"]
        assert (details["attempt"], details["round"], details["model"]) == (1, 0, "tiny")
        assert len(details["model_fingerprint"]) == 64
        assert json.loads(details["parameters"]) == SPEC["parameters"]
        assert details["total_s"] >= details["ttft_s"] >= details["queue_s"] >= 0
    assert len({row["generation"]["seed"] for row in rows}) == len(rows)


def test_a_manifest_says_what_it_was_made_of(made):
    manifest = json.loads((made / "out" / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["samples"]["delivered"] == 2 * NUM_ROWS
    assert manifest["tokens"]["completion"] == 2 * NUM_ROWS * 24
    assert manifest["spec"]["prompt"] == SPEC["prompt"]
    assert [each["bytes"] for each in manifest["inputs"]] == [(made / "in.csv").stat().st_size]
    assert [each["rows"] for each in manifest["shards"]] == [40, 20]


def test_again_it_does_nothing(made, up):
    before = {path: path.stat().st_mtime_ns for path in made.glob("out/data-*")}
    assert "60 delivered" in call(made, up, "run").stderr
    assert {path: path.stat().st_mtime_ns for path in made.glob("out/data-*")} == before


def test_a_row_is_made_again_alone_with_the_same_text(made, up):
    for row, sample in ((3, 1), (29, 0)):
        done = call(made, up, "regenerate", "--row", str(row), "--sample", str(sample))
        assert done.stdout == texts(delivered(made))[row, sample] + "\n"
    assert "has no output" in call(made, up, "regenerate", "--row", "30", status=1).stderr


@pytest.mark.long
def test_it_is_exported_in_each_format(made, up, tmp_path):
    rows = delivered(made)
    for form in ("jsonl", "csv", "parquet"):
        call(made, up, "export", "-o", tmp_path / f"all.{form}", "--format", form)
    assert lines(tmp_path / "all.jsonl") == rows
    assert pq.read_table(tmp_path / "all.parquet").to_pylist() == rows
    with (tmp_path / "all.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [(row["word"], row["output"]) for row in read] == [
        (row["word"], row["output"]) for row in rows
    ]
    assert [int(row["generation.seed"]) for row in read] == [
        row["generation"]["seed"] for row in rows
    ]


def test_killed_at_any_time_it_goes_on_and_redoes_nothing(made, up, tmp_path):
    place(tmp_path)
    for least in (-1, 1, 30):
        run = start(tmp_path, up)
        state = tmp_path / "out" / ".tokenmill" / "state.sqlite"
        wait_until(state.exists, 60)
        if least >= 0:
            wait_until(lambda least=least: num_delivered(tmp_path) >= least, 60)
        run.kill()
        run.wait()
        # a fast machine may be through before it is killed
        ended = num_delivered(tmp_path) == 2 * NUM_ROWS
        assert ended or not list(tmp_path.glob("out/manifest.json"))
    call(tmp_path, up, "run")
    assert texts(delivered(tmp_path)) == texts(delivered(made))
    with Client(up.url) as client:
        batches = client._call("GET", "/v1/batches?limit=100")["data"]
    assert sum(each["request_counts"]["total"] == 60 for each in batches) == 2


@pytest.mark.long
def test_refused_outputs_are_asked_again_and_rejects_say_why(up, tmp_path):
    (tmp_path / "good.py").write_text(LENGTH)
    place(
        tmp_path, samples=1, output={"path": "out", "format": "parquet"},
        validate=[{"python": "good.py:good"}, {"length": {"min_chars": 1}}], repair={"rounds": 1},
    )  # fmt: skip
    done = call(tmp_path, up, "run", status=1)
    rows = pq.read_table(tmp_path / "out" / "data-00000-of-00001.parquet").to_pylist()
    rejects = lines(tmp_path / "out" / "rejects.jsonl")
    assert len(rows) + len(rejects) == NUM_ROWS
    assert all(len(row["output"]) % 2 for row in rows)
    assert {row["generation"]["round"] for row in rows} == {0, 1}
    assert {(each["kind"], each["generation"]["round"]) for each in rejects} == {("python", 1)}
    assert all(each["reason"] == f"even: {len(each['output'])}" for each in rejects)
    assert f"{len(rejects)} not (python)" in done.stderr
    again = next(row for row in rows if row["generation"]["round"] == 1)["generation"]["row"]
    call(tmp_path, up, "regenerate", "--row", str(again))
    before = len(rows)
    subprocess.run(words(tmp_path, up, "retry-failed"), env=up.environ, cwd=tmp_path, check=False)
    rows = pq.read_table(tmp_path / "out" / "data-00000-of-00001.parquet").to_pylist()
    assert len(rows) > before
    assert len(rows) + len(lines(tmp_path / "out" / "rejects.jsonl")) == NUM_ROWS


def test_paused_it_waits_and_cancelled_it_keeps_what_is_done(up, tmp_path):
    place(tmp_path, num_rows=2000)
    run = start(tmp_path, up)
    try:
        steer(tmp_path, up, run)
    finally:
        run.kill()
        run.wait()


def steer(tmp_path, up, run):
    wait_until((tmp_path / "out" / ".tokenmill" / "state.sqlite").exists, 60)
    wait_until(lambda: num_delivered(tmp_path) > 0, 60)
    found = json.loads(call(tmp_path, up, "status", "--json").stdout)
    assert found["running"]
    assert found["delivered"] > 0
    call(tmp_path, up, "pause")
    with Client(up.url) as client:
        wait_until(lambda: client._call("GET", "/v1/batches?limit=1")["data"][0]["paused_at"])
    assert "worked on by another" in call(tmp_path, up, "run", status=1).stderr
    call(tmp_path, up, "resume")
    with Client(up.url) as client:
        wait_until(lambda: not client._call("GET", "/v1/batches?limit=1")["data"][0]["paused_at"])
    call(tmp_path, up, "cancel")
    assert run.wait(120) == 1, (tmp_path / "command.log").read_text()
    rows, rejects = delivered(tmp_path), lines(tmp_path / "out" / "rejects.jsonl")
    assert rows
    assert {each["kind"] for each in rejects} == {"batch_cancelled"}
    assert len(rows) + len(rejects) == 4000


@pytest.mark.long
def test_without_a_service_it_brings_one_and_goes_on_after_a_kill(made, tmp_path, tiny_llama_dir):
    place(tmp_path)
    environ = environment(tmp_path / "data", threads=1, kernels="reference", beat_s=0.3, lease_s=3)
    command = [*TOKENMILL, "dataset", "run", tmp_path / "spec.yaml"]
    command += ["--model", f"tiny={tiny_llama_dir}"]
    with (tmp_path / "command.log").open("wb") as log:
        run = subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=log, stderr=log)
    state = tmp_path / "out" / ".tokenmill" / "state.sqlite"
    wait_until(lambda: state.exists() and num_delivered(tmp_path) > 5, 200)
    run.kill()
    run.wait()
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert texts(delivered(tmp_path)) == texts(delivered(made))


@pytest.mark.long
def test_what_is_wrong_is_said_and_nothing_is_run(up, tmp_path):
    place(tmp_path, model="other")
    assert "not served here" in call(tmp_path, up, "run", status=1).stderr
    place(tmp_path, prompt="{{ nubmer }}", output={"path": "new"})
    said = call(tmp_path, up, "run", status=1).stderr
    assert "in.csv line 2: prompt cannot be made: 'nubmer' is undefined" in said
    place(tmp_path, prompt="{{ number }}")
    assert "holds a dataset of another spec" in call(tmp_path, up, "run", status=1).stderr
    place(tmp_path, output={"path": "none"})
    assert "has no dataset yet" in call(tmp_path, up, "status", status=1).stderr
