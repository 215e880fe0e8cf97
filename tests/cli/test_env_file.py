"""The running service's environment, read by a shell as it is written."""

import json
import stat
import subprocess
import sys

import pytest

from cli import env_file
from jobs.settings import ModelEntry, Settings

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def sourced(file):
    """The environment of a program started from a shell that read `file`."""
    done = subprocess.run(
        [
            "/bin/sh",
            "-c",
            f'set -a; . "$1"; set +a; exec "$2" -c "{SHOW}"',
            "sh",
            file,
            sys.executable,
        ],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        cwd=file.parent,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "two words",
        "it's",
        'say "hello"',
        "$HOME and $(touch broken) and `touch broken`",
        "a\\b",
        "a;b&c|d>e#f*",
        "grün ☃",
        "two\nlines",
        "-n",
        "%20",
    ],
)
def test_every_path_survives_the_shell(tmp_path, name):
    folder = tmp_path / name
    (folder / "models").mkdir(parents=True)
    elsewhere = tmp_path / "checkpoints" / name.replace(",", "")
    environ = {
        "TOKENMILL_DATA_DIR": str(folder),
        "TOKENMILL_MODELS": f"here,there={elsewhere}",
        "TOKENMILL_PORT": "8123",
        "TOKENMILL_LEASE_S": "12",
        "REDIS_URL": "redis://:p$w'd@127.0.0.1:7000/0",
        "HOME": "/nobody's business",
    }
    settings = Settings.from_env(environ)
    file = env_file.write(environ, settings)
    assert file == folder / "env"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    read = sourced(file)
    assert Settings.from_env(read) == settings
    assert read["DATABASE_URL"] == f"sqlite:///{folder}/tokenmill.db"
    assert read["REDIS_URL"] == environ["REDIS_URL"]
    assert read["TOKENMILL_LEASE_S"] == "12"
    assert read.get("HOME") != environ["HOME"]
    assert sorted(path.name for path in folder.iterdir()) == ["env", "models"]


def test_a_model_given_by_a_relative_path_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ = {"TOKENMILL_DATA_DIR": str(tmp_path), "TOKENMILL_MODELS": "mine=models/of-mine"}
    file = env_file.write(environ, Settings.from_env(environ))
    assert Settings.from_env(sourced(file)).models == (
        ModelEntry(name="mine", path=str(tmp_path / "models" / "of-mine")),
    )


def test_it_is_taken_away_and_need_not_be_there(tmp_path):
    settings = Settings(data_dir=str(tmp_path))
    env_file.write({}, settings)
    env_file.remove(tmp_path)
    env_file.remove(tmp_path)
    assert list(tmp_path.iterdir()) == []
