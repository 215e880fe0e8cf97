"""From command-line options and the environment to settings, and what every process starts with."""

import logging
import os
from collections.abc import Mapping

from jobs.settings import Settings, variable

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def environment(**overrides: object) -> dict[str, str]:
    """This process's environment with the given settings on top; None leaves one as it is."""
    given = {variable(name): str(value) for name, value in overrides.items() if value is not None}
    return dict(os.environ) | given


def settings_of(environ: Mapping[str, str]) -> Settings:
    """The settings of `environ`; sets up the process's log too. Raises SettingsError."""
    settings = Settings.from_env(environ)
    logging.basicConfig(level=settings.log_level.upper(), format=LOG_FORMAT)
    for name in ("httpx", "httpx2"):  # a line for every request: the supervisor asks ten a second
        logging.getLogger(name).setLevel(logging.WARNING)
    return settings
