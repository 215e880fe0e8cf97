"""What commands that work straight in the database share: how they reach it, and how they show."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from cli.options import environment, settings_of
from jobs.database import Database, trouble
from jobs.keys import KeyRefused
from jobs.store import WrongSchema, need_schema
from jobs.tenants import TenantError

R = TypeVar("R")


def in_database(statement: Callable[[Connection, float], R]) -> R:
    """One transaction, at the database's time. What goes wrong is said in a line."""
    with _database() as database, database.begin() as connection:
        return statement(connection, database.clock(connection))


@contextmanager
def _database() -> Iterator[Database]:
    database = Database(settings_of(environment()).database_url, pool_size=1)
    try:
        with database.read() as connection:
            need_schema(connection)
        yield database
    except (WrongSchema, TenantError, KeyRefused) as error:
        raise click.ClickException(str(error)) from None
    except DBAPIError as error:
        raise click.ClickException(trouble(error)) from None
    finally:
        database.dispose()


def shown_time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def show(
    columns: tuple[str, ...], rows: Iterator[dict[str, Any]], *, as_json: bool = False
) -> None:
    """A table on a terminal; JSON, one object a line, for a program."""
    if as_json or not sys.stdout.isatty():
        for row in rows:
            click.echo(json.dumps(row))
        return
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*("–" if row[name] is None else str(row[name]) for name in columns))
    Console().print(table)
