"""`tokenmill submit` and `tokenmill status`: a running service, seen from a terminal."""

import json
import os
import sys
from datetime import datetime
from typing import IO, Any

import click
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cli.addresses import service_url
from cli.client import Client, ClientError, Job, Refused
from cli.options import environment
from jobs import strict_json
from jobs.settings import Settings

MOST_JOBS_PER_CALL = 1000
MOST_ERRORS = 20  # lines of a file that are named
MOST_LEVELS = 31  # of a job: the service takes 32, and they are sent in an array
MOST_KEY_CHARACTERS = 255
PIPE_WIDTH = 500  # a pipe has no width: nothing has to be left out there
GAP = 2  # columns of a terminal between two of a table
IMPORTANCE = ("status", "custom id", "created", "model", "tokens", "total s")

url_option = click.option(
    "--url", help="The service; by default the one of this environment (http://127.0.0.1:8000)."
)


@click.command()
@url_option
@click.option("--model", help="Which model; may be left out when the service has only one.")
@click.option("--prompt", "-p", help="One user message.")
@click.option("--system", help="A system message before it.")
@click.option("--max-tokens", type=int, help="Most tokens to generate.")
@click.option("--temperature", type=float, help="0 is greedy.")
@click.option("--priority", type=int, help="-10 to 10, higher first; 0 by default.")
@click.option(
    "--file", "-f", "jobs_file", type=click.File("rb"), help="Jobs as JSON lines; - is stdin."
)
@click.option(
    "--idempotency-key",
    callback=lambda _context, _option, key: _checked_key(key),
    help="Repeating a call with the same key submits nothing twice.",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait for the jobs' ends.")
@click.option("--json", "as_json", is_flag=True, help="Print job objects, one a line.")
def submit(
    url: str | None,
    model: str | None,
    prompt: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    priority: int | None,
    jobs_file: IO[bytes] | None,
    idempotency_key: str | None,
    wait: bool,
    as_json: bool,
) -> None:
    """Send one prompt, or a file of jobs, and print the answers.

    A line of the file is a job: {"url": "/v1/chat/completions", "body": {"messages": ...}}.
    Exit status 0: all succeeded (or, with --no-wait, were accepted); 1: not all did.
    """
    if (prompt is None) == (jobs_file is None):
        raise click.UsageError("give either --prompt or --file")
    of_prompt = {
        "--system": system,
        "--max-tokens": max_tokens,
        "--temperature": temperature,
        "--priority": priority,
    }
    unread = [name for name, value in of_prompt.items() if value is not None]
    if jobs_file is not None and unread:
        raise click.UsageError(f"{unread[0]} is for --prompt: a file's lines say it themselves")
    try:
        with _client(url) as client:
            model = model or _only_model(client)
            if prompt is not None:
                jobs = {"": _chat(prompt, system, max_tokens, temperature, priority or 0)}
            else:
                assert jobs_file is not None
                jobs = _read_lines(jobs_file)
            for job in jobs.values():
                job["body"].setdefault("model", model)
            accepted = _submit_all(client, jobs, idempotency_key)
            ended = _wait(client, accepted) if wait else accepted
    except ClientError as error:
        raise click.ClickException(str(error)) from None
    for job in ended:
        if as_json:
            click.echo(json.dumps(job))
        elif wait:
            click.echo(_answer(job), err=job["status"] != "succeeded")
        else:
            click.echo(job["id"])
    if wait and any(job["status"] != "succeeded" for job in ended):
        sys.exit(1)


@click.command()
@click.argument("job_id", required=False)
@url_option
@click.option("--limit", type=click.IntRange(1, 1000), default=10, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing: the exit status says it.")
def status(job_id: str | None, url: str | None, limit: int, as_json: bool, quiet: bool) -> None:
    """Show the service's state and its newest jobs, or the job JOB_ID.

    Exit status 0: the service is ready (the job exists); 1: it is not.
    """
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(quiet=quiet, width=None if has_width else PIPE_WIDTH)
    try:
        with _client(url) as client:
            if job_id is not None:
                job = client.job(job_id)
                if as_json:
                    console.print_json(data=job)
                else:
                    _show_job(console, job)
                return
            is_ready, parts = client.readiness()
            jobs = [] if quiet else client.newest(limit)
    except ClientError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        console.print_json(data={"ready": is_ready, "readiness": parts, "jobs": jobs})
    else:
        _show_service(console, client.url, is_ready, parts, jobs)
    if not is_ready:
        sys.exit(1)


def short(text: str, width: int) -> str:
    """`text` on one line, cut to `width` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def text_of(job: Job) -> str:
    """The first choice's text of a job that succeeded; calls or a thought where it has none."""
    body = job["response"]["body"]
    if "output" in body:
        return _text_of_items(body["output"])
    choice = body["choices"][0]
    if "text" in choice:
        return str(choice["text"])
    message = choice["message"]
    shown = [_call(each["function"]) for each in message.get("tool_calls", ())]
    if message["content"] is not None:
        shown.insert(0, message["content"])
    return "\n".join(shown or [message.get("reasoning_content", "")])


def _text_of_items(items: list[dict[str, Any]]) -> str:
    """The same of a response's output."""
    kinds: dict[str, list[str]] = {"message": [], "function_call": [], "reasoning": []}
    for item in items:
        is_call = item["type"] == "function_call"
        parts = [_call(item)] if is_call else [part["text"] for part in item["content"]]
        kinds[item["type"]] += filter(None, parts)
    return "\n".join(kinds["message"] + kinds["function_call"] or kinds["reasoning"])


def _call(function: dict[str, Any]) -> str:
    return f"{function['name']}({function['arguments']})"


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _client(url: str | None) -> Client:
    """Of the service at `url`, or of this environment's own; with this environment's key."""
    settings = Settings.from_env(environment())
    return Client(url or service_url(settings), key=settings.api_key)


def _only_model(client: Client) -> str:
    models = client.models()
    if len(models) != 1:
        raise click.UsageError(f"--model must be one of: {', '.join(models)}")
    return models[0]


def _chat(
    prompt: str,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    priority: int,
) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": prompt}]}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if temperature is not None:
        body["temperature"] = temperature
    return {"url": "/v1/chat/completions", "body": body, "priority": priority}


def _checked_key(key: str | None) -> str | None:
    # an empty one, from a variable that is not set, would else protect from nothing
    if key is not None and not (
        1 <= len(key) <= MOST_KEY_CHARACTERS and key.isascii() and key.isprintable()
    ):
        raise click.BadParameter(f"must be 1 to {MOST_KEY_CHARACTERS} printable ASCII characters")
    return key


def _read_lines(file: IO[bytes]) -> dict[str, dict[str, Any]]:
    """The jobs of a file, each with the words that name its line. Names all lines that are none."""
    jobs, wrong = {}, []
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        name = f"line {number}: "
        try:
            job = strict_json.loads(line, max_depth=MOST_LEVELS)
        except strict_json.JSONError as error:
            wrong.append(f"{name}{error}")
            continue
        if isinstance(job, dict) and isinstance(job.get("body"), dict):
            jobs[name] = job
        else:
            wrong.append(f"{name}not a job: it has no object `body`")
    if wrong:
        more = [f"and {len(wrong) - MOST_ERRORS} lines more"] if len(wrong) > MOST_ERRORS else []
        raise click.ClickException("\n".join(wrong[:MOST_ERRORS] + more))
    if not jobs:
        raise click.ClickException("the file holds no job")
    return jobs


def _submit_all(client: Client, jobs: dict[str, dict[str, Any]], key: str | None) -> list[Job]:
    """`jobs` by the words that name each: those of the job that is refused precede the reason."""
    accepted: list[Job] = []
    names = list(jobs)
    for start in range(0, len(names), MOST_JOBS_PER_CALL):
        part = names[start : start + MOST_JOBS_PER_CALL]
        # each call is accepted or refused whole: a file longer than one call needs a key for each
        part_key = f"{key}-{start}" if key and len(jobs) > MOST_JOBS_PER_CALL else key
        try:
            accepted += client.submit([jobs[name] for name in part], key=part_key)
        except ClientError as error:
            reason = str(error)
            if isinstance(error, Refused) and error.index is not None and error.index < len(part):
                reason = f"{part[error.index]}{error.reason}"
            before = f"; the {start} jobs before were accepted" if start else ""
            raise ClientError(f"{reason}{before}") from None
    return accepted


def _wait(client: Client, jobs: list[Job]) -> list[Job]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("jobs", total=len(jobs))
        ids = [str(job["id"]) for job in jobs]
        ended = client.wait(ids, on_end=lambda _: progress.advance(task))
    return [ended[job_id] for job_id in ids]


def _answer(job: Job) -> str:
    if job["status"] == "succeeded":
        return text_of(job)
    error = job["error"] or {}
    return f"{job['id']} {job['status']}: {error.get('message', '')}"


def _show_job(console: Console, job: Job) -> None:
    table = Table(show_header=False)
    for key in ("id", "custom_id", "model", "url", "status", "attempt", "priority"):
        table.add_row(key, "" if job[key] is None else str(job[key]))
    table.add_row("created", _moment(job["created_at"]))
    for key, value in {**job["usage"], **job["timings"]}.items():
        table.add_row(key, seconds(value) if key.endswith("_s") else str(value))
    if job["status"] == "succeeded":
        table.add_row("text", text_of(job))
    elif job["error"]:
        table.add_row("error", str(job["error"]["message"]))
    elif job["queue_position"] is not None:
        table.add_row("queue_position", str(job["queue_position"]))
    console.print(table, markup=False)


def _show_service(
    console: Console, url: str, is_ready: bool, parts: dict[str, Any], jobs: list[Job]
) -> None:
    console.print(f"{url} is {'ready' if is_ready else 'not ready'}")
    for finding in parts.get("reasons", ()):
        console.print(f"  {finding['message']}", markup=False)
    for finding in parts.get("warnings", ()):
        console.print(f"  warning: {finding['message']}", markup=False)
    if jobs:
        _print_newest(console, jobs)


def _print_newest(console: Console, jobs: list[Job]) -> None:
    """A line for each job. A column that does not fit whole is left out, and named: nothing that
    may be copied is cut."""
    models = sorted({str(job["model"]) for job in jobs})
    columns = _columns(jobs, several_models=len(models) > 1)
    widths = {
        name: max(cell_len(name), *(cell_len(cell) for cell in cells))
        for name, cells in columns.items()
    }
    left = console.width - widths["job"]
    shown = {"job"}
    for name in sorted(columns.keys() - shown, key=IMPORTANCE.index):
        if widths[name] + GAP <= left:
            left -= widths[name] + GAP
            shown.add(name)
    title = None if len(models) > 1 else f"newest jobs, of model {models[0]}"
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, GAP, 0, 0)
    )
    for name in columns:
        if name in shown:
            is_number = name in ("tokens", "total s")
            table.add_column(
                name,
                no_wrap=name != "job",  # a terminal narrower than an id
                overflow="fold",
                justify="right" if is_number else "left",
            )
    for cells in zip(*(columns[name] for name in columns if name in shown), strict=True):
        table.add_row(*map(Text, cells))
    console.print(table, markup=False)
    if missing := [name for name in columns if name not in shown]:
        line = f"no room for: {', '.join(missing)}; --json shows all"
        console.print(line, style="dim", markup=False, highlight=False)


def _columns(jobs: list[Job], *, several_models: bool) -> dict[str, list[str]]:
    """What a line may say of each job. What all or none of them have is no column."""
    columns = {
        "job": [str(job["id"]) for job in jobs],
        "status": [str(job["status"]) for job in jobs],
        "created": [_short_moment(job["created_at"]) for job in jobs],
        "tokens": [str(job["usage"]["total_tokens"]) for job in jobs],
        "total s": [seconds(job["timings"]["total_s"]) for job in jobs],
    }
    if any(job["custom_id"] for job in jobs):
        columns["custom id"] = [_in_one_line(job["custom_id"] or "") for job in jobs]
    if several_models:
        columns["model"] = [str(job["model"]) for job in jobs]
    return columns


def _in_one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]


def _short_moment(epoch_s: float) -> str:
    """The time of today, the day before that."""
    moment = datetime.fromtimestamp(epoch_s)
    is_today = moment.date() == datetime.now().date()
    return moment.strftime("%H:%M:%S" if is_today else "%m-%d %H:%M")


def _moment(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s).strftime("%Y-%m-%d %H:%M:%S")
