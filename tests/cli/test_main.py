"""The command's surface: help for everything, exit statuses for scripts, nothing loaded in vain."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from cli.main import COMMANDS, tokenmill
from tests.conftest import REPOSITORY

MODULES_OF_HELP = """
import sys
from click.testing import CliRunner
from cli.main import tokenmill
assert CliRunner().invoke(tokenmill, ["--help"]).exit_code == 0
heavy = {"torch", "transformers", "celery", "sqlalchemy", "starlette", "redis", "httpx"}
print(*sorted(heavy & set(sys.modules)))
"""


def test_help_lists_every_command_with_its_summary():
    result = CliRunner().invoke(tokenmill, ["--help"])
    assert result.exit_code == 0
    for name, (_, summary) in COMMANDS.items():
        assert any(
            line.split()[:1] == [name] and summary[:30] in line
            for line in result.output.splitlines()
        ), name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name):
    result = CliRunner().invoke(tokenmill, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output
    assert len(result.output.splitlines()) > 5


@pytest.mark.parametrize("level", ["info", "debug"])
def test_migrate_prints_its_own_line_and_each_step_only_when_asked(tmp_path, level):
    environ = {"DATABASE_URL": f"sqlite:///{tmp_path / 'new.db'}", "TOKENMILL_LOG_LEVEL": level}
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "migrate"],
        cwd=REPOSITORY,
        env=os.environ | environ,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "the database is at the newest schema\n")
    assert ("alembic" in done.stderr) == (level == "debug")
    assert level == "debug" or done.stderr == ""


def test_help_loads_none_of_the_heavy_packages():
    done = subprocess.run(
        [sys.executable, "-c", MODULES_OF_HELP], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert (done.returncode, done.stdout.strip()) == (0, "")


def test_an_unknown_command_is_wrong_usage():
    result = CliRunner().invoke(tokenmill, ["grind"])
    assert result.exit_code == 2
    assert "No such command 'grind'" in result.output


def test_a_bad_setting_ends_with_1_and_names_the_variable(monkeypatch, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "migrate"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={"TOKENMILL_LEASE_S": "soon", "TOKENMILL_DATA_DIR": str(tmp_path)},
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "tokenmill: TOKENMILL_LEASE_S is not a number of seconds: 'soon'"
    )


def test_a_worker_must_be_told_its_model_when_there_are_several():
    result = CliRunner().invoke(tokenmill, ["worker"], env={"TOKENMILL_MODELS": "a,b"})
    assert result.exit_code == 2
    assert "--model must be one of: a, b" in result.output
