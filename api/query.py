"""Query strings and headers: each known, given once and within its bound, or refused by name.

A parameter's reader takes the text and raises ValueError, whose message goes on after the
parameter's name ("must be …"); its `schema` says the same to who reads the API's document.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from starlette.requests import Request

from api.errors import BadRequest

MAX_TEXT = 256  # characters
# of metadata: keys, and characters of a key and of a value
MAX_INNER, MAX_INNER_NAME, MAX_LABEL = 16, 64, 512


@dataclass(frozen=True, slots=True)
class Reader:
    """Of one parameter."""

    read: Callable[[str], Any]
    schema: Mapping[str, Any]  # JSON Schema of what it takes
    deep: bool = False  # an object: its values are given one by one

    def __call__(self, value: str) -> Any:
        return self.read(value)


_INTEGER = re.compile(r"[0-9]{1,18}")
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")


def read_query(request: Request, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """The values of the parameters that were given. Raises BadRequest naming the first bad one."""
    values: dict[str, Any] = {}
    for given, text in request.query_params.multi_items():
        name, inner = _parted(given, readers)
        if name not in readers:
            known = f"; there are: {', '.join(readers)}" if readers else ""
            raise BadRequest(
                f"{_brief(given)} is not a parameter of this path{known}",
                param=given[:100],
                code="unknown_parameter",
            )
        into = values if inner is None else values.setdefault(name, {})
        key = name if inner is None else inner
        if key in into:
            raise BadRequest(f"{given} must be given once", param=given)
        try:
            into[key] = readers[name](text)
            if len(into) > MAX_INNER and inner is not None:
                raise BadRequest(f"{name} must have at most {MAX_INNER} keys", param=name)
        except ValueError as error:
            raise BadRequest(
                f"{given[:100]} {error}, got {_brief(text)}", param=given[:100]
            ) from None
    return values


def _parted(given: str, readers: Mapping[str, Reader]) -> tuple[str, str | None]:
    """A parameter's name, and of one that is an object ("metadata[k]=v") which key is given."""
    name, bracket, rest = given.partition("[")
    deep = name in readers and readers[name].deep
    if deep and bracket and rest.endswith("]") and 2 <= len(rest) <= MAX_INNER_NAME + 1:
        return name, rest[:-1]
    return ("", None) if deep else (given, None)


def read_header(request: Request, name: str) -> str | None:
    """A header's value, None where there is none. Raises BadRequest where it is given twice: the
    first may be for somebody before us, the second for us, and nobody can tell."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise BadRequest(f"{name} must be given once", param=name)
    return values[0] if values else None


def _text(value: str) -> str:
    # the databases disagree about NUL, so it never reaches one
    if not 1 <= len(value) <= MAX_TEXT or "\x00" in value:
        raise ValueError(f"must have 1 to {MAX_TEXT} characters, none of them NUL")
    return value


def _boolean(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("must be true or false")
    return value == "true"


def _label(value: str) -> str:
    if len(value) > MAX_LABEL or "\x00" in value:
        raise ValueError(f"must have at most {MAX_LABEL} characters, none of them NUL")
    return value


labels = Reader(
    _label,
    {
        "type": "object",
        "maxProperties": MAX_INNER,
        "propertyNames": {"minLength": 1, "maxLength": MAX_INNER_NAME},
        "additionalProperties": {"type": "string", "maxLength": MAX_LABEL},
    },
    deep=True,
)
text = Reader(_text, {"type": "string", "minLength": 1, "maxLength": MAX_TEXT})
any_text = text  # for what is read by nobody
boolean = Reader(_boolean, {"type": "boolean"})


def one_of(choices: type[StrEnum] | tuple[str, ...]) -> Reader:
    def read(value: str) -> str:
        if value not in list(choices):
            raise ValueError(f"must be one of {', '.join(choices)}")
        return choices(value) if isinstance(choices, type) else value

    return Reader(read, {"enum": [str(each) for each in choices]})


def integer(low: int, high: int) -> Reader:
    def read(value: str) -> int:
        if not _INTEGER.fullmatch(value) or not low <= int(value) <= high:
            raise ValueError(f"must be an integer in [{low}, {high}]")
        return int(value)

    return Reader(read, {"type": "integer", "minimum": low, "maximum": high})


def seconds(low: int, high: int) -> Reader:
    def read(value: str) -> float:
        if not _NUMBER.fullmatch(value) or not low <= float(value) <= high:
            raise ValueError(f"must be a number of seconds in [{low}, {high}]")
        return float(value)

    return Reader(read, {"type": "number", "minimum": low, "maximum": high})


def _brief(value: str) -> str:
    return repr(value if len(value) <= 80 else value[:80] + "…")
