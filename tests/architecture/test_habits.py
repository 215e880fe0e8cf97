"""Habits that a reader relies on and a linter does not know."""

import ast
import re

import pytest

from tests.conftest import REPOSITORY

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SOURCE_FOLDERS = ("engine", "jobs", "bulk", "worker", "api", "cli", "bench")
# folders of the machine somebody worked on
MACHINE_PATH = re.compile(r"(?<![\w.{])/(?:root|home|work|Users)/(?!tokenmill\b)\w")
DOUBT = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")


def project_files():
    """What the project wrote: no environment, cache or data."""
    for path in sorted(REPOSITORY.iterdir()):
        if path.is_file() and path.name != ".git":  # a file where the checkout is a worktree
            yield path
        elif path.is_dir() and (path.name == ".ci" or not path.name.startswith((".", "build"))):
            yield from (file for file in path.rglob("*") if file.is_file())


def source_files():
    return sorted(path for folder in SOURCE_FOLDERS for path in (REPOSITORY / folder).rglob("*.py"))


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_source_file_can_be_read_in_one_sitting(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno + 1 <= MAX_FUNCTION_LINES, node.name
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "the module does not say what it is"


def test_nothing_names_a_folder_of_somebody_s_machine_or_leaves_a_doubt():
    found = []
    for path in project_files():
        if path.name == "test_habits.py" or path.suffix == ".pyc":
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(lines, start=1)
            if MACHINE_PATH.search(line) or DOUBT.search(line)
        ]
    assert found == []
