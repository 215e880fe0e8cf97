"""The filters, tests and methods that a chat template may use, and what each may be asked for.

Allowed is what templates of published models use and its like. Refused is what takes more than
linear time, what nobody needs, and what reaches further than text; whatever makes much of little
(a repetition, a padding, an indentation) is judged by the size of its result before it runs.
"""

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2.filters import FILTERS as DEFAULT_FILTERS
from jinja2.tests import TESTS as DEFAULT_TESTS

from engine.template_budget import (
    ITEM_SIZE,
    MAX_DIGITS,
    MAX_INT_BITS,
    MAX_ITEMS,
    MAX_REPEATED,
    Budget,
    TemplateLimitError,
    check_size,
)

MAX_INDENT = 64
MAX_ROUND_DIGITS = 30
MAX_PATTERN_CHARS = 256  # of strftime_now
MAX_FORMAT_WIDTH = 1000  # of one number or text in a format
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")
_BRACE_FIELD = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{4,})")

Function = Callable[..., Any]


def _num_lines(text: str) -> int:
    return 1 + sum(map(text.count, _LINE_ENDS))


def check_format(budget: Budget, pattern: str, values: Iterable[Any]) -> None:
    """Raises TemplateLimitError when a pattern could make much of little."""
    if _BRACE_FIELD.search(pattern):
        raise TemplateLimitError("a format's width must be a number of at most 3 digits")
    for field in _PERCENT_FIELD.finditer(pattern):
        if any(width and (width == "*" or len(width) > 3) for width in field.groups()):
            raise TemplateLimitError("a format's width must be a number of at most 3 digits")
    largest = max((budget.size(value) for value in values), default=0)
    num_fields = pattern.count("%") + pattern.count("{")
    check_size("a formatted text", len(pattern) + num_fields * (MAX_FORMAT_WIDTH + largest))


def check_product(left: Any, right: Any) -> None:
    """Of `left * right`."""
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
            check_size("a repeated value", len(value) * times, MAX_REPEATED)
    if isinstance(left, int) and isinstance(right, int):
        check_size("bits of a product", left.bit_length() + right.bit_length(), MAX_INT_BITS)


def check_sum(budget: Budget, left: Any, right: Any) -> None:
    """Of `left + right`."""
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        check_size("a sum of texts or lists", budget.size(left) + budget.size(right))


def check_power(left: Any, right: Any) -> None:
    """Of `left ** right`."""
    if isinstance(left, int) and isinstance(right, int) and right > 0:
        check_size("bits of a power", left.bit_length() * right, MAX_INT_BITS)


# what each of these is asked for, by the parameters of the filter or method of that name


def _replace(budget: Budget, s: Any, old: Any, new: Any, count: Any = None) -> None:
    text, old, new = str(s), str(old), str(new)
    check_size("a text after replacing", len(text) + text.count(old) * len(new))


def _join(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> None:
    num_items = len(value) if hasattr(value, "__len__") else 0
    check_size("a joined text", budget.size(value) + num_items * len(str(d)))


def _join_method(budget: Budget, sep: str, items: Any) -> None:
    check_size("a joined text", budget.size(items) + len(items) * len(sep))


def _indent(budget: Budget, s: str, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    num_chars = width if isinstance(width, int) else len(width)
    check_size("lines", _num_lines(s), MAX_ITEMS)
    check_size("an indented text", len(s) + _num_lines(s) * num_chars)


def _padded(budget: Budget, s: Any, width: Any = 80, fillchar: Any = " ") -> None:
    check_size("a padded text", width, MAX_REPEATED)


def _number(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(value, str):
        check_size("digits of a number", len(value), MAX_DIGITS)


def _round(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> None:
    check_size("digits to round to", abs(precision), MAX_ROUND_DIGITS)


def _sum(budget: Budget, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise TemplateLimitError("sum is for numbers")


def _title(budget: Budget, s: Any) -> None:
    check_size("a title", len(str(s)), MAX_REPEATED)


def _format(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    check_format(budget, str(value), [*args, *kwargs.values()])


def _splitlines(budget: Budget, s: str, keepends: Any = False) -> None:
    check_size("lines", _num_lines(s), MAX_ITEMS)


def _split(budget: Budget, s: str, sep: Any = None, maxsplit: int = -1) -> None:
    if maxsplit < 0 or maxsplit > MAX_ITEMS:
        num_parts = s.count(sep) if sep else len(s.split(None, MAX_ITEMS))
        check_size("parts of a text", num_parts, MAX_ITEMS)


Guard = Callable[..., None] | None

FILTERS: dict[str, Guard] = {
    **dict.fromkeys(("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e")),
    **dict.fromkeys(("escape", "first", "groupby", "items", "last", "length", "list", "lower")),
    **dict.fromkeys(("map", "max", "min", "reject", "rejectattr", "reverse", "safe", "select")),
    **dict.fromkeys(("selectattr", "sort", "string", "tojson", "trim", "unique", "upper")),
    "center": _padded,
    "float": _number,
    "format": _format,
    "indent": _indent,
    "int": _number,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "sum": _sum,
    "title": _title,
}
# they walk through all of their input at once
_EAGER = frozenset(("groupby", "join", "list", "max", "min", "reverse", "sort", "sum", "unique"))
# they give one of the values that were there
_CHOOSING = frozenset(("attr", "d", "default", "first", "last", "max", "min"))

_STR: dict[str, Guard] = {
    **dict.fromkeys(("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum")),
    **dict.fromkeys(("isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower")),
    **dict.fromkeys(("isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower")),
    **dict.fromkeys(("lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex")),
    **dict.fromkeys(("rpartition", "rstrip", "startswith", "strip", "swapcase", "title", "upper")),
    "center": _padded,
    "format": _format,
    "join": _join_method,
    "ljust": _padded,
    "replace": _replace,
    "rjust": _padded,
    "rsplit": _split,
    "split": _split,
    "splitlines": _splitlines,
    "zfill": _padded,
}
METHODS: dict[type, dict[str, Guard]] = {
    str: _STR,
    list: dict.fromkeys(("copy", "count", "index")),
    tuple: dict.fromkeys(("count", "index")),
    dict: dict.fromkeys(("copy", "get", "items", "keys", "values")),
}
# told when a template is loaded. What changes a value is left to the sandbox, which refuses it when
# it is called, as it does in transformers: a template may name it where it never comes to it.
_CHANGING = {"append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault"}
_CHANGING |= {"update", "sort", "reverse", "add", "discard"}
REFUSED_METHODS = (
    {name for kind in (str, bytes, list, dict, int, float, set) for name in dir(kind)}
    - {name for allowed in METHODS.values() for name in allowed}
    - _CHANGING
)


def guarded_filters(budget: Budget) -> dict[str, Function]:
    """The filters by name, each within the budget of its thread's rendering."""
    functions: dict[str, Any] = {**DEFAULT_FILTERS, "tojson": _to_json(budget)}
    return {name: _within(budget, name, functions[name], FILTERS[name]) for name in FILTERS}


def guarded_tests(budget: Budget) -> dict[str, Function]:
    tests: dict[str, Any] = {**DEFAULT_TESTS}
    return {name: _within(budget, name, test, None) for name, test in tests.items()}


def _within(budget: Budget, name: str, function: Function, guard: Guard) -> Function:
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment, say, goes first

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        budget.tick()
        if name in _EAGER and len(args) > passed:
            args = (*args[:passed], budget.items(args[passed]), *args[passed + 1 :])
        if guard is not None:
            guard(budget, *args[passed:], **kwargs)
        result = function(*args, **kwargs)
        return result if name in _CHOOSING else budget.made(result)

    return run


def method_guard(receiver: Any, name: str) -> Guard:
    """Of a method of a text, list or dict. Raises LookupError when templates may not use it."""
    for kind, allowed in METHODS.items():
        if isinstance(receiver, kind):
            return allowed[name]
    raise LookupError(name)


def _to_json(budget: Budget) -> Function:
    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes <, > and & for HTML; models were trained on plain JSON
        num_chars = len(indent) if isinstance(indent, str) else indent or 0
        check_size("an indentation", num_chars, MAX_INDENT)
        num_chars += sum(map(len, separators or ()))
        size, height = budget.measure(value)
        check_size("an indented text", size + size // ITEM_SIZE * num_chars * (height + 1))
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    return to_json


def strftime_now(pattern: str) -> str:
    check_size("characters of a date's pattern", len(pattern), MAX_PATTERN_CHARS)
    if re.search(r"%[^a-zA-Z%]*\d", pattern):
        raise TemplateLimitError("a date's pattern must have no widths")
    return datetime.now().strftime(pattern)
