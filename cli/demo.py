"""`tokenmill demo`: 48 prompts through the whole service, and what happened to each, from SQL."""

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cli.client import ENDED, Client, ClientError, Job, Unreachable
from cli.client_commands import seconds, short, text_of
from cli.demo_prompts import PROMPTS
from cli.options import environment
from cli.service import Service, StartError, watch_in_background
from cli.start import reporter
from jobs import store
from jobs.database import Database
from jobs.logs import TEXT_FORMAT
from jobs.records import JobRecord
from jobs.settings import Settings, variable
from jobs.tenants import DEFAULT_TENANT

MODEL = "smollm2-135m-instruct"
BEAT_S = 0.5  # the largest step is known from the workers' beats
POLL_S = 0.2
TIMEOUT_S = 900.0
PROMPT_WIDTH = 36
ANSWER_WIDTH = 60


@click.command()
@click.option("--data-dir", help="Where models are kept (TOKENMILL_DATA_DIR; .tokenmill).")
@click.option("--model", default=MODEL, show_default=True, help="NAME, or NAME=FOLDER.")
def demo(data_dir: str | None, model: str) -> None:
    """Run 48 prompts through the whole service and show answers and statistics.

    Starts a service of its own on a free port, in <data-dir>/demo; leaves nothing running.
    Exit status 0: all 48 succeeded.
    """
    # a pipe has no width: wide enough for the tables, narrow enough for a log
    console = Console(width=None if sys.stdout.isatty() else 110)
    started = time.monotonic()
    # as by Ctrl-C: unwinds, and so ends what was started
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    environ = _environment(data_dir, model)
    folder = Path(environ[variable("data_dir")])
    _log_to(folder / "logs" / "demo.log")
    service = Service(
        environ,
        log_folder=folder / "logs",
        report=reporter(console),
        cancelled=threading.Event(),
    )
    try:
        with service:
            console.print(f"[dim]ready after {time.monotonic() - started:.1f} s[/]")
            end_watch = watch_in_background(service)
            try:
                with _database(service.settings) as database:
                    ids, wall_s = _run(console, service, model.partition("=")[0], database)
                    records = _read_back(database, ids)
                    largest_step = _largest_step(database)
            finally:
                end_watch()
    except (StartError, ClientError) as error:
        raise click.ClickException(f"{error} (logs: {folder / 'logs'})") from None
    _show_statistics(console, records)
    _show_totals(console, records, wall_s, largest_step)
    if any(record.state != "succeeded" for record in records):
        raise click.ClickException(f"not all jobs succeeded (logs: {folder / 'logs'})")


def _environment(data_dir: str | None, model: str) -> dict[str, str]:
    """The demo's own small deployment, whatever else is set in this environment."""
    environ = environment(data_dir=data_dir)
    settings = Settings.from_env({variable("data_dir"): environ.get(variable("data_dir"), "")})
    home = Path(settings.data_dir).resolve()
    for name in ("database_url", "redis_url"):
        environ.pop(variable(name), None)
    if "=" not in model:
        model = f"{model}={home / 'models' / model}"
    demo_settings = {
        "data_dir": home / "demo",
        "models": model,
        "host": "127.0.0.1",
        "port": 0,
        "beat_s": BEAT_S,
        "drain_grace_s": 0,  # the next demo would cancel what is left over
        "log_level": "info",
    }
    return environ | {variable(name): str(value) for name, value in demo_settings.items()}


def _log_to(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=file, level=logging.INFO, format=TEXT_FORMAT)


@contextlib.contextmanager
def _database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.database_url, pool_size=1)
    try:
        yield database
    finally:
        database.dispose()


def _run(
    console: Console, service: Service, model: str, database: Database
) -> tuple[list[str], float]:
    """Submit over HTTP and watch until all have ended. Returns the ids in order and the seconds."""
    with Client(service.url) as client:
        _cancel_leftovers(client)
        started = time.monotonic()
        jobs = client.submit([prompt.job(index, model) for index, prompt in enumerate(PROMPTS)])
        ids = [str(job["id"]) for job in jobs]
        console.print(f"{len(ids)} jobs accepted in {time.monotonic() - started:.2f} s")
        ended = _watch(console, client, ids, lambda: _stats(database), started + TIMEOUT_S)
        wall_s = time.monotonic() - started
    _show_answers(console, [ended[job_id] for job_id in ids])
    return ids, wall_s


def _cancel_leftovers(client: Client) -> None:
    """Jobs of a demo that was cut off would only be in the way."""
    for status in ("queued", "running"):
        for job in client.newest(1000, status=status):
            client.cancel(str(job["id"]))


def _watch(
    console: Console,
    client: Client,
    ids: Sequence[str],
    stats: Callable[[], dict[str, float]],
    deadline: float,
) -> dict[str, Job]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[now]}"),
    )
    ended: dict[str, Job] = {}
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("jobs", total=len(ids), now="")
        while len(ended) < len(ids):
            if time.monotonic() > deadline:
                raise ClientError(f"{len(ids) - len(ended)} jobs had not ended in {TIMEOUT_S:g} s")
            try:
                newest = client.newest(len(ids))
            except Unreachable:  # the API is being started again
                newest = []
            ended |= {job["id"]: job for job in newest if job["status"] in ENDED}
            running = sum(job["status"] == "running" for job in newest)
            seqs = stats().get("last_step_seqs", 0)
            now = f"{running} running; a step lately held {seqs:.0f} sequences"
            progress.update(task, completed=len(ended), now=now)
            time.sleep(POLL_S)
        progress.update(task, now="all ended")  # not the last step's few: see the totals
    return ended


def _stats(database: Database) -> dict[str, float]:
    """What the engine said at its worker's last beat."""
    with database.read() as connection:
        workers = store.live_workers(connection, database.clock(connection))
    newest = max(workers, key=lambda worker: worker.seen_at, default=None)
    return dict(newest.stats) if newest is not None else {}


def _read_back(database: Database, ids: Sequence[str]) -> list[JobRecord]:
    """The jobs' rows: what is shown as statistics is what is stored."""
    with database.read() as connection:
        records = [store.get(connection, job_id, tenant=DEFAULT_TENANT) for job_id in ids]
    return [record for record in records if record is not None]


def _largest_step(database: Database) -> int:
    """The most sequences that shared one step. The beat after the last job knows it."""
    time.sleep(2 * BEAT_S)
    return int(_stats(database).get("peak_step_seqs", 0))


def _show_answers(console: Console, jobs: Sequence[Job]) -> None:
    table = Table(
        "#", "prompt", "answer", "ended by", title="Answers (shortened)", box=box.SIMPLE_HEAD
    )
    for index, (prompt, job) in enumerate(zip(PROMPTS, jobs, strict=True)):
        if job["status"] == "succeeded":
            answer = text_of(job)
            reason = job["response"]["body"]["choices"][0]["finish_reason"]
        else:
            answer, reason = str((job["error"] or {}).get("message", "")), job["status"]
        table.add_row(
            str(index),
            Text(short(prompt.task, PROMPT_WIDTH)),
            Text(short(answer, ANSWER_WIDTH)),
            reason,
        )
    console.print(table)


def _show_statistics(console: Console, records: Sequence[JobRecord]) -> None:
    table = Table(
        title="Token statistics (from SQL)",
        caption="queue s: until it started. TTFT s: until its first token, waiting included. "
        "TPOT ms: for each further token.\ntok/s: output tokens over total s, waiting included; "
        "the rate of all jobs together is in the totals.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
    )
    table.add_column("job", no_wrap=True)
    for name in ("prompt", "cached", "output", "queue s", "TTFT s", "TPOT ms", "total s", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        timings = record.timings
        tpot_s, total_s = timings["tpot_s"], timings["total_s"]
        table.add_row(
            record.custom_id or record.id,
            str(record.prompt_tokens),
            str(record.cached_tokens),
            str(record.completion_tokens),
            seconds(timings["queue_s"]),
            seconds(timings["ttft_s"]),
            milliseconds(tpot_s),
            seconds(total_s),
            f"{record.completion_tokens / total_s:.1f}" if total_s else "",
        )
    console.print(table)


def _show_totals(
    console: Console, records: Sequence[JobRecord], wall_s: float, largest_step: int
) -> None:
    prompt_tokens = sum(record.prompt_tokens for record in records)
    cached_tokens = sum(record.cached_tokens for record in records)
    completion_tokens = sum(record.completion_tokens for record in records)
    succeeded = sum(record.state == "succeeded" for record in records)
    table = Table(show_header=False, title="Totals", box=box.SIMPLE)
    rows = {
        "jobs succeeded": f"{succeeded} of {len(records)}",
        "prompt tokens": f"{prompt_tokens}, of which {cached_tokens} from the prefix cache",
        "completion tokens": str(completion_tokens),
        "queue s, mean and longest": _spread(records, "queue_s", seconds),
        "TTFT s, mean and longest": _spread(records, "ttft_s", seconds),
        "TPOT ms, mean and longest": _spread(records, "tpot_s", milliseconds),
        "wall s": f"{wall_s:.1f}",
        "completion tokens/s, of all jobs together": f"{completion_tokens / wall_s:.1f}",
        "most sequences in one step": str(largest_step),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.1f}"


def _spread(records: Sequence[JobRecord], timing: str, show: Callable[[float], str]) -> str:
    values = [value for record in records if (value := record.timings[timing]) is not None]
    return f"{show(sum(values) / len(values))}, {show(max(values))}" if values else ""
