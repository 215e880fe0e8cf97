"""Migrations and models describe one schema, on both databases."""

import contextlib

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

import migrations
from jobs.database import Database
from jobs.models import Base


@contextlib.contextmanager
def connected(url):
    database = Database(url)
    try:
        with database.begin() as connection:
            yield connection
    finally:
        database.dispose()


@pytest.fixture
def empty_url(request, database_url, tmp_path):
    """A second database of the same kind with nothing in it."""
    if database_url.startswith("sqlite"):
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    url = database_url.replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE empty_schema TEMPLATE template0")
    yield database_url.rpartition("/")[0] + "/empty_schema"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP DATABASE empty_schema WITH (FORCE)")


def definitions(connection: Connection) -> dict[str, str]:
    """Each column and index, with expressions and predicates, as the database itself words it."""
    if connection.dialect.name == "postgresql":
        query = """
            SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
            UNION ALL
            SELECT table_name || '.' || column_name, concat_ws(' ', row_number() OVER
                   (PARTITION BY table_name ORDER BY ordinal_position), data_type,
                   character_maximum_length, is_nullable, generation_expression)
            FROM information_schema.columns WHERE table_schema = 'public'
        """
    else:
        query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    return {
        name: " ".join(definition.split())
        for name, definition in connection.execute(text(query))
        if not name.startswith("alembic")
    }


def test_models_and_migrations_do_not_differ(database_url):
    with connected(database_url) as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, Base.metadata) == []


def test_a_difference_would_be_seen(database_url):
    with connected(database_url) as connection:
        connection.execute(text("DROP INDEX jobs_newest"))
        connection.execute(text("ALTER TABLE workers ADD COLUMN surplus TEXT"))
        context = MigrationContext.configure(connection)
        kinds = {difference[0] for difference in compare_metadata(context, Base.metadata)}
        assert kinds == {"add_index", "remove_column"}


def test_columns_and_indexes_agree_to_the_letter(database_url, empty_url):
    with connected(database_url) as connection:
        migrated = definitions(connection)
    with connected(empty_url) as connection:
        Base.metadata.create_all(connection)
        assert definitions(connection) == migrated
    assert any("WHERE" in definition for definition in migrated.values())


def test_upgrading_again_changes_nothing(empty_url):
    with connected(empty_url) as connection:
        assert not migrations.up_to_date(connection)
    for _ in range(2):
        migrations.upgrade(empty_url)
        with connected(empty_url) as connection:
            assert migrations.up_to_date(connection)


def test_the_alembic_tool_finds_the_database_by_the_environment(empty_url, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", empty_url)
    config = Config(toml_file="pyproject.toml")
    command.upgrade(config, "head")
    with connected(empty_url) as connection:
        assert migrations.up_to_date(connection)
    command.downgrade(config, "base")
    with connected(empty_url) as connection:
        assert not migrations.up_to_date(connection)
        assert definitions(connection) == {}
