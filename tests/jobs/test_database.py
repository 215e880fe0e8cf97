"""Opening, beginning and telling the time on both databases."""

import contextlib
import os
import resource
import threading
import time

import pytest
from sqlalchemy import TextClause, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from cli.servers import Postgres
from jobs.database import PING_AFTER_S, Database, DatabaseURLError, parse_url, transient, trouble


def insert(key: str, body_sha256: str = "'x'") -> TextClause:
    return text(
        "INSERT INTO idempotency_keys (tenant_id, key, body_sha256, job_ids, created_at) "
        f"VALUES ('default', {key}, {body_sha256}, '[]', 1)"
    )


INSERT = insert("'k'")


def test_the_clock_is_the_time_of_day_and_moves(bench):
    with bench.database.read() as connection:
        first = bench.database.clock(connection)
        time.sleep(0.01)
        second = bench.database.clock(connection)
    assert abs(first - time.time()) < 60
    assert 0.005 < second - first < 10


def test_an_exception_rolls_the_transaction_back(bench):
    def fail():
        with bench.database.begin() as connection:
            connection.execute(INSERT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with bench.database.read() as connection:
        assert connection.scalar(text("SELECT count(*) FROM idempotency_keys")) == 0


def test_a_reader_is_not_held_up_by_a_writer(bench):
    with bench.database.begin() as writer:
        writer.execute(text("DELETE FROM jobs"))
        with bench.database.read() as reader:
            assert reader.scalar(text("SELECT count(*) FROM jobs")) == 0


def test_reading_then_writing_in_one_transaction_waits_its_turn(sqlite_url):
    """With SQLite's deferred BEGIN it fails at once: what it read is no longer the newest."""
    database = Database(sqlite_url)
    errors = []

    def work(number: int):
        try:
            for i in range(10):
                with database.begin() as connection:
                    connection.scalar(text("SELECT count(*) FROM idempotency_keys"))
                    connection.execute(
                        insert(":key"),
                        {"key": f"{number} {i}"},
                    )
        except DBAPIError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as connection:
        assert connection.scalar(text("SELECT count(*) FROM idempotency_keys")) == 40
        pragmas = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert pragmas == ["wal", 2, 1]
    database.dispose()
    assert errors == []


def test_only_postgres_reads_are_marked_read_only(postgres_url):
    database = Database(postgres_url)
    with database.read() as connection, pytest.raises(DBAPIError, match="read-only"):
        connection.execute(text("DELETE FROM jobs"))
    with database.begin() as connection:
        connection.execute(text("DELETE FROM jobs"))
    database.dispose()


def test_the_first_request_after_postgres_came_back_succeeds():
    with Postgres() as server:
        database = Database(server.url)
        with database.read() as connection:
            assert connection.scalar(text("SELECT 1")) == 1
        server.kill()
        with pytest.raises(OperationalError) as caught, database.read() as connection:
            connection.scalar(text("SELECT 1"))
        assert transient(caught.value)
        server.start()
        with database.read() as connection:
            assert connection.scalar(text("SELECT 1")) == 1
        # nobody used the connection while the server was away: it is asked before it is used
        server.kill()
        server.start()
        time.sleep(PING_AFTER_S)
        for entered in (database.begin, database.read):
            with entered() as connection:
                assert connection.scalar(text("SELECT 1")) == 1
        database.dispose()


def test_what_another_try_may_mend_is_told_from_what_it_cannot(bench):
    with bench.database.begin() as connection:
        connection.execute(INSERT)
    with pytest.raises(IntegrityError) as caught, bench.database.begin() as connection:
        connection.execute(INSERT)
    assert not transient(caught.value)
    with pytest.raises(DBAPIError) as caught, bench.database.begin() as connection:
        connection.execute(text("SELECT nonsense FROM jobs"))
    assert not transient(caught.value)
    assert not transient(ValueError())


def test_a_full_or_locked_sqlite_is_worth_another_try(sqlite_url):
    database = Database(sqlite_url)
    with database.begin() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(OperationalError, match="full") as caught:
            connection.execute(insert("'k'", body_sha256="zeroblob(1000000)"))
    assert transient(caught.value)
    assert trouble(caught.value) == "the database's disk is full"
    with database.begin(), database.read() as second:
        second.exec_driver_sql("PRAGMA busy_timeout = 1")
        with pytest.raises(OperationalError, match="locked") as caught:
            second.execute(text("DELETE FROM jobs"))
    assert transient(caught.value)
    assert trouble(caught.value) == "the database is busy with another writer"
    database.dispose()


@contextlib.contextmanager
def no_descriptor_left():
    """For whoever opens a file in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as lowest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno() + 1, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_sqlite_that_cannot_be_opened_is_worth_another_try(sqlite_url):
    database = Database(sqlite_url)
    for entered in (database.begin, database.read):
        unable = pytest.raises(OperationalError, match="unable to open database file")
        with no_descriptor_left(), unable as caught, entered():
            pass
        assert transient(caught.value)
        assert trouble(caught.value) == "the database's file cannot be opened"
    with database.begin() as connection:
        connection.execute(INSERT)
    database.dispose()


def test_a_sqlite_that_has_become_read_only_is_worth_another_try(sqlite_url):
    database = Database(sqlite_url)
    with database.begin() as connection:
        connection.exec_driver_sql("PRAGMA query_only = ON")
        with pytest.raises(OperationalError, match="readonly") as caught:
            connection.execute(INSERT)
        connection.exec_driver_sql("PRAGMA query_only = OFF")
    assert transient(caught.value)
    assert trouble(caught.value) == "the database is read-only"
    database.dispose()


@pytest.mark.parametrize(
    ("sqlstate", "says"),
    [
        ("53100", "the database's disk is full"),
        ("53200", "the database has no memory or no connection left"),
        ("53300", "the database has no memory or no connection left"),
        ("25006", "the database is read-only"),
        ("40001", "the database does not answer"),
        ("55P03", "the database is busy with another writer"),
        ("57014", "the database took too long, or was told to stop"),
        ("57P03", "the database does not answer"),
        ("58030", "the database's disk is full or fails"),
    ],
)
def test_postgres_troubles_are_told_apart_without_what_they_quote(postgres_url, sqlstate, says):
    database = Database(postgres_url)
    block = f"DO $$ BEGIN RAISE EXCEPTION 'a prompt' USING ERRCODE = '{sqlstate}'; END $$"
    with pytest.raises(DBAPIError) as caught, database.begin() as connection:
        connection.execute(text(block))
    assert transient(caught.value)
    assert trouble(caught.value) == says
    database.dispose()


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("sqlite:///jobs.db", "sqlite+pysqlite"),
        ("postgres://u:p@h/d", "postgresql+psycopg"),
        ("postgresql://u:p@h/d?sslmode=require", "postgresql+psycopg"),
        ("postgresql+psycopg2://u:p@h/d", "postgresql+psycopg"),
    ],
)
def test_urls_of_both_databases_get_our_driver(url, driver):
    assert parse_url(url).drivername == driver


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://u:secret@h/d", "jobs"])
def test_other_urls_are_refused_without_repeating_a_password(url):
    with pytest.raises(DatabaseURLError) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)
