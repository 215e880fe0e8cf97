"""`tokenmill run-batch` against a server whose rows are answered by the test's own hands."""

import gzip
import json
import threading
from dataclasses import replace

import pytest
from click.testing import CliRunner

from cli import run_batch as command
from cli.main import tokenmill
from jobs.database import Database
from jobs.retention import GRACE_S
from tests.api.conftest import MODEL, hands_on, serving
from tests.api.test_batches import age, jobs_of
from tests.bulk.test_inputs import zstd
from worker.batch_keeper import BatchKeeper
from worker.file_sweeper import FileSweeper

NUM_ROWS = 5
IDS = [f"row-{i}" for i in range(NUM_ROWS)]


def requests() -> bytes:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
    rows = ({"custom_id": each, "url": "/v1/completions", "body": body} for each in IDS)
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def kept(sqlite_settings, tmp_path):
    return replace(sqlite_settings, files_dir=str(tmp_path / "files"), batch_rows_ttl_s=60)


@pytest.fixture
def run(kept, tmp_path, monkeypatch):
    """Runs the command; a keeper and a worker's hands go on meanwhile."""
    monkeypatch.setattr(command, "POLL_S", 0.05)
    keeper, over = BatchKeeper(kept), threading.Event()

    def work(client, hands):
        while not over.wait(0.05):
            while keeper.round():
                pass
            for batch in client.get("/v1/batches").json()["data"]:
                if batch["status"] == "in_progress":
                    for job_id in jobs_of(client, batch["id"]).values():
                        hands.finish(hands.claim(job_id))

    with serving(kept) as client, hands_on(kept) as hands:
        hands.register()
        thread = threading.Thread(target=work, args=(client, hands))
        thread.start()

        def run(output="out.jsonl"):
            place = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / output)]
            return CliRunner().invoke(
                tokenmill, ["run-batch", *place, "--url", str(client.base_url)]
            )

        (tmp_path / "in.jsonl").write_bytes(requests())
        yield run
        over.set()
        thread.join(30)
    keeper.stop()


def ids_in(path):
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_a_packed_file_is_unpacked_on_its_way(run, tmp_path, pack):
    (tmp_path / "in.jsonl").write_bytes(pack(requests()))
    done = run()
    assert done.exit_code == 0, done.output
    assert ids_in(tmp_path / "out.jsonl") == IDS
    (tmp_path / "in.jsonl").write_bytes(pack(requests() * 3000)[:-30])
    broken = run("other.jsonl")
    assert (broken.exit_code, "in.jsonl cannot be read" in broken.output) == (1, True)


def test_rows_that_the_service_keeps_no_more_are_asked_for_anew(run, kept, tmp_path):
    assert run().exit_code == 0
    output, state = tmp_path / "out.jsonl", tmp_path / ".out.jsonl.tokenmill"
    first = json.loads(state.read_text())["batch_id"]
    output.unlink()
    database = Database(kept.database_url)
    age(database, first, 60 + GRACE_S)
    assert FileSweeper(kept, database).empty_batches()
    database.dispose()
    done = run()
    assert (done.exit_code, "has no rows any more: begun anew" in done.output) == (0, True)
    assert ids_in(output) == IDS
    assert json.loads(state.read_text())["batch_id"] != first


def test_a_file_that_the_service_has_lost_is_sent_again(run, tmp_path):
    state = command._earlier(tmp_path / "none", command._digest(tmp_path / "in.jsonl"))
    known = {"input_sha256": state.input_sha256, "key": state.key, "file_id": "file-lost"}
    (tmp_path / ".out.jsonl.tokenmill").write_text(json.dumps(known))
    done = run()
    assert done.exit_code == 0, done.output
    assert ids_in(tmp_path / "out.jsonl") == IDS


def test_the_input_is_not_taken_for_the_output(run, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "in.jsonl")
    for name in ("in.jsonl", "link"):
        refused = run(name)
        assert (refused.exit_code, "the requests would be lost" in refused.output) == (2, True)
    assert (tmp_path / "in.jsonl").read_bytes() == requests()


def test_one_output_is_made_by_one_command_at_a_time(run, tmp_path):
    with command._held(tmp_path / "out.jsonl"):
        second = run()
        assert (second.exit_code, "made by another run-batch" in second.output) == (1, True)
    assert run().exit_code == 0
    assert not list(tmp_path.glob(".*.lock"))
