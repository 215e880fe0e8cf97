"""A large batch: how fast it is read, what the service costs beside its engine, and what memory.

    python -m bench.batch_rows ingest --rows 1000000              # file to rows to files, no engine
    python -m bench.batch_rows ingest --rows 1000000 --postgres
    python -m bench.batch_rows run --rows 100000 --model DIR --kill-every 30
    python -m bench.batch_rows run --rows 100000 --model DIR --postgres

`ingest` turns the product's own keeper by hand and ends the rows with one statement. `run` starts
`tokenmill up`, kills -9 its engine, worker, API, Valkey or a session of PostgreSQL (which takes all
of its sessions along) in turn, and checks at the end that results and errors are the inputs, in
order, with exact ids, and each text that of a job which ran undisturbed. Prints one JSON object.
Any row that is wrong ends it with a word and status 1.
"""

import argparse
import contextlib
import itertools
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Row, select, text, update

import migrations
from bench.service import MODEL, REPOSITORY, START_TIMEOUT_S
from bench.watch import SAMPLE_S, SESSION, Watch, stretches
from cli import env_file
from cli.addresses import free_port
from cli.batch_client import ENDED, BatchClient
from cli.client import ClientError
from cli.servers import Postgres
from jobs import batches, files
from jobs.batch_record import BatchRecord, BatchState
from jobs.database import Database
from jobs.files import FileRecord
from jobs.lifecycle import JobState
from jobs.models import batches as batch_table
from jobs.models import jobs
from jobs.settings import ModelEntry, Settings, variable
from jobs.tenants import DEFAULT_TENANT
from worker.batch_keeper import BatchKeeper

ENDPOINT = "/v1/completions"
KINDS = 97  # different rows: each has an oracle


def row(number: int, max_tokens: int) -> dict[str, Any]:
    kind = number % KINDS
    words = " ".join(f"w{(kind * each) % 31}" for each in range(40))
    body = {
        "model": MODEL, "prompt": f"{kind}: {words}", "max_tokens": max_tokens,
        "ignore_eos": True, "temperature": 0.8, "seed": kind,
    }  # fmt: skip
    if kind == KINDS - 1:
        body["n"] = 0  # its endpoint refuses it
    return {"custom_id": f"row-{number}", "method": "POST", "url": ENDPOINT, "body": body}


def lines(num_rows: int, max_tokens: int) -> Iterator[bytes]:
    return (json.dumps(row(i, max_tokens)).encode() + b"\n" for i in range(num_rows))


@contextlib.contextmanager
def deployed(postgres: bool, folder: Path) -> Iterator[tuple[str, int | None]]:
    """A database's URL, and the process of its server."""
    if not postgres:
        yield f"sqlite:///{folder}/tokenmill.db", None
        return
    with Postgres() as server:
        yield server.url, server.pid


# -- without an engine


def ingest(options: argparse.Namespace) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as folder,
        deployed(options.postgres, Path(folder)) as (url, _),
    ):
        migrations.upgrade(url)
        settings = Settings(
            database_url=url,
            models=(ModelEntry(name=MODEL, path="nowhere"),),
            files_dir=str(Path(folder, "files")),
            max_batch_rows=10_000_000,
            max_file_bytes=1 << 40,
        )
        keeper, database = BatchKeeper(settings), Database(url)
        try:
            return _ingest(options, keeper, database, Path(folder))
        finally:
            keeper.stop()
            database.dispose()


def _create(
    options: argparse.Namespace, keeper: BatchKeeper, database: Database
) -> tuple[str, int]:
    """A batch of so many rows: its id, and its file's bytes."""
    incoming, file_id = keeper.store.incoming(), files.new_file_id()
    for line in lines(options.rows, options.max_tokens):
        incoming.write(line)
    incoming.keep(file_id)
    with database.begin() as connection:
        now = database.clock(connection)
        file = FileRecord(
            id=file_id, tenant_id=DEFAULT_TENANT, filename="rows", purpose=files.BATCH,
            bytes=incoming.size, created_at=now, expires_at=None,
        )  # fmt: skip
        files.add(connection, file)
        batch = BatchRecord(
            id=batches.new_batch_id(), tenant_id=DEFAULT_TENANT, endpoint=ENDPOINT,
            input_file_id=file_id, metadata=None, priority=batches.PRIORITY, output_ttl_s=None,
            state=BatchState.VALIDATING, created_at=now, expires_at=now + batches.WINDOW_S,
        )  # fmt: skip
        batches.create(connection, batch)
    return batch.id, incoming.size


def _ingest(
    options: argparse.Namespace, keeper: BatchKeeper, database: Database, folder: Path
) -> dict[str, Any]:
    batch_id, input_bytes = _create(options, keeper, database)

    def peek() -> Row[Any]:
        with database.read() as connection:
            return connection.execute(select(batch_table).where(batch_table.c.id == batch_id)).one()

    def turn_until(done: Callable[[Row[Any]], bool]) -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        while True:
            record = peek()
            if done(record):
                return {
                    "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu
                }  # fmt: skip
            keeper.round()

    read = turn_until(lambda record: record.num_rows > 0)
    insert = turn_until(lambda record: record.num_inserted == record.num_rows)
    ingest_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    _end_all(database, batch_id, options.output_bytes)
    export = turn_until(lambda record: record.closed_at is not None)
    record = peek()
    assert record.output_file_id is not None
    num = options.rows
    return {
        "rows": num,
        "database": "postgres" if options.postgres else "sqlite",
        "input_bytes": input_bytes,
        "output_bytes": Path(folder, "files", record.output_file_id).stat().st_size,
        "database_bytes": _database_bytes(database, folder),
        "seconds": {
            name: round(seconds["wall_s"], 1)
            for name, seconds in {"read": read, "insert": insert, "export": export}.items()
        },
        "rows_per_s": {
            name: {clock: round(num / seconds[f"{clock}_s"]) for clock in ("wall", "cpu")}
            for name, seconds in {
                "read": read,
                "insert": insert,
                "export": export,
                "read_and_insert": {each: read[each] + insert[each] for each in read},
            }.items()
        },
        "rss_mb_most": {
            "ingest": round(ingest_mb),
            "all": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        },
    }


def _database_bytes(database: Database, folder: Path) -> int:
    files = list(folder.glob("tokenmill.db*"))
    if files:
        return sum(each.stat().st_size for each in files)
    with database.read() as connection:
        query = text("SELECT pg_database_size(current_database())")
        return int(connection.execute(query).scalar_one())


def _end_all(database: Database, batch_id: str, output_bytes: int) -> None:
    """As if each had been run."""
    output = json.dumps({"text": "x" * output_bytes})
    for kind in range(20):  # a statement has its time limit
        with database.begin() as connection:
            connection.execute(
                update(jobs)
                .where(
                    jobs.c.batch_id == batch_id,
                    jobs.c.state == JobState.QUEUED,
                    jobs.c.row_number % 20 == kind,
                )
                .values(
                    state=JobState.SUCCEEDED, output=output, finished_at=database.clock(connection)
                )
            )


# -- with one, and with kills


def run(options: argparse.Namespace) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as folder,
        deployed(options.postgres, Path(folder)) as (url, server_pid),
    ):
        migrations.upgrade(url)
        port, log = free_port(), Path(folder, "up.log")
        command = [sys.executable, "-m", "cli.main", "up", "--port", str(port)]
        command += ["--data-dir", str(Path(folder, "data")), "--model", f"{MODEL}={options.model}"]
        environ = {
            **os.environ, "PYTHONPATH": str(REPOSITORY), "DATABASE_URL": url,
            "TOKENMILL_MAX_BATCH_ROWS": "10000000", "TOKENMILL_MAX_FILE_BYTES": str(1 << 40),
            "TOKENMILL_LEASE_S": "5", "TOKENMILL_MAX_ATTEMPTS": "50", "TOKENMILL_MAX_CRASHES": "50",
        }  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environ
            )
        try:
            with BatchClient(f"http://127.0.0.1:{port}") as client:
                _wait(client, process)
                watch = Watch(process.pid, _redis_url(Path(folder, "data")), server_pid)
                return _run(options, client, watch, Path(folder))
        except BaseException:
            print(log.read_text("utf-8", "replace")[-3000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(120)


def _wait(client: BatchClient, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(ClientError):
            if client.readiness()[0] and MODEL in client.models():
                return
        time.sleep(0.3)
    sys.exit("the service did not start")


def _redis_url(data_dir: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (data_dir / env_file.NAME).exists() and time.monotonic() < deadline:
        time.sleep(0.1)  # it is written once the service is ready, as a caller sees before
    for each in (data_dir / env_file.NAME).read_text().splitlines():
        name, _, value = each.partition("=")
        if name == variable("redis_url"):
            return shlex.split(value)[0]
    raise AssertionError("the service names its Redis")


def _run(
    options: argparse.Namespace, client: BatchClient, watch: Watch, folder: Path
) -> dict[str, Any]:
    oracle = [
        client.answer(ENDPOINT, row(kind, options.max_tokens)["body"])["choices"][0]["text"]
        for kind in range(KINDS - 1)
    ]
    path = folder / "rows.jsonl"
    with path.open("wb") as file:
        file.writelines(lines(options.rows, options.max_tokens))
    time.sleep(3 * SAMPLE_S)  # what they used until now is not the batch's
    before, kills = watch.cpu_s(), []
    started = time.monotonic()
    created = client.create(client.upload(path), ENDPOINT, key="bench")
    assert created is not None
    batch_id = created["id"]
    ingest_s, kill_at = None, started + options.kill_every
    names = options.victims.split(",") + ([SESSION] if options.postgres else [])
    victims = itertools.cycle(names)
    while True:
        batch = client.batch(batch_id)
        assert batch is not None
        progress, now = batch["progress"], time.monotonic()
        if ingest_s is None and progress["rows"]["total"] and not progress["rows"]["waiting"]:
            ingest_s = now - started
        if batch["status"] in ENDED:
            break
        if options.kill_every and now >= kill_at and (found := watch.part(name := next(victims))):
            kills.append(f"{now - started:.0f} s: {name}")
            found.kill()
            kill_at = now + options.kill_every
        time.sleep(1.0)
    wall_s = time.monotonic() - started
    watch.stop()
    _check(client, batch, options, oracle)
    used = {name: seconds - before.get(name, 0.0) for name, seconds in watch.cpu_s().items()}
    beside = sum(seconds for name, seconds in used.items() if name != "engine")
    return {
        "rows": options.rows,
        "database": "postgres" if options.postgres else "sqlite",
        "max_tokens": options.max_tokens,
        "wall_s": round(wall_s, 1),
        "rows_per_s": round(options.rows / wall_s, 1),
        "ingest_rows_per_s": None if ingest_s is None else round(options.rows / ingest_s),
        "kills": kills,
        "cpu_ms_per_row": {k: round(1000 * v / options.rows, 3) for k, v in used.items()},
        "overhead_ms_per_row": round(1000 * beside / options.rows, 3),
        "input_bytes": path.stat().st_size,
        "failures": batch["progress"]["failures"],
        "rss_mb": {name: stretches(values) for name, values in watch.rss_mb.items()},
        "redis_used_kb": stretches(watch.redis_kb),
        "checked": "results + errors = inputs, in order, ids exact, each text its oracle's",
    }


def _check(
    client: BatchClient, batch: dict[str, Any], options: argparse.Namespace, oracle: list[str]
) -> None:
    seen = [0] * options.rows
    for name in ("output_file_id", "error_file_id"):
        if batch[name] is None:
            continue
        last = -1
        url = f"{client.url}/v1/files/{batch[name]}/content"
        with httpx.stream("GET", url, timeout=600) as reply:
            for text in reply.iter_lines():
                line = json.loads(text)
                number = int(line["custom_id"].removeprefix("row-"))
                _need(number > last, f"{name}: row {number} behind row {last}")
                last, kind = number, number % KINDS
                seen[number] += 1
                if kind == KINDS - 1:
                    _need(line["response"]["status_code"] == 400, f"row {number} was to be refused")
                else:
                    found = line["response"]["body"]["choices"][0]["text"]
                    _need(found == oracle[kind], f"row {number} has another text than its oracle")
    _need(set(seen) == {1}, f"rows that are not there once: {sum(num != 1 for num in seen)}")


def _need(true: bool, message: str) -> None:
    if not true:
        sys.exit(message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("ingest", "run"))
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--postgres", action="store_true", help="one of its own; else SQLite")
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--output-bytes", type=int, default=600, help="of each row, for `ingest`")
    parser.add_argument("--model", type=Path, help="a folder with a tiny model, for `run`")
    parser.add_argument("--kill-every", type=float, default=30.0, help="seconds; 0: nothing dies")
    parser.add_argument("--victims", default="engine,worker,api,valkey")
    options = parser.parse_args()
    if options.what == "run" and options.model is None:
        parser.error("run needs --model")
    print(json.dumps(ingest(options) if options.what == "ingest" else run(options), indent=1))


if __name__ == "__main__":
    main()
