"""Deployments for the worker's tests."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import migrations
from jobs import claims, file_store
from jobs.database import Database
from jobs.records import WorkerInfo
from jobs.settings import ModelEntry, Settings
from tests.worker.batch_shop import Shop
from tests.worker.deployment import Deployment
from worker.batch_keeper import BatchKeeper

LONG = 16_384


@pytest.fixture(scope="session")
def long_llama_dir(tiny_llama_dir, tmp_path_factory) -> Path:
    """The tiny model with room for jobs that run for minutes: long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("models") / "long-llama"
    shutil.copytree(tiny_llama_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    return folder


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def service(request, valkey_server, long_llama_dir, tmp_path_factory) -> Iterator[Deployment]:
    """A deployment with one worker, for all tests of a module that leave it as they found it."""
    folder = tmp_path_factory.mktemp("service")
    url = f"sqlite:///{folder / 'tokenmill.db'}"
    if request.param == "postgres":
        server = request.getfixturevalue("postgres_server")
        url = f"{server.url.rpartition('/')[0]}/{folder.name}"
        with psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{folder.name}"')
    migrations.upgrade(url)
    deployment = Deployment(folder, url, valkey_server.url, long_llama_dir)
    try:
        deployment.start_worker()
        yield deployment
    finally:
        deployment.close()


@pytest.fixture
def deployment(database_url, valkey_url, long_llama_dir, tmp_path) -> Iterator[Deployment]:
    """Nothing runs in it yet but the sweeper."""
    deployment = Deployment(tmp_path / tmp_path.name, database_url, valkey_url, long_llama_dir)
    yield deployment
    deployment.close()


@pytest.fixture
def sqlite_deployment(sqlite_url, valkey_url, long_llama_dir, tmp_path) -> Iterator[Deployment]:
    """For what has nothing to do with the database."""
    deployment = Deployment(tmp_path / tmp_path.name, sqlite_url, valkey_url, long_llama_dir)
    yield deployment
    deployment.close()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def shop(request, valkey_url, tmp_path):
    database_url = request.getfixturevalue(f"{request.param}_url")
    settings = Settings(
        database_url=database_url,
        redis_url=valkey_url,
        models=(ModelEntry(name="tiny", path="x"),),
        files_dir=str(tmp_path / "files"),
        max_batch_rows=5000,
    )
    database = Database(database_url)
    shop = Shop(settings, database, BatchKeeper(settings), file_store.FileStore(settings.files_dir))
    info = WorkerInfo(
        id="w1", hostname="here", pid=7, model="tiny",
        max_num_seqs=8, kv_tokens=4096, max_model_len=512,
    )  # fmt: skip
    shop.call(claims.register_worker, info, now=shop.now, lease_s=1000)
    shop.kept.append(shop.keeper)
    yield shop
    for keeper in shop.kept:
        keeper.stop()
    database.dispose()
