"""Alembic's entry: on the connection `upgrade` hands over, or on DATABASE_URL's for the tool."""

from alembic import context
from sqlalchemy import Connection

from jobs.database import Database
from jobs.models import Base
from jobs.settings import Settings


def run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()


if (handed_over := context.config.attributes.get("connection")) is not None:
    run(handed_over)
else:
    database = Database(Settings.from_env().database_url, pool_size=1)
    with database.begin() as connection:
        run(connection)
    database.dispose()
