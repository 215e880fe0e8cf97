"""Fixtures that every floor shares: servers from wheels, migrated databases, models on disk."""

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

import migrations
from cli.models import fetch
from cli.servers import Postgres, Valkey
from tests import tenant_guard
from tests.tiny_llama import write_tiny_llama

# before torch is imported, and inherited by every process that a test starts: OpenMP's threads else
# spin while they wait, and tests on a shared machine take ten times as long
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

REPOSITORY = Path(__file__).resolve().parent.parent
_names = itertools.count()


tenant_guard.watch()


@pytest.fixture(autouse=True)
def no_statement_forgets_its_tenant() -> Iterator[None]:
    """Whatever test makes a statement run that looks at all tenants' rows, fails."""
    yield
    found = dict(tenant_guard.found)
    tenant_guard.found.clear()
    assert found == {}, f"statements that name no tenant: {found}"


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory) -> Iterator[Valkey]:
    """One server for the session, for tests that do not kill it."""
    with Valkey(tmp_path_factory.mktemp("valkey"), persist=False) as server:
        yield server


@pytest.fixture
def valkey_url(valkey_server: Valkey) -> str:
    """Address of an empty Redis."""
    with redis.Redis.from_url(valkey_server.url) as client:
        client.flushall()
    return valkey_server.url


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """One server for the session, for tests that do not kill it."""
    with Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def _migrated_sqlite(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("migrated") / "template.db"
    migrations.upgrade(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def _migrated_postgres(postgres_server: Postgres) -> str:
    name = "migrated"
    with _postgres(postgres_server) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    migrations.upgrade(_with_database(postgres_server.url, name))
    return name


@pytest.fixture
def sqlite_url(_migrated_sqlite: Path, tmp_path: Path) -> str:
    """A fresh, migrated SQLite database."""
    file = tmp_path / "tokenmill.db"
    shutil.copyfile(_migrated_sqlite, file)
    return f"sqlite:///{file}"


@pytest.fixture
def postgres_url(postgres_server: Postgres, _migrated_postgres: str) -> Iterator[str]:
    """A fresh, migrated PostgreSQL database; dropped after the test."""
    name = f"test_{next(_names)}"
    with _postgres(postgres_server) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{_migrated_postgres}"')
    yield _with_database(postgres_server.url, name)
    with _postgres(postgres_server) as connection:
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated database; the test runs once on each of the two."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory) -> Path:
    """A Llama checkpoint of about 60,000 random weights with a tokenizer of 384 tokens."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in float32, fetched once per checkout."""
    return fetch("smollm2-135m-instruct", REPOSITORY / ".tokenmill")


@contextlib.contextmanager
def _postgres(server: Postgres) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as connection:
        yield connection


def _with_database(url: str, name: str) -> str:
    return url.rpartition("/")[0] + "/" + name
