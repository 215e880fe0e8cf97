"""Whether a value is of the kind that an option takes, and within its bounds.

Every refusal names the field, the bound and the value, in the same words whoever asks.
"""

from engine.parameter_error import ParameterError


def check_int(name: str, value: object, low: int, high: int) -> None:
    # a bool is an int to Python and a mistake to a client
    if type(value) is not int:
        raise ParameterError(name, f"{name} must be an integer, got {shown(value)}")
    if not low <= value <= high:
        raise ParameterError(name, f"{name} must be in [{low}, {high}], got {shown(value)}")


def check_optional_int(name: str, value: object, high: int) -> None:
    if value is not None:
        check_int(name, value, 0, high)


def check_float(
    name: str, value: object, low: float, high: float, *, low_excluded: bool = False
) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ParameterError(name, f"{name} must be a number, got {shown(value)}")
    # NaN is in no range
    if not low <= value <= high or (low_excluded and value == low):
        bracket = "(" if low_excluded else "["
        raise ParameterError(
            name, f"{name} must be in {bracket}{low:g}, {high:g}], got {shown(value)}"
        )


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ParameterError(name, f"{name} must be true or false, got {shown(value)}")


def check_tuple(name: str, value: object, max_length: int) -> None:
    # a bare string would pass for a tuple of one-letter strings
    if not isinstance(value, tuple):
        raise ParameterError(name, f"{name} must be a tuple, got {shown(value)}")
    if len(value) > max_length:
        raise ParameterError(name, f"{name} may hold at most {max_length}, got {len(value)}")


def check_ids(name: str, ids: tuple[int, ...], max_length: int) -> None:
    check_tuple(name, ids, max_length)
    for token_id in ids:
        check_int(name, token_id, 0, 2**31 - 1)


def shown(value: object) -> str:
    """A value as an error shows it: short, and without Python's limit on digits of an integer."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
