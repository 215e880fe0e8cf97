"""Our launchers: data, ports and passwords survive, owners exclude each other, nothing is left."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cli.servers import FolderInUse, Postgres, ServerError, Valkey
from cli.wheel_binaries import BinaryMissing, barred_parent, reachable_copy

OWNER = """
import sys, time
from cli.servers import Valkey
server = Valkey(sys.argv[1])
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_valkey_keeps_port_password_and_data_over_a_kill(tmp_path):
    with Valkey(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        url = server.url
        client.set("kept", "yes")
        wait_until(lambda: client.info("persistence")["aof_pending_bio_fsync"] == 0)
        server.kill()
        assert server.pid is None
        server.start()
        assert server.url == url
        assert client.get("kept") == b"yes"


def spoil_command(content):
    place = content.index(b"$", 600)
    return content[: place + 1] + b"999" + content[place + 2 :]


def spoil_word(content):
    return content.replace(b"SET", b"SXT")


@pytest.mark.parametrize(
    ("pattern", "spoil", "says"),
    [
        ("*.incr.aof", spoil_command, "copy it, then cut off"),
        ("*.incr.aof", spoil_word, "incr.aof: move"),
        ("*.base.rdb", lambda content: bytes(len(content)), "base.rdb: move"),
        ("*.base.rdb", lambda content: content[:50], "its append-only file in"),
        ("*.manifest", lambda content: bytes(len(content)), "its append-only file in"),
    ],
)
def test_an_append_only_file_that_is_broken_is_named_with_what_mends_it(
    tmp_path, pattern, spoil, says
):
    folder = tmp_path / "valkey"
    with Valkey(folder) as server, redis.Redis.from_url(server.url) as client:
        for number in range(100):
            client.set(str(number), "x" * 50)
    [file] = folder.rglob(pattern)
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(ServerError) as raised:
        Valkey(folder).start()
    said = str(raised.value)
    assert says in said
    assert f"move {folder} away" in said
    if "valkey-check-aof" in said:
        # as it says
        fix, server_program = re.search(r"`(.*)` .* to (.*)\);", said).groups()
        (tmp_path / "valkey-check-aof").symlink_to(server_program)
        done = subprocess.run(
            [tmp_path / fix.split()[0], *fix.split()[1:]], input=b"y\n", capture_output=True
        )
        assert done.returncode == 0, done.stdout
    else:
        folder.rename(tmp_path / "away")
    with Valkey(folder) as server, redis.Redis.from_url(server.url) as client:
        assert bool(client.dbsize()) == ("valkey-check-aof" in said)


@pytest.mark.parametrize("server_class", [Valkey, Postgres])
def test_a_start_cut_off_before_its_password_was_written_can_be_repeated(server_class):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{server_class.name}.password").touch(0o600)
        with server_class(folder) as server:
            assert len(server.password) == 32


def test_valkey_without_persistence_forgets(tmp_path):
    with Valkey(tmp_path, persist=False) as server, redis.Redis.from_url(server.url) as client:
        client.set("kept", "yes")
        server.kill()
        server.start()
        assert client.get("kept") is None


def test_valkey_is_never_evicting_and_asks_for_its_password(valkey_server):
    with redis.Redis.from_url(valkey_server.url) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
    with (
        redis.Redis(port=valkey_server.port, retry=Retry(NoBackoff(), 0)) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()


def test_the_password_is_not_on_the_command_line_nor_readable_by_others(tmp_path):
    with Valkey(tmp_path) as server:
        with open(f"/proc/{server.pid}/cmdline") as file:
            assert server.password not in file.read()
        assert (tmp_path / "valkey.password").stat().st_mode & 0o077 == 0
        assert (tmp_path / "valkey.conf").stat().st_mode & 0o077 == 0


def test_a_folder_has_one_owner(tmp_path, monkeypatch):
    monkeypatch.setattr("cli.servers.LOCK_WAIT_S", 0.1)
    with Valkey(tmp_path), pytest.raises(FolderInUse, match="in use by another valkey"):
        Valkey(tmp_path).start()
    with Valkey(tmp_path) as server:
        assert server.pid is not None


def test_a_folder_name_with_quotes_and_spaces_is_no_configuration(tmp_path):
    folder = tmp_path / 'a "b" \\c'
    with Valkey(folder) as server, redis.Redis.from_url(server.url) as client:
        assert client.config_get("dir")["dir"] == str(folder)


def test_valkey_ends_with_its_killed_parent_and_the_next_owner_gets_the_data(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        pid = int(owner.stdout.readline())
        assert is_alive(pid)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    with Valkey(tmp_path) as server:  # waits for the folder
        assert not is_alive(pid)
        assert server.pid != pid


def test_a_server_outlives_the_thread_that_started_it(tmp_path):
    server = Valkey(tmp_path)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
            assert client.ping()
    finally:
        server.stop()


def test_postgres_survives_a_crash_with_what_was_committed():
    with Postgres() as server:
        folder = server.folder
        url = server.url.replace("+psycopg", "")
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept (number int)")
            connection.execute("INSERT INTO kept VALUES (7)")
        server.kill()
        server.start()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT number FROM kept").fetchone() == (7,)
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(url.replace(server.password, "wrong"))
    assert not folder.exists()


def test_databases_of_the_two_kinds_are_fresh_and_migrated(database_url):
    from sqlalchemy import create_engine, inspect

    engine = create_engine(database_url)
    assert {"jobs", "workers", "idempotency_keys"} <= set(inspect(engine).get_table_names())
    engine.dispose()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as somebody else")
def test_programs_in_a_closed_folder_are_copied_once_to_an_open_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    closed = tmp_path / "closed"  # pytest's folders are closed to others, as /root is
    (closed / "pginstall" / "bin").mkdir(parents=True)
    (closed / "pginstall" / "bin" / "postgres").write_text("a program")
    copy = reachable_copy(closed / "pginstall", "nobody")
    try:
        assert copy != closed / "pginstall"
        assert (copy / "bin" / "postgres").read_text() == "a program"
        assert barred_parent(copy / "bin" / "postgres") is None
        assert reachable_copy(closed / "pginstall", "nobody") == copy
        copy.chmod(0o777)
        with pytest.raises(BinaryMissing, match="only we can write to"):
            reachable_copy(closed / "pginstall", "nobody")
    finally:
        shutil.rmtree(copy)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as somebody else")
def test_a_folder_that_nobody_can_reach_is_named(tmp_path):
    tmp_path.parent.chmod(0o700)
    with pytest.raises(ServerError, match="who cannot pass through"):
        Postgres(tmp_path / "closed").start()
