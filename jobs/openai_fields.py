"""Fields of a JSON body, each read as the type it must have; ranges are for others to check."""

import json
import math
import re
from collections.abc import Collection
from typing import Any

MAX_SHOWN = 64  # characters of a value or a name that an error repeats
_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_AUTHOR = re.compile(r"[^\s<|\\/>]{1,64}")


class BodyError(ValueError):
    """A body that cannot be run; `param` is the field to change."""

    code: str | None = None  # for a client's program

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class UnknownField(BodyError):
    """A field that nobody reads, most likely misspelled."""

    code = "unknown_field"


class UnsupportedField(BodyError):
    """A field that OpenAI has and we have not."""

    code = "unsupported_parameter"


class UnsupportedValue(BodyError):
    """A field that we have, with a value of OpenAI's that we have not."""

    code = "unsupported_value"


def kind(value: object) -> str:
    """What JSON calls it."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string",
             list: "a list", dict: "an object", type(None): "nothing"}  # fmt: skip
    return names.get(type(value), type(value).__name__)


def text(path: str, value: object) -> str:
    if not isinstance(value, str):
        raise BodyError(path, f"{path} must be a string, got {kind(value)}")
    return value


def integer(path: str, value: object) -> int:
    if type(value) is not int:  # a bool is an int to Python and a mistake to a client
        raise BodyError(path, f"{path} must be an integer, got {shown(value)}")
    return value


def number(path: str, value: object) -> float:
    try:
        finite = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer that no double comes near
        finite = False
    if not finite:
        raise BodyError(path, f"{path} must be a finite number, got {shown(value)}")
    return value  # type: ignore[return-value]


def boolean(path: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise BodyError(path, f"{path} must be true or false, got {shown(value)}")
    return value


def boolean_or_text(path: str, value: object) -> bool | str:
    if not isinstance(value, bool | str):
        raise BodyError(path, f"{path} must be true, false or a string, got {kind(value)}")
    return value


def texts(path: str, value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise BodyError(path, f"{path} must be a string or a list of strings")
    return tuple(values)


def token_ids(path: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BodyError(path, f"{path} must be a list of token ids, got {kind(value)}")
    return tuple(integer(f"{path}[{i}]", each) for i, each in enumerate(value))


def labels(path: str, value: object) -> None:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise BodyError(path, f"{path} must be an object of strings")


def logit_bias(path: str, value: object) -> tuple[tuple[int, float], ...]:
    """Ids are the keys of a JSON object, so strings: plain decimals, each id in one spelling."""
    if not isinstance(value, dict):
        raise BodyError(path, f"{path} must be an object of token ids, got {kind(value)}")
    for key in value:
        if not key.isascii() or not key.isdecimal() or len(key) > 10 or str(int(key)) != key:
            raise BodyError(path, f"{path} keys must be token ids, got {shown(key)}")
    return tuple((int(key), number(f"{path}.{key}", bias)) for key, bias in value.items())


def list_of_texts(path: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise BodyError(path, f"{path} must be a list of strings")
    return tuple(value)


def counts(path: str, value: object) -> dict[str, int]:
    """An object of whole numbers."""
    if not isinstance(value, dict):
        raise BodyError(path, f"{path} must be an object, got {kind(value)}")
    given = {name: each for name, each in value.items() if each is not None}
    return {name: integer(f"{path}.{name[:MAX_SHOWN]}", each) for name, each in given.items()}


def record(path: str, value: object, names: Collection[str]) -> dict[str, Any]:
    """An object of these fields; those that are null are not given."""
    if not isinstance(value, dict):
        raise BodyError(path, f"{path} must be an object, got {kind(value)}")
    for name in value:
        if name not in names:
            at = f"{path}.{name[:MAX_SHOWN]}"
            raise UnknownField(at, f"{at} is not a field; there are {', '.join(names)}")
    return {name: each for name, each in value.items() if each is not None}


def one_of(path: str, value: object, words: Collection[str]) -> str:
    if not isinstance(value, str) or value not in words:
        raise BodyError(path, f"{path} must be {' or '.join(words)}, got {shown(value)}")
    return value


def unsupported(path: str, value: object, neutral: Collection[object]) -> BodyError:
    """Of a field that may only say what asks for nothing."""
    if not neutral:
        return UnsupportedField(path, f"{path} is not supported yet")
    known = " or ".join(json.dumps(each) for each in neutral)
    return UnsupportedValue(
        path, f"{path} is not supported yet: it may be {known}, got {shown(value)}"
    )


def kind_of(path: str, value: object, kinds: Collection[str]) -> str:
    """The type of an object that OpenAI has of more types than these."""
    if isinstance(value, str) and value not in kinds:
        raise UnsupportedValue(path, f"{path} must be {' or '.join(kinds)}, got {shown(value)}")
    return one_of(path, value, kinds)


def function_name(path: str, value: object) -> str:
    name = text(path, value)
    if not _FUNCTION_NAME.fullmatch(name):
        raise BodyError(
            path,
            f"{path} must have 1 to 64 characters of a-z, A-Z, 0-9, _ and -, got {shown(name)}",
        )
    return name


def author(path: str, value: object) -> str:
    name = text(path, value)
    if not _AUTHOR.fullmatch(name):
        raise BodyError(path, f"{path} must have 1 to 64 characters without spaces or <|\\/>")
    return name


def depth(value: object) -> int:
    """Levels of objects and lists, without recursion: the caller has yet to bound them."""
    levels = 0
    level = [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        levels += 1
        level = [
            inner for each in level for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return levels


def shown(value: object) -> str:
    """As an error repeats it: short, and without Python's limit on digits of an integer."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        value = value[: 2 * MAX_SHOWN]
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
