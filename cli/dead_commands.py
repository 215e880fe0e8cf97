"""`tokenmill dead` and `tokenmill requeue`: jobs that have failed, straight in the database."""

import re
from collections.abc import Callable
from dataclasses import asdict
from functools import partial, wraps
from typing import Any

import click
from sqlalchemy import Connection

from cli.rows import in_database, show, shown_time
from jobs import dead as dead_rows
from jobs.dead import DeadJob, Which
from jobs.lifecycle import ErrorCode

MOST = 100_000  # jobs in one listing
_AGO = re.compile(r"(\d{1,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
COLUMNS = ("id", "tenant", "model", "error", "reason", "attempts", "failed")


class Ago(click.ParamType[float]):
    """A length of time before now: 90s, 30m, 12h, 7d."""

    name = "ago"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        found = _AGO.fullmatch(value)
        if found is None:
            self.fail(f"{value!r} is no number with s, m, h or d behind it", param, ctx)
        return float(int(found[1]) * _SECONDS[found[2]])


def which_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which failed jobs are meant; the command gets a Which, or None."""

    @click.option("--model", help="Only of this model.")
    @click.option("--tenant", help="Only this tenant's.")
    @click.option(
        "--error", type=click.Choice(list(map(str, ErrorCode))), help="Only of this code."
    )
    @click.option("--since", type=Ago(), help="Failed no longer ago: 90s, 30m, 12h, 7d.")
    @wraps(command)
    def with_which(
        *,
        model: str | None,
        tenant: str | None,
        error: str | None,
        since: float | None,
        **others: Any,
    ) -> None:
        which = None
        if any(option is not None for option in (model, tenant, error, since)):
            # what fails while the command runs is not meant: it might be what was just queued again
            now = in_database(lambda connection, now: now)
            which = Which(
                model=model,
                tenant=tenant,
                error=error,
                since=None if since is None else now - since,
                until=now,
            )
        command(which, **others)

    return with_which


@click.command()
@which_options
@click.option(
    "--limit", type=click.IntRange(1, MOST), default=100, show_default=True, help="Most shown."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def dead(which: Which | None, limit: int, as_json: bool) -> None:
    """Show jobs that have failed, the last first, and why."""
    records = in_database(
        lambda connection, now: dead_rows.list_dead(connection, which or Which(), limit=limit)
    )
    show(COLUMNS, map(_row, records), as_json=as_json)


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@which_options
def requeue(which: Which | None, ids: tuple[str, ...]) -> None:
    """Queue failed jobs again, with all their attempts before them: by their ids, or all that the
    options name."""
    if bool(ids) == (which is not None):
        raise click.UsageError("name jobs by their ids, or by options; not by both")
    if which is not None:
        click.echo(f"{_requeue_all(which)} jobs queued again")
        return
    refused: dict[str, str] = {}
    for start in range(0, len(ids), dead_rows.ROUND):
        answers = in_database(partial(_requeue, ids[start : start + dead_rows.ROUND]))
        refused |= {job_id: why for job_id, why in answers.items() if why is not None}
    for job_id, why in refused.items():
        click.echo(f"{job_id[:100]} is left as it is: {why}", err=True)
    click.echo(f"{len(set(ids)) - len(refused)} jobs queued again")
    if refused:
        raise click.exceptions.Exit(1)


def _requeue(ids: tuple[str, ...], connection: Connection, now: float) -> dict[str, str | None]:
    return dead_rows.requeue(connection, ids, now=now)


def _requeue_all(which: Which) -> int:
    num = 0
    while True:
        done = in_database(
            lambda connection, now: dead_rows.requeue_all(connection, which, now=now)
        )
        num += len(done)
        if len(done) < dead_rows.ROUND:
            return num


def _row(record: DeadJob) -> dict[str, Any]:
    return asdict(record) | {
        "attempts": f"{record.attempt}/{record.max_attempts}",
        "failed": shown_time(record.failed_at),
    }
