"""Values of a config.json, checked one by one; MalformedCheckpointError names what is wrong."""

from collections.abc import Mapping
from typing import Any

from engine.checkpoint_files import shown
from engine.weights import MalformedCheckpointError


def count(
    config: Mapping[str, Any],
    name: str,
    missing: int | None = None,  # what an absent key means
    null: int | None = None,  # what a null means
    *,
    least: int = 1,
    most: int = 2**31 - 1,
) -> int:
    value = config.get(name, missing)
    if value is None:
        value = null
    if type(value) is not int or not least <= value <= most:
        raise MalformedCheckpointError(
            f"{name} must be an integer in [{least}, {most}], got {shown(value)}"
        )
    return value


def positive(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise MalformedCheckpointError(f"{name} must be a positive number, got {shown(value)}")
    return float(value)


def flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise MalformedCheckpointError(f"{name} must be true or false, got {shown(value)}")
    return value


def in_one_line(error: Exception) -> str:
    """What transformers has against a value; its errors may go over many lines."""
    return f"{' '.join(str(error).split()):.400}"
