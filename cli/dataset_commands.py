"""`tokenmill dataset`: rows of text from a spec and an input, run as batches of the service."""

import json
from pathlib import Path

import click

from bulk.errors import DatasetError
from bulk.inputs import find_source
from bulk.requests import Requests, seed_of
from bulk.spec import read_spec

SPEC = click.argument("spec_path", metavar="SPEC", type=click.Path(dir_okay=False, path_type=Path))


@click.group()
def dataset() -> None:
    """Make a dataset from a spec; docs/datasets.md says what stands in one."""


@dataset.command()
@SPEC
def check(spec_path: Path) -> None:
    """Read the spec and the whole input, run nothing; show the first row's request."""
    try:
        spec = read_spec(spec_path)
        source = find_source(spec.input, spec_path.parent)
        requests = Requests(spec)
        num_rows = 0
        for row in source.rows():
            requests.check(row)
            if row.number == 0:
                first = requests.of(row.values, seed=seed_of(spec.seed, 0, 0, 0))
                click.echo(json.dumps(first.body, ensure_ascii=False, indent=2))
            num_rows += 1
    except DatasetError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{num_rows} rows, {num_rows * spec.samples} to be generated", err=True)
