"""`tokenmill dataset`: rows of text from a spec and an input, run as batches of the service."""

import json
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from bulk import hub, repair
from bulk.errors import DatasetError
from bulk.inputs import find_source
from bulk.outputs import Outputs
from bulk.requests import Requests, text_of
from bulk.runner import Runner
from bulk.spec import read_spec
from bulk.state import State
from bulk.workplace import Workplace
from cli.batch_client import BatchClient
from cli.client import ClientError
from cli.dataset_view import View, summary
from cli.options import environment
from cli.service import StartError
from cli.serving import Where, serving
from jobs.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

NOT_RETRIED = ("invalid_request",)  # the same request would be refused again
SPEC = click.argument("spec_path", metavar="SPEC", type=click.Path(dir_okay=False, path_type=Path))


def service_options(command: F) -> F:
    for option in (
        click.option("--data-dir", help="Folder of the service run here (TOKENMILL_DATA_DIR)."),
        click.option("--model", help="What to serve here: NAME or NAME=FOLDER; the spec's model."),
        click.option("--url", help="A running service; without it one is run here meanwhile."),
    ):
        command = option(command)
    return command


@click.group()
def dataset() -> None:
    """Make a dataset from a spec; docs/datasets.md says what stands in one."""


@dataset.command()
@SPEC
def check(spec_path: Path) -> None:
    """Read the spec and the whole input, run nothing; show the first row's request."""
    with _said():
        spec = read_spec(spec_path)
        source = find_source(spec.input, spec_path.parent)
        requests = Requests(spec)
        num_rows = 0
        for row in source.rows():
            requests.check(row)
            if row.number == 0:
                first = requests.of(row.values, seed=requests.seed(row.values, 0, 0, 0))
                click.echo(json.dumps(first.body, ensure_ascii=False, indent=2))
            num_rows += 1
    click.echo(f"{num_rows} rows, {num_rows * spec.samples} to be generated", err=True)


@dataset.command()
@SPEC
@service_options
def run(spec_path: Path, url: str | None, model: str | None, data_dir: str | None) -> None:
    """Make the dataset. The same command again goes on where it stopped.

    Exit status 0: every sample was delivered; 1: some were not, and rejects.jsonl says why.
    """
    _run(spec_path, Where(url, model, data_dir))


@dataset.command("retry-failed")
@SPEC
@service_options
def retry_failed(spec_path: Path, url: str | None, model: str | None, data_dir: str | None) -> None:
    """Ask again for what was not delivered, but for requests that would be refused again."""

    def retry(workplace: Workplace, state: State) -> None:
        num = state.retry(rounds=workplace.spec.repair.rounds, not_kinds=NOT_RETRIED)
        click.echo(f"{num} to be asked again", err=True)

    _run(spec_path, Where(url, model, data_dir), retry)


@dataset.command()
@SPEC
@click.option("--json", "as_json", is_flag=True, help="For a program.")
def status(spec_path: Path, as_json: bool) -> None:
    """How far the dataset is."""
    with _state(spec_path) as (workplace, state):
        runner = Runner(workplace.spec, spec_path.parent, state, workplace.hidden)
        runner.count()
        progress = runner.progress
        found = {
            "running": workplace.is_held(), "wanted": state.fact("wanted") or "run",
            "rows": state.fact("num_rows"), "samples": progress.total,
            "delivered": progress.delivered, "not_delivered": dict(progress.failed),
            "asked_again": progress.repaired, "prompt_tokens": progress.prompt_tokens,
            "completion_tokens": progress.completion_tokens,
            "saved_tokens": progress.saved_tokens,
            "shards": [shard["name"] for shard in state.shards().values()],
        }  # fmt: skip
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        click.echo(f"{name:18} {value}")


@dataset.command()
@SPEC
def pause(spec_path: Path) -> None:
    """Let no more rows be started, until `resume`."""
    _want(spec_path, "pause")


@dataset.command()
@SPEC
def resume(spec_path: Path) -> None:
    """Go on after `pause`."""
    _want(spec_path, "run")


@dataset.command()
@SPEC
def cancel(spec_path: Path) -> None:
    """End it; what is done stays. `run` goes on with what was not begun."""
    _want(spec_path, "cancel")


@dataset.command()
@SPEC
@click.option(
    "-o", "--output-file", "output", required=True, type=click.Path(dir_okay=False, path_type=Path)
)
@click.option("--format", "form", type=click.Choice(["jsonl", "parquet", "csv"]))
def export(spec_path: Path, output: Path, form: str | None) -> None:
    """Write what has been delivered so far, in input order, to one file; at any time."""
    with _state(spec_path) as (workplace, state):
        if state.fact("num_rows") is None:
            raise DatasetError("the input has not been read to its end yet")
        num = Outputs(workplace.spec, state, workplace.folder).write(output, form=form)
    click.echo(f"{output}: {num} samples", err=True)


@dataset.command()
@SPEC
@click.option("--row", required=True, type=click.IntRange(0), help="From 0, in input order.")
@click.option("--sample", default=0, type=click.IntRange(0))
@service_options
def regenerate(
    spec_path: Path,
    row: int,
    sample: int,
    url: str | None,
    model: str | None,
    data_dir: str | None,
) -> None:
    """Ask for one row alone, as it was asked in the end. Exit status 1: it is another text."""
    with _state(spec_path) as (workplace, state):
        spec = workplace.spec
        last = state.last_round(row, sample)
        found = None if last is None else state.one(row, sample, last)
        if found is None or found[1].output is None:
            raise DatasetError(f"row {row}, sample {sample} has no output")
        each, result = found
        asked = repair.asked(spec, Requests(spec), state, each)
        with _client(Console(stderr=True), spec.model, Where(url, model, data_dir)) as client:
            body = client.answer(asked.url, asked.body)
        text = text_of(body["choices"][0])
    click.echo(text)
    if text != result.output:
        raise click.ClickException("not the text of the dataset")


@dataset.command()
@SPEC
@click.option("--repo", required=True, help="OWNER/NAME of a dataset repository; made if missing.")
@click.option("--private", is_flag=True, help="If it is made.")
@click.option("--partial", is_flag=True, help="Of a dataset that is not complete.")
def push(spec_path: Path, repo: str, private: bool, partial: bool) -> None:
    """Push shards, manifest and a card to the Hugging Face hub (HF_TOKEN, HF_ENDPOINT)."""
    with _said():
        workplace = Workplace(read_spec(spec_path), spec_path.parent)
        workplace.state().close()  # there is one, or nothing to push
        with workplace.held():
            where = hub.push(workplace.folder, repo, private=private, partial=partial)
    click.echo(where)


def _run(
    spec_path: Path, where: Where, before: Callable[[Workplace, State], None] | None = None
) -> None:
    if where.url and (where.model or where.data_dir):
        raise click.UsageError("--model and --data-dir are for a service run here, without --url")
    console = Console(stderr=True)
    try:
        with _said():
            manifest = _made(spec_path, where, console, before)
    except KeyboardInterrupt:
        console.print("stopped: the same command goes on from here")
        sys.exit(130)
    console.print(summary(manifest), markup=False, soft_wrap=True)
    if manifest["samples"]["delivered"] < manifest["rows"] * len_samples(manifest):
        sys.exit(1)


def len_samples(manifest: dict[str, Any]) -> int:
    return int(manifest["spec"]["samples"])


def _made(
    spec_path: Path,
    where: Where,
    console: Console,
    before: Callable[[Workplace, State], None] | None,
) -> dict[str, Any]:
    spec = read_spec(spec_path)
    workplace = Workplace(spec, spec_path.parent)
    with workplace.held(), closing(workplace.state(new=True)) as state:
        outputs = Outputs(spec, state, workplace.folder)
        with View(console) as view:
            runner = Runner(
                spec, spec_path.parent, state, workplace.hidden,
                told=view, settled=outputs.write_settled,
            )  # fmt: skip
            runner.read(workplace.begin(state))
        if before is not None:
            before(workplace, state)
        state.note(wanted="run", service=where.url)
        if not (state.num_planned() or state.open_batches()):
            return workplace.finish(state)
        with _client(console, spec.model, where) as client, View(console) as view:
            runner.told = view
            if (served := client.model(spec.model)) is not None:
                state.note(model=served)
            runner.run(client)
        return workplace.finish(state)


def _want(spec_path: Path, wanted: str) -> None:
    """Tell the run that works on it, else the service that has its batches."""
    with _state(spec_path) as (workplace, state):
        state.note(wanted=wanted)
        if workplace.is_held():
            click.echo("the run that works on it will do so", err=True)
            return
        url = state.fact("service")
        if not url or not state.open_batches():
            click.echo("nothing works on it now", err=True)
            return
        key = Settings.from_env(environment()).api_key
        with BatchClient(url, key=key) as client:
            Runner(workplace.spec, spec_path.parent, state, workplace.hidden).steer(client, wanted)
        click.echo(f"told {url}", err=True)


@contextmanager
def _client(console: Console, model: str, where: Where) -> Iterator[BatchClient]:
    with serving(console, where.url, where.model or model, where.data_dir) as address:
        key = Settings.from_env(environment()).api_key
        with BatchClient(address, key=key) as client:
            yield client


@contextmanager
def _state(spec_path: Path) -> Iterator[tuple[Workplace, State]]:
    with _said():
        workplace = Workplace(read_spec(spec_path), spec_path.parent)
        with closing(workplace.state()) as state:
            yield workplace, state


@contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except (DatasetError, ClientError, StartError) as error:
        raise click.ClickException(str(error)) from None
    except sqlite3.OperationalError as error:  # no room, no right to write, or held too long
        message = f"how far the dataset is cannot be read or written: {error}"
        raise click.ClickException(message) from None
    except sqlite3.DatabaseError as error:
        raise click.ClickException(f"the dataset's state is damaged: {error}") from None
