"""A body's fields against a pydantic model: the first that is wrong, named, with its bound."""

import re
from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from api.errors import BadRequest
from jobs import strict_json

M = TypeVar("M", bound=BaseModel)


def read_object(raw: bytes, model: type[M], *, noun: str = "the body") -> M:
    """A request's body as `model`. Raises BadRequest."""
    try:
        value = strict_json.loads(raw)
    except strict_json.JSONError as error:
        raise BadRequest(str(error), param=error.path or None, code="invalid_json") from None
    return checked(value, model, noun=noun)


def checked(value: object, model: type[M], *, noun: str) -> M:
    """Raises BadRequest naming the first field that is wrong, and its bound."""
    if not isinstance(value, dict):
        raise BadRequest(f"{noun} must be a JSON object, got {_brief(value)}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    param = _path([part for part in first["loc"] if part != "[key]"])[:100]
    if first["type"] == "extra_forbidden":
        raise BadRequest(f"{param} is not a field of {noun}", param=param, code="unknown_field")
    if first["type"] == "missing":
        raise BadRequest(f"{param} is required", param=param)
    message = f"{param} {_as_predicate(first['msg'])}, got {_brief(first['input'])}"
    raise BadRequest(message, param=param)


def _path(parts: Sequence[int | str]) -> str:
    """As everywhere: a field's name behind a dot, a place in a list in brackets."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.removeprefix(".")


def _as_predicate(message: str) -> str:
    """A sentence of pydantic ("Input should be …") as the end of one of ours ("must be …")."""
    message = re.sub(r"^[A-Z]\w+ should ", "must ", message).removesuffix(", not more")
    return message.replace("a valid dictionary", "an object").replace(" after validation", "")


def _brief(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
