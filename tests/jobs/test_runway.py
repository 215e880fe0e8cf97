"""SQL is the backlog, Redis a short runway of ids."""

import gc
import time

import psutil
import pytest

from cli.servers import Valkey
from jobs import claims, store
from jobs.celery_app import (
    CHUNK_ROWS,
    CHUNK_TASK,
    GENERATE_TASK,
    RUN_TASK,
    make_app,
    queue_for,
    quick_connection,
)
from jobs.database import Database
from jobs.runway import Lane, Runway, RunwayDown
from jobs.settings import ModelEntry, Settings
from jobs.tenants import DEFAULT_TENANT
from tests.jobs.conftest import MODEL, new_job

SECRET = "the prompt nobody but the row may hold"


def make_settings(redis_url, **values):
    models = tuple(ModelEntry(name=name, path="/x") for name in (MODEL, "other"))
    return Settings(**{"redis_url": redis_url, "models": models, "runway": 4} | values)


@pytest.fixture
def database(sqlite_url):
    database = Database(sqlite_url)
    yield database
    database.dispose()


@pytest.fixture
def runway(valkey_url):
    settings = make_settings(valkey_url)
    with Runway(settings, make_app(settings)) as runway:
        yield runway


def submit(database, *jobs) -> list[str]:
    with database.begin() as connection:
        now = database.clock(connection)
        return [
            record.id
            for record in store.submit(connection, jobs, tenant=DEFAULT_TENANT, now=now).records
        ]


def backdate(database, seconds: float) -> None:
    """As if everything published so far had been published that much earlier."""
    with database.begin() as connection:
        connection.exec_driver_sql(f"UPDATE jobs SET published_at = published_at - {seconds}")


def lengths(runway, *, background=False) -> dict[str, int]:
    found = runway.lengths().items()
    return {lane.model: length for lane, length in found if lane.background == background}


def take_messages(runway) -> list[tuple[str, list[str]]]:
    """All of a model's in the order a worker would have them: the task, and its ids."""
    app, found = runway._app, []
    with quick_connection(app) as connection, connection.channel() as channel:
        while (message := channel.basic_get(queue_for(MODEL), no_ack=True)) is not None:
            message = channel.message_to_python(message)
            [ids] = message.decode()[0]
            found.append((message.headers["task"], [ids] if isinstance(ids, str) else ids))
    return found


def take(runway, model=MODEL) -> list[str]:
    """Empty the model's queue as a worker would; the task ids in the order they came."""
    app, ids = runway._app, []
    with quick_connection(app) as connection, connection.channel() as channel:
        while (message := channel.basic_get(queue_for(model), no_ack=True)) is not None:
            assert len(message.body) < 1024
            ids.append(channel.message_to_python(message).headers["id"])
    return ids


def test_the_runway_is_filled_up_to_its_bound_with_the_best_jobs(database, runway):
    plain = submit(database, *(new_job() for _ in range(6)))
    urgent = submit(database, new_job(priority=1))
    other = submit(database, new_job(model="other"))
    assert runway.refill(database) == 5
    assert lengths(runway) == {MODEL: 4, "other": 1}
    assert runway.refill(database) == 0
    assert take(runway) == [*urgent, *plain[:3]]
    assert take(runway, "other") == other
    assert runway.refill(database) == 3
    assert take(runway) == plain[3:]
    assert runway.refill(database) == 0


def test_a_message_is_a_small_envelope_around_an_id(database, runway, valkey_url):
    body = {"model": MODEL, "prompt": SECRET}
    (job_id,) = submit(database, new_job(body=body, custom_id=SECRET))
    runway.refill(database)
    (raw,) = runway._redis.lrange(f"tokenmill:{queue_for(MODEL)}", 0, -1)
    assert len(raw) < 1024
    assert SECRET not in raw
    (task_id,) = take(runway)
    assert task_id == job_id


def test_the_message_is_a_celery_task_with_the_id_as_argument(database, runway):
    (job_id,) = submit(database, new_job())
    runway.refill(database)
    with (
        quick_connection(runway._app) as connection,
        connection.SimpleQueue(queue_for(MODEL)) as queue,
    ):
        message = queue.get(timeout=5)
        message.ack()
    assert (message.headers["task"], message.headers["id"]) == (RUN_TASK, job_id)
    assert message.decode()[0] == [job_id]


def test_a_traced_call_is_named_by_the_message(database, valkey_url):
    settings = make_settings(valkey_url, otlp_endpoint="http://127.0.0.1:9")
    parent = "00-" + "a1" * 16 + "-" + "b2" * 8 + "-01"
    traced, plain = submit(database, new_job(trace_parent=parent), new_job())
    found = {}
    with Runway(settings, make_app(settings)) as runway:
        assert runway.refill(database) == 2
        with quick_connection(runway._app) as connection, connection.channel() as channel:
            while (message := channel.basic_get(queue_for(MODEL), no_ack=True)) is not None:
                headers = channel.message_to_python(message).headers
                found[headers["id"]] = headers.get("traceparent")
    assert found == {traced: parent, plain: None}


def test_messages_of_every_redis_priority_count(runway):
    with quick_connection(runway._app) as connection:
        for priority in (0, 3, 5, 9):
            runway._app.send_task(
                GENERATE_TASK, kwargs={}, queue=queue_for(MODEL), priority=priority,
                connection=connection, retry=False,
            )  # fmt: skip
    assert lengths(runway) == {MODEL: 3, "other": 0}
    assert lengths(runway, background=True) == {MODEL: 1, "other": 0}


def test_messages_lost_with_redis_come_back_when_the_runway_is_empty(database, runway, caplog):
    ids = submit(database, *(new_job() for _ in range(3)))
    runway.refill(database)
    runway._redis.flushall()
    assert runway.refill(database) == 0, "too early to tell lost from late"
    backdate(database, 5)
    assert runway.refill(database) == 3
    assert take(runway) == ids
    assert "republished=3" in caplog.text


def test_one_message_lost_among_many_comes_back_before_the_backlog_ends(database, runway):
    (lost,) = submit(database, new_job())
    runway.refill(database)
    runway._redis.flushall()
    later = submit(database, *(new_job() for _ in range(8)))
    backdate(database, 6)
    with database.begin() as connection:  # the queue is long: nothing says yet that one is lost
        connection.exec_driver_sql("UPDATE jobs SET published_at = NULL WHERE id <> ?", (lost,))
    for _ in range(3):
        with quick_connection(runway._app) as connection:
            runway._app.send_task(
                RUN_TASK, args=["x"], queue=queue_for(MODEL), connection=connection
            )
    assert runway.refill(database) == 1
    assert take(runway)[-1] == later[0]
    with database.begin() as connection:
        claims.claim(connection, later[:1], worker_id="w1", now=database.clock(connection))
    assert runway.refill(database) == 4
    assert take(runway)[0] == lost


def test_redis_away_is_told_at_once_and_marks_nothing(database, tmp_path):
    with Valkey(tmp_path / "valkey", persist=False) as server:
        settings = make_settings(server.url)
        runway = Runway(settings, make_app(settings))
        (job_id,) = submit(database, new_job())
        server.kill()
        started = time.monotonic()
        with pytest.raises(RunwayDown):
            runway.refill(database)
        with pytest.raises(RunwayDown):
            runway._publish(Lane(MODEL, background=False), [[job_id]])
        assert time.monotonic() - started < 5
        with database.read() as connection:
            assert store.get(connection, job_id, tenant=DEFAULT_TENANT).published_at is None
        server.start()
        assert runway.refill(database) == 1
        assert take(runway) == [job_id]
        runway.close()


def test_a_long_absence_of_redis_gathers_nothing(database, tmp_path):
    """Ten minutes of a sweeper's tries, without the pauses between them."""
    this = psutil.Process()
    with Valkey(tmp_path / "valkey", persist=False) as server:
        settings = make_settings(server.url)
        with Runway(settings, make_app(settings)) as runway:
            (job_id,) = submit(database, new_job())
            server.kill()
            held = []
            for num_tries in (100, 600):
                for _ in range(num_tries):
                    with pytest.raises(RunwayDown):
                        runway.refill(database)
                    with pytest.raises(RunwayDown):
                        runway._publish(Lane(MODEL, background=False), [[job_id]])
                gc.collect()  # kombu's connections are in circles
                held.append((this.memory_info().rss / 1e6, this.num_fds(), this.num_threads()))
            (mb, *others), (mb_after, *others_after) = held
            assert mb_after < mb + 20
            assert others_after == others
            server.start()
            assert runway.refill(database) == 1
            assert take(runway) == [job_id]


def test_an_error_reply_of_redis_is_runway_down_and_passes(database, tmp_path):
    with Valkey(tmp_path / "valkey", persist=False) as server:
        settings = make_settings(server.url)
        with Runway(settings, make_app(settings)) as runway:
            (job_id,) = submit(database, new_job())
            runway._redis.config_set("min-replicas-to-write", 1)
            with pytest.raises(RunwayDown, match="NOREPLICAS"):
                runway.refill(database)
            runway._redis.config_set("min-replicas-to-write", 0)
            backdate(database, 5)
            assert runway.refill(database) == 1
            assert take(runway) == [job_id]


def test_deployments_that_share_a_redis_do_not_see_each_other(database, valkey_url):
    mine, theirs = (make_settings(valkey_url, key_prefix=prefix) for prefix in ("a:", "b:"))
    submit(database, new_job())
    with Runway(mine, make_app(mine)) as ours, Runway(theirs, make_app(theirs)) as others:
        assert ours.refill(database) == 1
        assert (lengths(ours)[MODEL], lengths(others)[MODEL]) == (1, 0)


def test_the_background_travels_in_chunks_and_is_taken_last(database, runway):
    rows = submit(database, *(new_job(priority=-5) for _ in range(2 * CHUNK_ROWS + 1)))
    jobs = submit(database, new_job(), new_job())
    assert runway.refill(database) == 2 + CHUNK_ROWS
    assert lengths(runway) == {MODEL: 2, "other": 0}
    assert lengths(runway, background=True) == {MODEL: 1, "other": 0}
    assert take_messages(runway) == [
        (RUN_TASK, jobs[:1]), (RUN_TASK, jobs[1:]), (CHUNK_TASK, rows[:CHUNK_ROWS])
    ]  # fmt: skip
    runway.refill(database)
    runway.refill(database)
    assert take_messages(runway) == [(CHUNK_TASK, rows[CHUNK_ROWS : 2 * CHUNK_ROWS])]
    runway.refill(database)
    assert take_messages(runway) == [(RUN_TASK, rows[-1:])]


def test_the_background_has_its_eighth_of_the_foreground(database, runway):
    rows = submit(database, *(new_job(priority=-5) for _ in range(100)))
    jobs = submit(database, *(new_job() for _ in range(14)))
    foreground = []
    for _ in range(4):
        runway.refill(database)
        messages = take_messages(runway)
        foreground += [ids[0] for task, ids in messages if task == RUN_TASK]
    others = [job_id for job_id in foreground if job_id in rows]
    assert foreground[:7] == jobs[:7]
    assert foreground[7] == others[0] == foreground[7]
    assert [job_id for job_id in foreground if job_id in jobs] == jobs
    assert len(others) == 2


@pytest.mark.parametrize("num_jobs", [1, 2, 8, 20])
def test_where_the_foreground_ends_the_background_does_not_fill_its_runway(
    database, valkey_url, num_jobs
):
    settings = make_settings(valkey_url, runway=64)
    with Runway(settings, make_app(settings)) as runway:
        rows = submit(database, *(new_job(priority=-5) for _ in range(400)))
        runway.refill(database)  # the background's own runway has 256 of them
        jobs = submit(database, *(new_job() for _ in range(num_jobs)))
        runway.refill(database)
        (urgent,) = submit(database, new_job(priority=10))
        runway.refill(database)
        alone = [ids[0] for task, ids in take_messages(runway) if task == RUN_TASK]
        assert set(alone) >= {*jobs, urgent}
        assert len([job_id for job_id in alone if job_id in rows]) <= num_jobs // 7 + 1


def test_a_chunk_that_waits_behind_the_foreground_is_not_taken_for_lost(database, runway):
    submit(database, *(new_job(priority=-5) for _ in range(3)))
    runway.refill(database)
    backdate(database, 60)
    (job_id,) = submit(database, new_job())
    runway.refill(database)
    with database.begin() as connection:
        claims.claim(connection, [job_id], worker_id="w1", now=database.clock(connection))
    assert runway.refill(database) == 0
    runway._redis.flushall()
    assert runway.refill(database) == 3
