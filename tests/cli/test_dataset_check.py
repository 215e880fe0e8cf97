"""`tokenmill dataset check`: the spec and all of the input are read, nothing is run."""

import json

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
