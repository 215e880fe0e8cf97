"""How the text of an environment variable becomes a setting's value, and what is refused.

SettingsError
"""

import re
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*(?:([kmgt]?)(?:i?b)?)", re.IGNORECASE)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class SettingsError(ValueError):
    """A missing or odd value; `variable` is the environment variable to mend."""

    def __init__(self, variable: str, message: str) -> None:
        super().__init__(f"{variable} {message}")
        self.variable = variable


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model this deployment serves: the name clients use, and the checkpoint behind it."""

    name: str
    path: str  # checkpoint folder, GGUF file or hub id


def variable(field_name: str) -> str:
    """The environment variable behind a field of Settings."""
    if field_name in ("database_url", "redis_url"):
        return field_name.upper()
    if field_name == "otlp_endpoint":  # the name that all of OpenTelemetry has for it
        return "OTEL_EXPORTER_OTLP_ENDPOINT"
    return f"TOKENMILL_{field_name.upper()}"


def models(text: str, data_dir: Path) -> tuple[ModelEntry, ...]:
    entries = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, path = (piece.strip() for piece in part.partition("="))
        entries.append(ModelEntry(name=name, path=path or str(data_dir / "models" / name)))
    return tuple(entries)


def checkpoint(text: str, data_dir: Path) -> str:
    """Where a checkpoint lies; a name alone is a model's in the data folder."""
    alone = "/" not in text and not text.endswith(".gguf")
    return str(data_dir / "models" / text) if alone else text


def read(setting: Field[Any], text: str) -> Any:
    name = variable(setting.name)
    if setting.type in (str, tuple[ModelEntry, ...]):
        return text
    if setting.type is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise SettingsError(name, f"must be true or false, got {text!r}")
        return text.lower() in _TRUE
    number = _SIZE.fullmatch(text)
    if setting.metadata["unit"] == "bytes":
        if number is None:
            raise SettingsError(name, f"is not a number of bytes: {text!r}")
        return int(number[1]) * _SIZES[(number[2] or "").lower()]
    kind = float if setting.type is float else int
    try:
        return kind(text)
    except ValueError:
        unit = setting.metadata["unit"]
        expected = f"a number of {unit}" if unit else "a number"
        raise SettingsError(name, f"is not {expected}: {text!r}") from None


def check(setting: Field[Any], value: Any) -> None:
    name, limits = variable(setting.name), setting.metadata
    if setting.name == "database_url":
        if not re.match(r"(sqlite|postgres|postgresql)(\+[a-z0-9]+)?://", value):
            # the value may hold a password: say what is wrong without repeating it
            raise SettingsError(name, "must start with sqlite:/// or postgresql://")
        if value.startswith("sqlite") and not re.match(r"[^:]+:///(?!:memory:)[^?]", value):
            raise SettingsError(name, "must name a file: sqlite:///PATH")
        if value.startswith("postgres"):
            _check_postgres(name, value)
    elif setting.name == "redis_url":
        _check_redis(name, value)
    elif limits["choices"] is not None and value not in limits["choices"]:
        raise SettingsError(name, f"must be one of {', '.join(limits['choices'])}, got {value!r}")
    elif setting.name == "device" and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise SettingsError(name, f"must be auto, cpu, cuda or cuda:N, got {value!r}")
    elif limits["low"] is not None and value is not None:
        low, high = limits["low"], limits["high"]
        within = low <= value <= high  # NaN is not
        if not within:
            raise SettingsError(name, f"must be in [{low:g}, {high:g}], got {value:g}")


# a URL may hold a password: neither of these repeats it


def _check_redis(name: str, url: str) -> None:
    if not re.match(r"(rediss?|unix|redis\+socket)://", url):
        raise SettingsError(name, "must start with redis://, rediss:// or unix://")
    try:
        parts = urlsplit(url)
        _ = parts.port  # read only when asked for
    except ValueError:
        raise SettingsError(name, "has a host or port that cannot be read") from None
    if parts.scheme in ("redis", "rediss") and not re.fullmatch(r"/?\d*", parts.path):
        raise SettingsError(name, "must end with the number of a database, or with the port")


def _check_postgres(name: str, url: str) -> None:
    from jobs.database import DatabaseURLError, parse_url  # SQLAlchemy: only where it is needed

    try:
        port = parse_url(url).port
    except DatabaseURLError:
        port = -1
    if port is not None and not 0 < port < 1 << 16:
        raise SettingsError(name, "has a host or port that cannot be read")
