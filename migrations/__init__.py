"""The schema over time. `upgrade` brings a database to the newest, from a clone or installed.

SchemaError
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError

from jobs.database import Database
from jobs.models import Base

_LOCK = 0x746F6B6D  # one migration at a time: api, worker and sweeper may start together


class SchemaError(Exception):
    """The database cannot be brought to this version's schema; nothing in it was changed."""


def upgrade(url: str) -> None:
    """Apply every migration not yet applied, all or none of them. Raises SchemaError."""
    try:
        _upgrade(url)
    except DBAPIError as error:
        reason = str(error.orig).partition("\n")[0]  # further lines hold a statement
        raise SchemaError(f"the database cannot be brought up to date: {reason}") from error


def _upgrade(url: str) -> None:
    database = Database(url, pool_size=1)
    try:
        with database.begin() as connection:
            if not database.sqlite:
                # an index on many jobs takes longer than any statement of a running service may
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text("SET LOCAL lock_timeout = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            _check_ours(connection)
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        database.dispose()


def _check_ours(connection: Connection) -> None:
    """Raises SchemaError for a schema of a later version, and for tables that are not ours."""
    revision = MigrationContext.configure(connection).get_current_revision()
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if revision is not None and revision not in known:
        raise SchemaError(
            f"the database has a schema of another version of Tokenmill, {revision}: "
            "use that version, or another DATABASE_URL"
        )
    foreign = sorted(set(inspect(connection).get_table_names()) & Base.metadata.tables.keys())
    if revision is None and foreign:
        raise SchemaError(
            f"the database has a table {foreign[0]} that Tokenmill did not make: "
            "use another DATABASE_URL"
        )


def up_to_date(connection: Connection) -> bool:
    """Whether the database has this release's schema: readiness asks it."""
    applied = MigrationContext.configure(connection).get_current_revision()
    return applied == ScriptDirectory.from_config(_config()).get_current_head()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    return config
