"""`<data-dir>/env`: the environment of the running service, for shells to read.

    set -a; . .tokenmill/env; set +a

gives every program started from that shell the service's addresses and its settings. The file
holds passwords: only its owner may read it. It is there while the service is ready.
"""

import os
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from jobs.settings import ModelEntry, Settings, variable

NAME = "env"


def write(environ: Mapping[str, str], settings: Settings) -> Path:
    """Put the settings that `environ` makes into the data folder's file, whole or not at all."""
    folder = Path(settings.data_dir)
    given = {variable(each.name): environ.get(variable(each.name), "") for each in fields(Settings)}
    given |= {
        variable("database_url"): settings.database_url,
        variable("redis_url"): settings.redis_url,
        variable("data_dir"): settings.data_dir,
        variable("models"): ",".join(_entry(model, folder) for model in settings.models),
        variable("host"): settings.host,
        variable("port"): str(settings.port),
    }
    text = "".join(f"{name}={shlex.quote(value)}\n" for name, value in given.items() if value)
    fd, draft = tempfile.mkstemp(prefix=f".{NAME}.", dir=folder)  # 0600 from the start
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(draft, folder / NAME)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    return folder / NAME


def remove(folder: Path) -> None:
    """Take the file away: of a service that ends, or of one that was killed."""
    (folder / NAME).unlink(missing_ok=True)


def _entry(model: ModelEntry, folder: Path) -> str:
    """As TOKENMILL_MODELS has it, in whatever folder it is read."""
    path = Path(model.path).resolve()
    return (
        model.name if path == (folder / "models" / model.name).resolve() else f"{model.name}={path}"
    )
