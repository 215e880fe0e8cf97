"""Each dependency is written down: docs/dependencies.md says why, constraints.txt which version."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def required(*extras):
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def pins():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_dependency_has_its_reason():
    text = (REPOSITORY / "docs" / "dependencies.md").read_text()
    first_cells = re.findall(
        r"^\| (?:embedded \| |gpu \| |otel \| |dev \| )?([^|]+?) \|", text, re.M
    )
    documented = {canonicalize_name(name) for cell in first_cells for name in cell.split(", ")}
    undocumented = required(*EXTRAS).keys() - documented
    assert {name for name in undocumented if not name.startswith("types-")} == set()


def test_what_tests_run_with_is_pinned_within_the_bounds():
    pinned = pins()
    for name, requirement in required("embedded", "dev", "gpu", "otel").items():
        assert requirement.specifier.contains(pinned[name]), (name, pinned[name])


def test_no_cuda_library_is_pinned():
    assert [name for name in pins() if name.startswith(("nvidia", "cuda"))] == []


def test_each_bound_has_both_ends_but_for_tools():
    for name, requirement in required("embedded", "gpu", "otel").items():
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators in ({">=", "<"}, {"=="}) or name == "packaging", str(requirement)
