"""JSON as clients may send it: nothing that two readers, or two databases, could read differently.

Python's parser takes NaN, lets the last of two equal keys win, and gives lone surrogates on to
whoever encodes the text next. All of that is refused here, with the path to it.

JSONError
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

MAX_INTEGER = 2**64  # exclusive, in absolute value: no field holds more
_SURROGATE = re.compile("[\ud800-\udfff]")
_BAREWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class JSONError(ValueError):
    """`path` leads to the fault, like messages[2].content; empty when it is the whole text's."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.message = message


@dataclass(frozen=True, slots=True)
class _Fault:
    """Stands where the parser met something to refuse, until the walk finds the path to it."""

    message: str
    key: str | None = None


def loads(data: bytes, *, max_depth: int = 32) -> Any:
    """The value of UTF-8 JSON text; objects and arrays nest at most `max_depth` deep.

    Raises JSONError.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JSONError("", f"not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=lambda word: _Fault(f"{word} is not a JSON number"),
        )
    except json.JSONDecodeError as error:
        raise JSONError(
            "", f"not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except RecursionError:
        raise JSONError("", f"nested more than {max_depth} deep") from None
    _check(value, max_depth)
    return value


def _check(root: Any, max_depth: int) -> None:
    """Raise JSONError at the first fault, in the order of the text."""
    stack: list[tuple[Any, str, int]] = [(root, "", 0)]
    while stack:
        value, path, depth = stack.pop()
        if isinstance(value, str):
            if fault := _fault_of(value):
                raise JSONError(path, fault)
        elif isinstance(value, _Fault):
            at = path if value.key is None else _member(path, value.key)
            raise JSONError(at, value.message)
        elif isinstance(value, dict | list):
            if depth == max_depth:
                raise JSONError(path, f"nested more than {max_depth} deep")
            if isinstance(value, dict):
                for key in value:
                    if fault := _fault_of(key):
                        raise JSONError(path, f"a key {fault}")
                children = [(each, _member(path, key)) for key, each in value.items()]
            else:
                children = [(each, f"{path}[{i}]") for i, each in enumerate(value)]
            stack.extend((each, at, depth + 1) for each, at in reversed(children))


def _fault_of(text: str) -> str | None:
    if "\0" in text:
        return "holds the character U+0000"
    if not text.isascii() and _SURROGATE.search(text):
        return "holds half of a surrogate pair"
    return None


def _member(path: str, key: str) -> str:
    if not _BAREWORD.fullmatch(key):
        shown = key if len(key) <= 64 else key[:64] + "…"
        return f"{path}[{json.dumps(shown)}]"
    return f"{path}.{key}" if path else key


def _object(pairs: list[tuple[str, Any]]) -> Any:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    seen: set[str] = set()
    twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return _Fault("given twice in one object", twice)


def _integer(digits: str) -> Any:
    # before int(): Python refuses beyond 4,300 digits and takes quadratic time below
    if len(digits) > 21 or abs(number := int(digits)) >= MAX_INTEGER:
        return _Fault(f"an integer of {len(digits)} digits is too large")
    return number


def _float(digits: str) -> Any:
    number = float(digits)
    return number if math.isfinite(number) else _Fault("a number too large for a double")
