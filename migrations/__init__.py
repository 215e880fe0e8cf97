"""The schema over time. `upgrade` brings a database to the newest, from a clone or installed."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from jobs.database import Database

_LOCK = 0x746F6B6D  # one migration at a time: api, worker and sweeper may start together


def upgrade(url: str) -> None:
    """Apply every migration not yet applied, all or none of them. Raises what the database does."""
    database = Database(url, pool_size=1)
    try:
        with database.begin() as connection:
            if not database.sqlite:
                # an index on many jobs takes longer than any statement of a running service may
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text("SET LOCAL lock_timeout = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        database.dispose()


def up_to_date(connection: Connection) -> bool:
    """Whether the database has this release's schema: readiness asks it."""
    applied = MigrationContext.configure(connection).get_current_revision()
    return applied == ScriptDirectory.from_config(_config()).get_current_head()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    return config
