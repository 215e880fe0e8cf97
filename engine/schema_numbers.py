"""Numbers of a JSON schema, told so that llguidance keeps them.

It reads a number of more than 15 digits as a neighbour of it: a const of 1234567890123456789 would
be met by 1234567890123456768, and by nothing else. So one in `const` or `enum` is refused, and a
bound moves inward to the next number of 15 digits. So is a `minProperties` above 1: a key may come
twice and is counted twice. An exclusive bound always moves: where a
number's bounds are less than 1 apart and the exclusive one is whole, the library takes the bound
itself, 0 for {"exclusiveMinimum": 0, "maximum": 0.5}. What lies between a bound and where it moved
is not generated: one part in 10^14, or 10^-15 near 0.

    UnkeptNumberError
"""

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

NUM_DIGITS = 15
_LARGEST_EXPONENT = 22  # the largest power of ten that a double holds
_EXACT = 2**53  # whole numbers up to here are doubles
_INWARD = {
    "minimum": ROUND_CEILING,
    "maximum": ROUND_FLOOR,
    "exclusiveMinimum": ROUND_CEILING,
    "exclusiveMaximum": ROUND_FLOOR,
}
_LEAST = Decimal("1e-15")  # that an exclusive bound moves
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of names to schemas
_VALUES = ("const", "enum")  # no schemas, whatever they look like
_NOTES = ("default", "examples")  # values that nothing is held to
_LARGEST_EXCLUSIVE = 2**31  # beyond it a fraction has no digits left


class UnkeptNumberError(ValueError):
    """A number that an output would have to be, and could not."""


def with_kept_numbers(schema: Any) -> Any:
    """The schema with bounds that are kept to the letter. Raises UnkeptNumberError."""
    if isinstance(schema, list):
        return [with_kept_numbers(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            kept[key] = {name: with_kept_numbers(each) for name, each in value.items()}
        elif key in _INWARD and type(value) in (int, float):
            kept[key] = _moved(value, key)
        elif key in _VALUES:
            _check(key, value)
            kept[key] = value
        elif key == "minProperties" and type(value) in (int, float) and value > 1:
            raise UnkeptNumberError(f"minProperties must be at most 1, got {value!r:.100}")
        else:
            kept[key] = value if key in _NOTES else with_kept_numbers(value)
    return kept


def _check(key: str, value: Any) -> None:
    """Without recursion: a value may be as deep as a schema."""
    level = [value]
    while level:
        for number in level:
            if type(number) in (int, float) and not _is_read_as_written(number):
                raise UnkeptNumberError(
                    f"{key} may have numbers of at most {NUM_DIGITS} digits, and whole ones up to "
                    f"{_EXACT}, got {number!r:.100}; use a string"
                )
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]


def _is_read_as_written(number: float) -> bool:
    written = Decimal(repr(number))
    if not written.is_finite():
        return False
    _, digits, exponent = written.normalize().as_tuple()
    assert isinstance(exponent, int), "a finite number has one"
    if exponent >= 0:
        return abs(written) <= _EXACT
    return len(digits) <= NUM_DIGITS and -exponent <= _LARGEST_EXPONENT


def _moved(bound: float, name: str) -> float:
    written = Decimal(repr(bound))
    if not written.is_finite():
        return bound
    inward = Context(prec=NUM_DIGITS, rounding=_INWARD[name])
    is_whole = written == written.to_integral_value()
    if name.startswith("exclusive") and is_whole and abs(written) <= _LARGEST_EXCLUSIVE:
        least = _LEAST if name == "exclusiveMinimum" else -_LEAST
        return float(inward.add(written, least))
    if is_whole and abs(written) <= _EXACT:
        return bound
    rounded = inward.plus(written)
    return int(rounded) if type(bound) is int else float(rounded)
