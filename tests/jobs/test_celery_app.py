"""The Celery application: settings that prevent accidents, and what a worker sees of a message."""

import hashlib
import re
import socket
import tempfile

import pytest
import redis
from celery.app.defaults import NAMESPACES
from hypothesis import given
from hypothesis import strategies as st

from cli.servers import Valkey
from jobs.celery_app import (
    GENERATE_TASK,
    RUN_TASK,
    WrongPool,
    _configuration,
    job_id_of,
    make_app,
    queue_for,
    quick_connection,
)
from jobs.records import new_job_id, storable
from jobs.redis_client import broker_url, client_url, connect
from jobs.settings import ModelEntry, Settings
from tests.conftest import REPOSITORY

MODELS = (ModelEntry(name="tiny", path="/x"), ModelEntry(name="org/big", path="/y"))


@pytest.fixture
def app():
    return make_app(Settings(models=MODELS))


def test_every_setting_is_one_celery_knows():
    known = {
        f"{group}_{name}" if group else name
        for group, options in NAMESPACES.items()
        for name in (options if isinstance(options, dict) else {})
    } | {name for name, option in NAMESPACES.items() if not isinstance(option, dict)}
    assert set(_configuration(Settings(models=MODELS))) <= known


def test_the_settings_that_lost_or_doubled_tasks_elsewhere(app):
    conf = app.conf
    assert conf.task_ignore_result is True
    assert conf.result_backend is None
    assert app.backend.__class__.__name__ == "DisabledBackend"
    assert set(conf.accept_content) == {"json"}
    assert conf.worker_disable_prefetch is True
    assert conf.worker_prefetch_multiplier == 1
    assert conf.task_acks_late is False
    assert conf.worker_cancel_long_running_tasks_on_connection_loss is False
    assert conf.worker_enable_remote_control is True
    assert conf.broker_connection_max_retries is None
    assert conf.broker_channel_error_retry is True
    assert conf.broker_transport_options["visibility_timeout"] == 60
    assert conf.broker_transport_options["global_keyprefix"] == "tokenmill:"


def test_queues_are_the_default_one_and_one_for_each_model(app):
    names = {"tokenmill", "tokenmill.tiny", "tokenmill.org/big"}
    assert set(app.amqp.queues) == names
    assert queue_for("org/big") in names


def test_tasks_refuse_any_pool_but_the_engines(app):
    assert {RUN_TASK, GENERATE_TASK} <= set(app.tasks)
    for name in (RUN_TASK, GENERATE_TASK):
        with pytest.raises(WrongPool, match="EnginePool"):
            app.tasks[name]("job_1")


UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
TASK_IDS = (
    UUID, UUID.replace("-", ""), UUID.upper(), "job_" + UUID.replace("-", ""), "job_01abc",
    "row-1-23", "row-12-3", "row123", "job_row123", "2026-1-11", "2026-11-1", "row:17", "row.17",
    "a/b", "ключ", "a b", " ", "", "-", "--", "-----", "x" * 60, "x" * 61, "x" * 10_000, "17",
    "\0", "\ud800", "\n", "job_'; DROP TABLE jobs",
)  # fmt: skip


def test_a_messages_job_is_known_from_its_task_id():
    assert job_id_of(UUID) == "job_0f8fad5bd9cb469fa16570867728950e"
    assert job_id_of("row:17") == "job_" + hashlib.sha256(b"row:17").hexdigest()[:48]


def test_the_page_on_rows_tells_clients_the_same():
    page = (REPOSITORY / "docs" / "sql.md").read_text()
    [example] = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    names: dict = {}
    exec(example, names)
    for task_id in TASK_IDS:
        if storable(task_id.replace("\0", "")):  # no client can send a lone surrogate as UTF-8
            assert names["job_id"](task_id) == job_id_of(task_id), task_id


def test_every_task_id_has_a_job_of_its_own_whatever_is_in_it():
    ids = [job_id_of(task_id) for task_id in TASK_IDS]
    assert len(set(ids)) == len(TASK_IDS)
    assert all(re.fullmatch(r"job_[0-9a-f]{32}([0-9a-f]{16})?", job_id) for job_id in ids)
    assert new_job_id() not in ids


@given(st.text(st.characters(), max_size=70), st.text(st.characters(), max_size=70))
def test_two_task_ids_never_name_one_job(one, other):
    assert (job_id_of(one) == job_id_of(other)) == (one == other)


@given(st.uuids(), st.integers(0, 36))
def test_no_other_way_to_write_a_uuid_names_its_job(uuid, at):
    text = str(uuid)
    for other in (uuid.hex, text.upper(), f"job_{uuid.hex}", text[:at] + "-" + text[at:]):
        assert (job_id_of(other) == job_id_of(text)) == (other == text)


def test_making_an_app_connects_to_nothing_and_leaves_no_trace_in_the_process():
    from celery import current_app

    make_app(Settings(redis_url="redis://192.0.2.1:1/0"))
    assert current_app.main != "tokenmill"


@pytest.mark.parametrize(
    ("given", "broker", "client"),
    [
        ("redis://:pw@h:6379/2", "redis://:pw@h:6379/2", "redis://:pw@h:6379/2"),
        ("rediss://h/0", "rediss://h/0", "rediss://h/0"),
        (
            "unix:///run/v.sock?db=2",
            "redis+socket:///run/v.sock?virtual_host=2",
            "unix:///run/v.sock?db=2",
        ),
        (
            "redis+socket://:pw@/run/v.sock?virtual_host=2",
            "redis+socket://:pw@/run/v.sock?virtual_host=2",
            "unix://:pw@/run/v.sock?db=2",
        ),
        ("unix:///run/v.sock", "redis+socket:///run/v.sock", "unix:///run/v.sock"),
    ],
)
def test_one_address_serves_kombu_and_redis_py(given, broker, client):
    assert (broker_url(given), client_url(given)) == (broker, client)


class ValkeyOnSocket(Valkey):
    """Listens on a Unix socket too."""

    @property
    def socket_url(self) -> str:
        return f"unix://:{self.password}@{self.folder / 'v.sock'}?db=1"

    def _command(self):
        return [*super()._command(), "--unixsocket", self.folder / "v.sock"]


def test_a_unix_socket_carries_messages():
    # a socket's path may have 107 bytes, which pytest's own folders exceed
    with tempfile.TemporaryDirectory(prefix="tm-") as folder, ValkeyOnSocket(folder) as server:
        settings = Settings(redis_url=server.socket_url, models=MODELS)
        app = make_app(settings)
        with quick_connection(app) as connection, app.amqp.Producer(connection) as producer:
            app.send_task(RUN_TASK, args=["job_1"], queue=queue_for("tiny"), producer=producer)
        with connect(server.socket_url) as client:
            assert client.llen("tokenmill:tokenmill.tiny") == 1
        with connect(server.url) as client:
            assert client.llen("tokenmill:tokenmill.tiny") == 0  # that is database 0


def test_a_client_gives_up_on_a_silent_redis_within_its_time_limit():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with connect(url) as client, pytest.raises(redis.RedisError):
            client.ping()


def test_a_task_of_a_celery_client_arrives_whole(valkey_url):
    app = make_app(Settings(redis_url=valkey_url, models=MODELS))
    job = {"url": "/v1/completions", "body": {"model": "tiny", "prompt": "ü"}}
    with quick_connection(app) as connection, app.amqp.Producer(connection) as producer:
        result = app.send_task(GENERATE_TASK, kwargs=job, producer=producer)
        with connection.SimpleQueue("tokenmill") as queue:
            message = queue.get(block=True, timeout=5)
            message.ack()
    assert message.headers["task"] == GENERATE_TASK
    assert message.headers["id"] == result.id
    args, kwargs, _ = message.decode()
    assert (args, kwargs) == ([], job)
