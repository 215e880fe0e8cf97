"""The service of a command that needs one: that of its --url, or one that is run here meanwhile."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cli.options import environment
from cli.service import Service, watch_in_background
from cli.start import reporter
from jobs.settings import Settings, variable

# on one's own machine nothing is too large, and who stops a command does not want to wait: what
# runs is handed back with its tokens, and the command goes on from there
OF_A_COMMAND = {"max_batch_rows": 10_000_000, "max_file_bytes": 1 << 44, "drain_grace_s": 0}


@dataclass(frozen=True, slots=True)
class Where:
    """The service that a command is to use."""

    url: str | None
    model: str | None
    data_dir: str | None


@contextmanager
def serving(
    console: Console, url: str | None, model: str | None, data_dir: str | None
) -> Iterator[str]:
    """The address of the service. Raises StartError."""
    if url:
        yield url
        return
    environ = environment(data_dir=data_dir, models=model, host="127.0.0.1", port=0)
    for name, value in OF_A_COMMAND.items():
        environ.setdefault(variable(name), str(value))
    folder = Path(Settings.from_env(environ).data_dir) / "logs"
    # as by Ctrl-C: unwinds, and so ends what was started
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    service = Service(
        environ,
        log_folder=folder,
        report=reporter(console),
        cancelled=threading.Event(),
    )
    with service:
        end_watch = watch_in_background(service)
        try:
            yield service.url
        finally:
            end_watch()
