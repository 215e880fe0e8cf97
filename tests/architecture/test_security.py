"""docs/security.md: each case has a test that there is."""

import ast
import re

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "security.md").read_text()
CASES = ["S01", "S04", "S05", "S06", "S07", "S09", "S10", "S11", "S12", "S14", "S16", "S18", "S20"]


def rows():
    return re.findall(r"^\| ([^|]+) \| ([^|]+) \| (`tests/[^|]+) \|$", PAGE, re.MULTILINE)


def test_every_case_is_in_the_table():
    named = [case.split()[0] for case, _, _ in rows()]
    assert [name for name in named if re.fullmatch(r"S\d\d", name)] == CASES
    assert len(rows()) == PAGE.count("\n| ") - 1  # the head


def test_the_tests_named_are_there():
    for case, _, tests in rows():
        for path, name in re.findall(r"`([^`]+)::(\w+)`", tests):
            tree = ast.parse((REPOSITORY / path).read_text())
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in names, (case, path, name)
