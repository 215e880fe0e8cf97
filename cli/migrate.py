"""Bring a database to the schema this version of Tokenmill was written for."""

from pathlib import Path

from alembic import command
from alembic.config import Config

import migrations


def upgrade(database_url: str) -> None:
    """Apply every migration that is missing. Safe to run again, and by two at once on PostgreSQL.

    `migrations/env.py` finds the address in the configuration's `sqlalchemy.url`.
    """
    command.upgrade(configuration(database_url), "head")


def configuration(database_url: str) -> Config:
    """Alembic's configuration for this database, wherever the package is installed."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    # ConfigParser takes % for the start of an interpolation
    config.set_main_option("sqlalchemy.url", database_url.replace("%", "%%"))
    return config
