"""The long-running processes of a deployment, one command each, and the migration before them.

Each imports its floor when it is called: the API process must not carry the worker's imports, nor
the other way round.
"""

import signal
import socket
import sys
import threading

import click

from cli.addresses import port_holder
from cli.options import environment, settings_of


@click.command()
@click.option("--host", help="Address to listen on (TOKENMILL_HOST).")
@click.option("--port", type=int, help="Port to listen on (TOKENMILL_PORT).")
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    default=1,
    help="So many that listen on the one port: each takes a core at most.",
)
@click.option("--listen-fd", type=int, hidden=True, help="A socket that listens already.")
def api(host: str | None, port: int | None, processes: int, listen_fd: int | None) -> None:
    """Run the HTTP API until SIGTERM."""
    environ = environment(host=host, port=port)
    settings = settings_of(environ)
    listening = None if listen_fd is None else socket.socket(fileno=listen_fd)
    if listening is None and (taken := port_holder(settings.host, settings.port)) is not None:
        raise click.ClickException(taken)
    if processes > 1:
        from cli.api_processes import run_several

        run_several(environ, settings, processes)
        return
    from api.door import UnreadableModel
    from api.main import run

    try:
        run(settings, listening)
    except UnreadableModel as error:
        raise click.ClickException(str(error)) from None


@click.command()
@click.option("--model", help="Which of TOKENMILL_MODELS to run; optional if there is only one.")
@click.option(
    "--concurrency", type=int, help="Most sequences in one step (TOKENMILL_MAX_NUM_SEQS)."
)
@click.option("--progress-fd", type=int, hidden=True, help="Descriptor that hears of the start.")
def worker(model: str | None, concurrency: int | None, progress_fd: int | None) -> None:
    """Run a worker until SIGTERM: it takes jobs for one model and runs them in one engine."""
    settings = settings_of(environment(max_num_seqs=concurrency))
    names = [entry.name for entry in settings.models]
    if (model is None and len(names) > 1) or (model is not None and model not in names):
        got = f"; got {model}" if model else ""
        raise click.UsageError(f"--model must be one of: {', '.join(names)}{got}")
    from worker.main import run_worker
    from worker.progress import Progress

    progress = Progress(progress_fd)
    sys.exit(run_worker(settings, settings.model(model or names[0]), progress=progress))


@click.command()
def sweeper() -> None:
    """Run the sweeper until SIGTERM: lapsed leases, deadlines and the runway of every model."""
    settings = settings_of(environment())
    from sqlalchemy.exc import DBAPIError

    from jobs.store import WrongSchema
    from worker.sweeper import run

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        run(settings, stop)
    except WrongSchema as error:
        raise click.ClickException(str(error)) from None
    except DBAPIError as error:  # a database that is away is waited for: this one never serves
        reason = str(error).partition("\n")[0]  # further lines hold the statement
        raise click.ClickException(f"the database cannot be used: {reason}") from None


@click.command()
def migrate() -> None:
    """Bring the database of DATABASE_URL to the newest schema. Safe to repeat."""
    settings = settings_of(environment())
    import migrations

    try:
        migrations.upgrade(settings.database_url)
    except migrations.SchemaError as error:
        raise click.ClickException(str(error)) from None
    click.echo("the database is at the newest schema")
