"""`tokenmill dataset check`: the spec and all of the input are read, nothing is run."""

import json
import subprocess

import pytest
from click.testing import CliRunner

from cli.main import tokenmill

SPEC = """
model: tiny
input: {path: in.csv}
output: {path: out}
prompt: Say {{ word }}.
samples: 2
"""


def check(folder):
    return CliRunner().invoke(tokenmill, ["dataset", "check", str(folder / "spec.yaml")])


def test_the_first_request_and_the_number_of_rows_are_shown(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "in.csv").write_text("word\na\nb\n")
    result = check(tmp_path)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["messages"] == [{"role": "user", "content": "Say a."}]
    assert "2 rows, 4 to be generated" in result.stderr


def test_a_fault_is_said_with_its_place(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC + "parameters: {temperature: -1}\n")
    (tmp_path / "in.csv").write_text("word\na\nb\n")
    result = check(tmp_path)
    assert result.exit_code == 1
    assert "in.csv line 2: temperature must be in [0, 2]" in result.output


@pytest.fixture
def small(tmp_path):
    """A folder on a disk of half a megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_without_room_for_the_rows_is_said_in_one_line(small, tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC.replace("path: out", f"path: {small}/out"))
    (tmp_path / "in.csv").write_text("word\n" + "x" * 1000 + "\n" + "some word\n" * 20_000)
    result = CliRunner().invoke(tokenmill, ["dataset", "run", str(tmp_path / "spec.yaml")])
    assert result.exit_code == 1
    assert "cannot be read or written: database or disk is full" in result.output


def test_a_damaged_state_is_said_to_be_one_and_nothing_to_push_makes_no_folder(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)
    words = [str(tmp_path / "spec.yaml"), "--repo", "a/b"]
    result = CliRunner().invoke(tokenmill, ["dataset", "push", *words])
    assert (result.exit_code, "has no dataset yet" in result.output) == (1, True)
    assert not (tmp_path / "out").exists()
    hidden = tmp_path / "out" / ".tokenmill"
    hidden.mkdir(parents=True)
    (hidden / "state.sqlite").write_bytes(b"no database" * 100)
    result = CliRunner().invoke(tokenmill, ["dataset", "status", words[0]])
    assert (result.exit_code, "the dataset's state is damaged" in result.output) == (1, True)
