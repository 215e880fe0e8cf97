"""Exclusive bounds of a JSON schema, told so that llguidance keeps them.

Where a number's bounds are less than 1 apart and the exclusive one is whole, it takes the bound
itself: 0 for {"exclusiveMinimum": 0, "maximum": 0.5}. It keeps one with a fraction, and the next
such number inside means the same, but for what lies between: up to 1e-15 away from the bound.
"""

import math
from typing import Any

_INWARD = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of names to schemas
_VALUES = ("const", "enum", "default", "examples")  # no schemas, whatever they look like
_LARGEST = 2**31  # beyond it a fraction becomes too coarse


def with_fractions(schema: Any) -> Any:
    """The schema with its whole exclusive bounds moved inward by the least that is a fraction."""
    if isinstance(schema, list):
        return [with_fractions(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            moved[key] = {name: with_fractions(each) for name, each in value.items()}
        elif key in _INWARD and type(value) in (int, float):
            moved[key] = _moved(value, _INWARD[key])
        else:
            moved[key] = value if key in _VALUES else with_fractions(value)
    return moved


def _moved(bound: float, inward: int) -> float:
    if abs(bound) > _LARGEST or not math.isfinite(bound) or bound != int(bound):
        return bound
    return bound + inward * max(1e-15, math.ulp(bound))
