"""From command-line options and the environment to settings, and what every process starts with."""

import logging
import os
from collections.abc import Mapping

import click

from jobs import logs
from jobs.settings import Settings, SettingsError, variable


def environment(**overrides: object) -> dict[str, str]:
    """This process's environment with the given options on top; None leaves a setting as it is.

    Raises click.UsageError for an option out of its setting's bounds.
    """
    given = {variable(name): str(value) for name, value in overrides.items() if value is not None}
    environ = dict(os.environ) | given
    try:
        Settings.from_env(environ)
    except SettingsError as error:
        if error.variable in given:
            raise click.UsageError(str(error)) from None
    return environ


def settings_of(environ: Mapping[str, str]) -> Settings:
    """The settings of `environ`; sets up the process's log too. Raises SettingsError."""
    settings = Settings.from_env(environ)
    logs.set_up(settings)
    for name in ("httpx", "httpx2"):  # a line for every request: the supervisor asks ten a second
        logging.getLogger(name).setLevel(logging.WARNING)
    if settings.log_level != "debug":  # ten lines of what a migration is about to ask
        logging.getLogger("alembic").setLevel(logging.WARNING)
    return settings
