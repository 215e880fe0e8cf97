"""`tokenmill run-batch`: a file of requests to a file of answers, begun once and gone on with.

Beside the output stands a small file that says which batch it is of: the same command finds it and
goes on, after Ctrl-C, a crash or a lost connection. Answers are appended to OUTPUT.part in the
order of the input while the batch runs, and get the output's name when all are there.
"""

import fcntl
import hashlib
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bulk.inputs import UNREADABLE, open_plain
from cli.batch_client import ENDED, Batch, BatchClient
from cli.client import ClientError
from cli.options import environment
from cli.service import StartError
from cli.serving import Where, serving
from jobs.lines import lines_of
from jobs.settings import Settings

POLL_S = 0.5
SHOWN_ERRORS = 20
MAX_LINE_BYTES = 1 << 26  # of the first row, which is read here


@dataclass(slots=True)
class Progressed:
    """How far the command is, as kept beside the output."""

    input_sha256: str
    key: str  # under which the batch is created, once
    file_id: str | None = None
    batch_id: str | None = None
    done: bool = False


@click.command("run-batch")
@click.option(
    "-i", "--input-file", "source", required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Requests as JSON lines, as OpenAI's batches have them.",
)  # fmt: skip
@click.option(
    "-o", "--output-file", "output", required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where answers go, one a line, in the order of the requests.",
)  # fmt: skip
@click.option("--url", help="A running service; without it one is run here until all is done.")
@click.option("--model", help="What to serve here: NAME or NAME=FOLDER; by default the rows' own.")
@click.option("--data-dir", help="Folder of the service run here (TOKENMILL_DATA_DIR; .tokenmill).")
@click.option("--priority", type=click.IntRange(-10, 10), help="Of the rows; -5 by default.")
@click.option(
    "--dedupe", is_flag=True,
    help="Rows with the same body, greedy or of one seed, are generated once.",
)  # fmt: skip
def run_batch(
    source: Path,
    output: Path,
    url: str | None,
    model: str | None,
    data_dir: str | None,
    priority: int | None,
    dedupe: bool,
) -> None:
    """Answer a file of requests. The same command again goes on where it stopped.

    The input may be packed with gzip or Zstandard.

    Exit status 0: every row has its line in the output, be it an error; 1: it has not.
    """
    if url and (model or data_dir):
        raise click.UsageError("--model and --data-dir are for a service run here, without --url")
    if not output.parent.is_dir():  # known before a service is started for it
        raise click.UsageError(f"{output.parent} is no folder")
    if output.exists() and output.samefile(source):
        raise click.UsageError("--output-file is --input-file: the requests would be lost")
    console = Console(stderr=True)
    fields: dict[str, Any] = {} if priority is None else {"priority": priority}
    fields |= {"dedupe": True} if dedupe else {}
    try:
        with _held(output):
            batch = _answered(console, source, output, Where(url, model, data_dir), fields)
    except (ClientError, StartError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        console.print("stopped: the same command goes on from here")
        sys.exit(130)
    if batch is None:
        console.print(f"{output} is complete already", markup=False, soft_wrap=True)
    else:
        _tell(console, batch, output)


def _answered(
    console: Console, source: Path, output: Path, where: Where, fields: dict[str, Any]
) -> Batch | None:
    """The batch when it has ended; None where all was done before."""
    try:
        endpoint, named = _first_row(source)
        place = output.with_name(f".{output.name}.tokenmill")
        state = _earlier(place, _digest(source))
    except UNREADABLE as error:
        raise _unreadable(source, error) from None
    if state.done and output.exists():
        return None
    state.done = False
    with serving(console, where.url, where.model or named, where.data_dir) as address:
        key = Settings.from_env(environment()).api_key
        with BatchClient(address, key=key) as client:
            return _Work(client, console, source, output, place, state).run(endpoint, fields)


@contextmanager
def _held(output: Path) -> Iterator[None]:
    """By one command at a time: two would append to one file. The lock goes with its file."""
    path = output.with_name(f".{output.name}.tokenmill.lock")
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"{output} is being made by another run-batch"
                raise click.ClickException(message) from None
            if os.fstat(fd).st_nlink:  # else its last holder has just taken it away
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(fd)


class _Work:
    def __init__(
        self,
        client: BatchClient,
        console: Console,
        source: Path,
        output: Path,
        place: Path,
        state: Progressed,
    ) -> None:
        self._client = client
        self._console = console
        self._source = source
        self._output = output
        self._part = output.with_name(f"{output.name}.part")
        self._place = place
        self._state = state

    def run(self, endpoint: str, fields: dict[str, Any]) -> Batch:
        """The batch when it has ended; then its rows are in the output."""
        batch = None
        while batch is None:
            batch = self._follow(self._begin(endpoint, fields))
        if batch["status"] == "failed":
            self._part.unlink(missing_ok=True)
            self._place.unlink(missing_ok=True)
            return batch
        os.replace(self._part, self._output)
        self._state.done = True
        self._save()
        return batch

    def _begin(self, endpoint: str, fields: dict[str, Any]) -> Batch:
        """The batch of an earlier time, else a new one."""
        state = self._state
        if state.batch_id is not None:
            if (batch := self._client.batch(state.batch_id)) is not None:
                self._console.print(f"going on with {state.batch_id}", style="dim")
                return batch
            self._forget()
        self._part.unlink(missing_ok=True)
        self._save()
        if state.file_id is not None:  # of a time before
            batch = self._client.create(state.file_id, endpoint, key=state.key, **fields)
            if batch is not None:
                return self._begun(batch)
        try:
            state.file_id = self._client.upload(self._source)
        except UNREADABLE as error:
            raise _unreadable(self._source, error) from None
        self._save()
        batch = self._client.create(state.file_id, endpoint, key=state.key, **fields)
        if batch is None:
            raise ClientError(f"{self._client.url} does not keep the file that it has taken")
        return self._begun(batch)

    def _begun(self, batch: Batch) -> Batch:
        self._state.batch_id = batch["id"]
        self._save()
        return batch

    def _forget(self) -> None:
        """The service knows nothing of it any more: begin anew, under another key."""
        state = self._state
        state.file_id, state.batch_id, state.key = None, None, uuid.uuid4().hex

    def _follow(self, batch: Batch) -> Batch | None:
        """The batch when it has ended; None where its rows are kept no more."""
        num_rows = _whole_lines(self._part)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(),
        )  # fmt: skip
        with self._part.open("ab") as part, Progress(*columns, console=self._console) as progress:
            task = progress.add_task(batch["status"], total=None)
            while True:
                ended = batch["status"] in ENDED
                page = self._client.results(batch["id"], num_rows)
                if page is None:
                    self._console.print(f"{batch['id']} has no rows any more: begun anew")
                    self._forget()
                    return None
                lines, more = page
                for line in lines:
                    for name in ("row", "attempt", "timings", "saved_tokens"):  # ours alone
                        line.pop(name, None)
                    text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
                    part.write(text.encode(errors="surrogatepass") + b"\n")
                part.flush()
                num_rows += len(lines)
                counts = batch["request_counts"]
                progress.update(
                    task, completed=num_rows, total=counts["total"] or None,
                    description=f"{batch['status']}, {counts['failed']} failed",
                )  # fmt: skip
                if ended and not (more and lines):  # some of a cancelled one's are never told
                    os.fsync(part.fileno())
                    return batch
                if not lines:
                    time.sleep(POLL_S)
                batch = self._client.batch(batch["id"]) or batch

    def _save(self) -> None:
        new = self._place.with_name(f"{self._place.name}.new")
        new.write_text(json.dumps(asdict(self._state)) + "\n")
        os.replace(new, self._place)


def _first_row(source: Path) -> tuple[str, str | None]:
    """The endpoint and the model of the first row, which all others must have too."""
    with open_plain(source) as file:
        line = next(lines_of(file, MAX_LINE_BYTES), None)
    if line is None:
        raise click.ClickException(f"{source} has no rows")
    try:
        row = json.loads(line.data or b"")
        endpoint, model = row["url"], row["body"]["model"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise click.ClickException(
            f"{source}: the first line is no request with url and body.model"
        ) from None
    return str(endpoint), model if isinstance(model, str) else None


def _unreadable(source: Path, error: Exception) -> click.ClickException:
    return click.ClickException(f"{source} cannot be read: {error}")


def _digest(source: Path) -> str:
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _earlier(place: Path, input_sha256: str) -> Progressed:
    """What the command of before has left, where it was about the same input."""
    try:
        state = Progressed(**json.loads(place.read_text()))
    except (OSError, ValueError, TypeError):
        state = None
    if state is None or state.input_sha256 != input_sha256:
        return Progressed(input_sha256=input_sha256, key=uuid.uuid4().hex)
    return state


def _whole_lines(part: Path) -> int:
    """How many rows are there; half a line of a crash is cut off."""
    if not part.exists():
        return 0
    num, end = 0, 0
    with part.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            num, end = num + 1, end + len(line)
        file.truncate(end)
    return num


def _tell(console: Console, batch: Batch, output: Path) -> None:
    counts = batch["request_counts"]
    if batch["status"] == "failed":
        for error in (batch["errors"] or {"data": []})["data"][:SHOWN_ERRORS]:
            where = "" if error["line"] is None else f"line {error['line']}: "
            text = f"{where}{error['message']} ({error['code']})"
            console.print(text, markup=False, soft_wrap=True)
        raise click.ClickException("the input is no batch; nothing was run")
    text = f"{output}: {counts['completed']} rows answered, {counts['failed']} failed"
    saved = (batch["progress"] or {}).get("saved", {"rows": 0})
    if saved["rows"]:
        text += f", {saved['rows']} took the result of another: {saved['tokens']} tokens saved"
    console.print(text, markup=False, soft_wrap=True)
    if batch["status"] != "completed":
        raise click.ClickException(f"the batch was {batch['status']} before all rows were done")
