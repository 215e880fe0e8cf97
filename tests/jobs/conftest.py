"""The store on an empty database for every test, once on SQLite and once on PostgreSQL."""

from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest
from sqlalchemy import delete

import migrations
from jobs import claims, finishing, store
from jobs.claims import ClaimedJob, Held
from jobs.database import Database
from jobs.finishing import JobResult
from jobs.models import Base
from jobs.store import JobRecord, NewJob, WorkerInfo
from jobs.tenants import DEFAULT_TENANT

MODEL = "tiny"
NOW = 1_790_000_000.0


def new_job(**values) -> NewJob:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}
    return NewJob(**{"url": "/v1/chat/completions", "model": MODEL, "body": body} | values)


@dataclass
class Bench:
    """The store with the clock in the test's hand: each call is one transaction at `now`."""

    database: Database
    now: float = NOW

    def submit(self, *new_jobs: NewJob, tenant: str = DEFAULT_TENANT, **kwargs) -> list[JobRecord]:
        with self.database.begin() as connection:
            submitted = store.submit(connection, new_jobs, tenant=tenant, now=self.now, **kwargs)
        return list(submitted.records)

    def get(self, job_id: str) -> JobRecord:
        with self.database.read() as connection:
            record = store.get(connection, job_id, tenant=DEFAULT_TENANT)
        assert record is not None
        return record

    def register(self, worker_id: str = "w1", lease_s: float = 30.0) -> None:
        info = WorkerInfo(
            id=worker_id, hostname="here", pid=7, model=MODEL,
            max_num_seqs=8, kv_tokens=4096, max_model_len=512,
        )  # fmt: skip
        with self.database.begin() as connection:
            claims.register_worker(connection, info, now=self.now, lease_s=lease_s)

    def claim(self, *ids: str, worker_id: str = "w1") -> list[ClaimedJob]:
        with self.database.begin() as connection:
            return claims.claim(connection, ids, worker_id=worker_id, now=self.now)

    def finish(self, results: list[JobResult], *, now: float) -> set[str]:
        """The ids accepted."""
        return {held.id for held in self.call(finishing.finish, results, now=now)}

    def call(self, function, *args, **kwargs):
        """`function(connection, …)` in one writing transaction."""
        with self.database.begin() as connection:
            return function(connection, *args, **kwargs)


def held(job: ClaimedJob) -> Held:
    return Held(job.id, job.fence)


@pytest.fixture(scope="session")
def shared_postgres(postgres_server) -> Iterator[Database]:
    """One migrated database for all tests of the store: emptying it is quicker than making one."""
    with psycopg.connect(postgres_server.url.replace("+psycopg", ""), autocommit=True) as server:
        server.execute("CREATE DATABASE store_tests")
    url = postgres_server.url.rpartition("/")[0] + "/store_tests"
    migrations.upgrade(url)
    database = Database(url, pool_size=25)
    yield database
    database.dispose()


@pytest.fixture(params=["sqlite", "postgres"])
def bench(request) -> Iterator[Bench]:
    """The store on an empty database; the test runs once on each of the two."""
    if request.param == "sqlite":
        database = Database(request.getfixturevalue("sqlite_url"), pool_size=25)
        yield Bench(database)
        database.dispose()
        return
    database = request.getfixturevalue("shared_postgres")
    with database.begin() as connection:
        for table in Base.metadata.sorted_tables:
            connection.execute(delete(table))
    yield Bench(database)
