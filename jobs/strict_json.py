"""JSON as clients may send it: nothing that two readers, or two databases, could read differently.

Python's parser takes NaN, lets the last of two equal keys win, and gives lone surrogates on to
whoever encodes the text next. All of that is refused here, with the path to it.

JSONError
"""

import json
import math
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN_KEY = 64  # characters of a key in a path
MAX_INTEGER = 2**64  # exclusive, in absolute value: no field holds more
_SURROGATE = re.compile("[\ud800-\udfff]")
_BAREWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class JSONError(ValueError):
    """`path` leads to the fault, like messages[2].content; empty when it is the whole text's."""

    def __init__(self, path: str, message: str, *, of_number: bool = False) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.message = message
        self.of_number = of_number  # a number stands there, of no value that JSON or we have


@dataclass(frozen=True, slots=True)
class _Fault:
    """Stands where the parser met something to refuse, until the walk finds the path to it."""

    message: str
    key: str | None = None

    def __post_init__(self) -> None:
        _met.fault = True


_met = threading.local()  # whether this thread's parser has met one


def loads(data: bytes, *, max_depth: int = 32) -> Any:
    """The value of UTF-8 JSON text; objects and arrays nest at most `max_depth` deep.

    Raises JSONError.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JSONError("", f"not UTF-8 at byte {error.start}") from None
    _met.fault = False
    try:
        if text.startswith("\ufeff"):
            raise json.JSONDecodeError("a byte order mark before the text", text, 0)
        value = _decode(text)
    except json.JSONDecodeError as error:
        raise JSONError(
            "", f"not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except RecursionError:
        raise JSONError("", f"nested more than {max_depth} deep") from None
    # most texts need no walk: without escapes of characters nothing but the parser's own faults can
    # be in a value of theirs, nor can they nest deeper than they have brackets
    if _met.fault or "\\u" in text or text.count("[") + text.count("{") > max_depth:
        check(value, max_depth=max_depth)
    return value


def check(root: Any, *, max_depth: int = 32) -> None:
    """Raise JSONError at the first fault of a value, in the order of its text.

    A path is spelled only for a fault: spelling it for every value would let a small text with a
    long key and many values take memory without bound.
    """
    open_values: list[Iterator[tuple[str | int, Any]]] = []  # root to here, what is left of each
    trail: list[str | int] = []  # the key or index of each value on the way down
    value = root
    while True:
        if isinstance(value, str):
            if fault := _fault_of(value):
                raise JSONError(_path(trail), fault)
        elif isinstance(value, _Fault):
            at = trail if value.key is None else [*trail, value.key]
            raise JSONError(_path(at), value.message, of_number=value.key is None)
        elif isinstance(value, dict | list | tuple):
            if len(trail) == max_depth:
                raise JSONError(_path(trail), f"nested more than {max_depth} deep")
            if isinstance(value, dict):
                for key in value:
                    if fault := _fault_of(key):
                        raise JSONError(_path(trail), f"a key {fault}")
                open_values.append(iter(value.items()))
            else:
                open_values.append(iter(enumerate(value)))
            trail.append("")
        elif value is not None and not isinstance(value, int | float):  # a bool is an int
            raise JSONError(_path(trail), f"not a JSON value but a {type(value).__name__}")
        while open_values:
            step = next(open_values[-1], None)
            if step is not None:
                trail[-1], value = step
                break
            open_values.pop()
            trail.pop()
        else:
            return


def _fault_of(text: object) -> str | None:
    if not isinstance(text, str):
        return f"is not text but a {type(text).__name__}"
    if "\0" in text:
        return "holds the character U+0000"
    if not text.isascii() and _SURROGATE.search(text):
        return "holds half of a surrogate pair"
    return None


def _path(trail: Sequence[str | int]) -> str:
    path = ""
    for key in trail:
        if isinstance(key, int):
            path += f"[{key}]"
        elif len(key) <= SHOWN_KEY and _BAREWORD.fullmatch(key):
            path += f".{key}" if path else key
        else:
            shown = key if len(key) <= SHOWN_KEY else key[:SHOWN_KEY] + "…"
            path += f"[{json.dumps(shown)}]"
    return path


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


_decode = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=_integer,
    parse_float=_float,
    parse_constant=lambda word: _Fault(f"{word} is not a JSON number"),
).decode
