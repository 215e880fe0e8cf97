"""Folders, databases and options that cannot be used: one line that names them, and no trace."""

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys

import pytest
from sqlalchemy import create_engine, text

import migrations
from cli import main
from cli.servers import lock_folder
from tests.conftest import REPOSITORY


@pytest.fixture
def tokenmill(monkeypatch, capsys, tmp_path):
    """Runs the command in this process: its exit status and what it said on stderr."""
    for name in ("DATABASE_URL", "REDIS_URL", "TOKENMILL_DATA_DIR", "TOKENMILL_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["tokenmill", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return ended.value.code or 0, capsys.readouterr().err

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(params=["a file", "below a file", "/proc/x", "/sys/x"])
def bad_folder(request, tmp_path):
    (tmp_path / "file").write_text("")
    known = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "data",
    }
    return known.get(request.param, request.param)


def said_in_one_line(stderr, *words):
    last = stderr.strip().splitlines()[-1]
    assert "Traceback" not in stderr
    assert all(str(word) in last for word in words), stderr


def test_a_data_folder_that_cannot_be_used_is_named(tokenmill, bad_folder, tiny_llama_dir):
    for arguments in (
        ("models", "fetch", tiny_llama_dir, "--name", "tiny"),
        ("up", "--port", "0", "--model", f"tiny={tiny_llama_dir}"),
        ("demo", "--model", f"tiny={tiny_llama_dir}"),
    ):
        status, stderr = tokenmill(*arguments, "--data-dir", bad_folder)
        assert status == 1
        said_in_one_line(stderr, bad_folder)


def test_a_full_disk_is_said_in_one_line(tokenmill, tmp_path, tiny_llama_dir):
    data = tmp_path / "data"
    (data / "valkey").mkdir(parents=True)
    (data / "valkey" / "valkey.conf").symlink_to("/dev/full")
    status, stderr = tokenmill(
        *("up", "--port", "0", "--model", f"tiny={tiny_llama_dir}", "--data-dir", data)
    )
    assert status == 1
    said_in_one_line(stderr, "a file could not be written: No space left on device")


def test_a_log_folder_that_cannot_be_used_is_named(tokenmill, bad_folder, tiny_llama_dir):
    status, stderr = tokenmill(
        *("up", "--port", "0", "--model", f"tiny={tiny_llama_dir}", "--log-dir", bad_folder)
    )
    assert status == 1
    said_in_one_line(stderr, bad_folder)


def rubbish(file):
    file.write_bytes(bytes(range(256)) * 64)


def of_a_newer_version(file):
    migrations.upgrade(f"sqlite:///{file}")
    engine = create_engine(f"sqlite:///{file}")
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()


def of_somebody_else(file):
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE jobs (salary INTEGER)")
    connection.close()


def content(file):
    connection = sqlite3.connect(file)
    try:
        return list(connection.iterdump())
    except sqlite3.DatabaseError:
        return file.read_bytes()
    finally:
        connection.close()


DATABASES = [
    (rubbish, "file is not a database"),
    (of_a_newer_version, "another version of Tokenmill, 9999"),
    (of_somebody_else, "a table jobs that Tokenmill did not make"),
]


@pytest.mark.parametrize(("spoil", "says"), DATABASES)
def test_a_database_that_is_not_ours_is_named_and_left_as_it_is(
    tokenmill, tmp_path, tiny_llama_dir, spoil, says
):
    file = tmp_path / "data" / "tokenmill.db"
    file.parent.mkdir()
    spoil(file)
    before = content(file)
    arguments = ("--port", "0", "--model", f"tiny={tiny_llama_dir}", "--data-dir", file.parent)
    status, stderr = tokenmill("up", *arguments)
    assert status == 1
    said_in_one_line(stderr, file, says)
    assert content(file) == before


@pytest.mark.parametrize(("spoil", "says"), DATABASES)
def test_migrate_says_the_same(tokenmill, tmp_path, monkeypatch, spoil, says):
    file = tmp_path / "other.db"
    spoil(file)
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{file}")
    status, stderr = tokenmill("migrate")
    assert status == 1
    said_in_one_line(stderr, says)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "mysql://x/y"])
def test_a_database_that_cannot_be_is_a_bad_setting(tokenmill, monkeypatch, url):
    monkeypatch.setenv("DATABASE_URL", url)
    status, stderr = tokenmill("migrate")
    assert status == 1
    said_in_one_line(stderr, "DATABASE_URL must")


@pytest.mark.parametrize("away_first", [True, False])
def test_a_model_asked_for_before_or_after_another_has_to_be_there(
    tokenmill, tmp_path, tiny_llama_dir, away_first
):
    models = [("--model", f"away={tmp_path / 'away'}"), ("--model", f"tiny={tiny_llama_dir}")]
    first, second = models if away_first else models[::-1]
    status, stderr = tokenmill("up", "--port", "0", *first, *second)
    assert status == 1
    said_in_one_line(stderr, f"model away: no checkpoint in {tmp_path / 'away'}")


def test_a_redis_that_is_away_is_said_at_once(tokenmill, monkeypatch, tiny_llama_dir):
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:9/0")
    status, stderr = tokenmill("up", "--port", "0", "--model", f"tiny={tiny_llama_dir}")
    assert status == 1
    said_in_one_line(stderr, "REDIS_URL does not answer")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("up", "--port", "99999"), "TOKENMILL_PORT must be in [0, 65535]"),
        (("up", "--port", "-1"), "TOKENMILL_PORT must be in [0, 65535]"),
        (("api", "--port", "99999"), "TOKENMILL_PORT must be in [0, 65535]"),
        (("up", "--model", "../x"), "TOKENMILL_MODELS"),
        (("up", "--model", "a,b", "--model", "a"), "different models, got ['a', 'b', 'a']"),
        (("up", "--data-dir", "a?b"), "TOKENMILL_DATA_DIR must not contain '?'"),
        (("worker", "--concurrency", "0"), "TOKENMILL_MAX_NUM_SEQS"),
    ],
)
def test_an_option_out_of_bounds_is_wrong_usage(tokenmill, arguments, names):
    status, stderr = tokenmill(*arguments)
    assert status == 2
    said_in_one_line(stderr, names)


def test_a_folder_in_use_is_said_before_the_port_and_its_environment_stays(
    tokenmill, tmp_path, tiny_llama_dir, valkey_server
):
    data = tmp_path / "data"
    lock = lock_folder(data, "service", wait_s=0)
    (data / "env").write_text("A=1\n")
    status, stderr = tokenmill(
        *("up", "--port", valkey_server.port, "--data-dir", data),
        *("--model", f"tiny={tiny_llama_dir}"),
    )
    assert status == 1
    said_in_one_line(stderr, f"the data folder {data} is in use")
    assert (data / "env").read_text() == "A=1\n"
    os.close(lock)
    status, stderr = tokenmill(
        *("up", "--port", valkey_server.port, "--data-dir", data),
        *("--model", f"tiny={tiny_llama_dir}"),
    )
    said_in_one_line(stderr, f"cannot listen on 127.0.0.1:{valkey_server.port}")
    assert not (data / "env").exists()  # of a service that was killed


def test_the_sweeper_ends_with_the_reason_for_a_file_that_is_no_database(
    tokenmill, tmp_path, monkeypatch, valkey_url
):
    rubbish(tmp_path / "other.db")
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path / 'other.db'}")
    monkeypatch.setenv("REDIS_URL", valkey_url)
    status, stderr = tokenmill("sweeper")
    assert status == 1
    said_in_one_line(stderr, "the database cannot be used", "file is not a database")


@pytest.mark.parametrize("command", ["sweeper", "worker"])
def test_a_database_not_migrated_yet_ends_a_process_with_what_to_run(
    tmp_path, valkey_url, tiny_llama_dir, command
):
    environ = os.environ | {
        "DATABASE_URL": f"sqlite:///{tmp_path / 'empty.db'}",
        "REDIS_URL": valkey_url,
        "TOKENMILL_MODELS": f"tiny={tiny_llama_dir}",
        "PYTHONPATH": str(REPOSITORY),
    }
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "cli.main", command],
        **{"env": environ, "capture_output": True, "text": True, "timeout": 120},
    )
    assert ended.returncode == {"sweeper": 1, "worker": 78}[command]
    said_in_one_line(ended.stderr, "schema is not this version's", "tokenmill migrate")


def test_the_doctor_lives_with_any_data_folder(tokenmill, bad_folder, monkeypatch):
    monkeypatch.setenv("TOKENMILL_DATA_DIR", str(bad_folder))
    assert tokenmill("doctor", "--only", "workers", "--only", "this-host") == (1, "")
    for topic in ("data", "database"):
        _, stderr = tokenmill("doctor", "--only", topic)
        assert stderr == ""


def test_the_doctor_says_that_a_file_is_no_folder(tokenmill, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/data"):
        monkeypatch.setenv("TOKENMILL_DATA_DIR", name)
        assert tokenmill("doctor", "--only", "data") == (1, "")


def test_an_api_that_cannot_start_says_why_in_its_last_line(tokenmill, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, stderr = tokenmill("api", "--port", port)
    assert status == 1
    said_in_one_line(stderr, f"cannot listen on 127.0.0.1:{port}")
    monkeypatch.setenv("TOKENMILL_AUTH", "keys")
    status, stderr = tokenmill("api", "--host", "no.such.host.invalid", "--port", 0)
    assert status == 1  # an option is read beside the environment: with keys any host will do
    said_in_one_line(stderr, "cannot listen on no.such.host.invalid:0")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("config.json", "{"),
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("chat_template.jinja", "{% if"),
    ],
)
def test_an_api_names_a_model_that_it_cannot_read(
    tokenmill, tiny_llama_dir, tmp_path, monkeypatch, file, content
):
    folder = shutil.copytree(tiny_llama_dir, tmp_path / "model")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    monkeypatch.setenv("TOKENMILL_MODELS", f"tiny={folder}")
    status, stderr = tokenmill("api", "--port", 0)
    assert status == 1
    said_in_one_line(stderr, "model tiny: ")


def test_an_output_of_run_batch_without_a_folder_is_refused_before_anything_starts(
    tokenmill, tmp_path
):
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"custom_id": "1", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}\n'
    )
    status, stderr = tokenmill("run-batch", "-i", source, "-o", tmp_path / "none" / "out.jsonl")
    assert status == 2
    said_in_one_line(stderr, tmp_path / "none", "is no folder")
    assert not (tmp_path / ".tokenmill").exists()
