"""`tokenmill up`: the whole service on this machine."""

import shlex
import signal
import threading
from pathlib import Path

import click
from rich.console import Console

from cli import env_file
from cli.options import environment, settings_of
from cli.service import Cancelled, Service, StartError
from cli.start import reporter

WATCH_PAUSE_S = 0.2


@click.command()
@click.option("--host", help="Address the API listens on (TOKENMILL_HOST; 127.0.0.1).")
@click.option(
    "--port", type=int, help="Port of the API (TOKENMILL_PORT; 8000; 0 takes a free one)."
)
@click.option(
    "--data-dir", help="Folder for everything that is kept (TOKENMILL_DATA_DIR; .tokenmill)."
)
@click.option(
    "--model",
    "models",
    multiple=True,
    help="What to serve: NAME or NAME=FOLDER, comma separated or given again (TOKENMILL_MODELS).",
)
@click.option("--log-dir", type=click.Path(path_type=Path), help="Log to files there.")
def up(
    host: str | None,
    port: int | None,
    data_dir: str | None,
    models: tuple[str, ...],
    log_dir: Path | None,
) -> None:
    """Run the whole service on this machine until SIGINT or SIGTERM.

    Brings along Valkey unless REDIS_URL is set, and a SQLite database unless DATABASE_URL is set.
    At the end workers finish what they can in TOKENMILL_DRAIN_GRACE_S seconds and hand back the
    rest; a second signal makes them hand back at once.
    """
    environ = environment(host=host, port=port, data_dir=data_dir, models=",".join(models) or None)
    settings_of(environ)
    console = Console(stderr=True)
    stop = threading.Event()
    service = Service(
        environ,
        log_folder=log_dir,
        report=reporter(console),
        cancelled=stop,
    )

    def on_signal(number: int, frame: object) -> None:
        if stop.is_set():
            service.hurry()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        with service:
            console.print(f"[bold green]ready[/] {service.url}  (Ctrl-C ends it)")
            file = shlex.quote(str(Path(service.settings.data_dir) / env_file.NAME))
            line = f"for other programs, in their shell: set -a; . {file}; set +a"
            console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
            while not stop.wait(WATCH_PAUSE_S):
                service.watch()
            console.print("[dim]ending: workers finish or hand back their jobs[/]")
    except Cancelled:
        console.print("[dim]ended before it was ready[/]")
    except StartError as error:
        raise click.ClickException(str(error)) from None
