"""docs/settings.md says what jobs/settings.py checks: every setting, its default, its bounds."""

import re
from dataclasses import fields

from jobs.settings import Settings, variable
from tests.conftest import REPOSITORY

ROW = re.compile(
    r"\| `(?P<variable>\w+)` \| (?P<default>.*?) \| (?P<values>.*?) ?\| (?P<meaning>.*) \|"
)


def documented():
    text = (REPOSITORY / "docs" / "settings.md").read_text()
    return [match.groupdict() for match in ROW.finditer(text)]


def shown_default(setting):
    if setting.name == "models":
        return ",".join(model.name for model in setting.default)
    if setting.default is None:
        return "–"
    if isinstance(setting.default, bool):
        return str(setting.default).lower()
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


def shown_values(setting):
    limits = setting.metadata
    if limits["choices"]:
        return ", ".join(limits["choices"])
    if limits["low"] is None:
        return ""
    unit = f" {limits['unit']}" if limits["unit"] else ""
    return f"{limits['low']:.15g} … {limits['high']:.15g}{unit}"


def test_every_setting_is_documented_once_and_nothing_else_is():
    names = [row["variable"] for row in documented()]
    assert sorted(names) == sorted(variable(setting.name) for setting in fields(Settings))


def test_the_documented_defaults_bounds_and_meanings_are_the_code_s():
    rows = {row.pop("variable"): row for row in documented()}
    for setting in fields(Settings):
        assert rows[variable(setting.name)] == {
            "default": shown_default(setting),
            "values": shown_values(setting),
            "meaning": setting.metadata["doc"],
        }
