"""What surrounds a generation in a submitted job: its fields, their types and bounds.

The body inside (`jobs.openai`, `SamplingParams`) is checked by `api.door`. Types are strict: true
is no number, 1.0 is no integer, and an unknown field is refused by name.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from api.errors import BadRequest
from jobs.records import (
    MAX_ATTEMPTS,
    MAX_CUSTOM_ID_BYTES,
    MAX_DEADLINE_S,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    MAX_PRIORITY,
    MIN_PRIORITY,
)


def _bounded(text: str) -> str:
    if len(text.encode()) > MAX_CUSTOM_ID_BYTES:
        limit = {"limit": MAX_CUSTOM_ID_BYTES}
        raise PydanticCustomError("too_long", "must have at most {limit} bytes", limit)
    return text


MetadataKey = Annotated[str, Field(min_length=1, max_length=MAX_METADATA_KEY)]
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE)]


class Envelope(BaseModel):
    """One job as submitted: a line of an OpenAI batch file, plus what a queue needs."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    custom_id: Annotated[str, Field(min_length=1), AfterValidator(_bounded)] | None = None
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = 0
    deadline_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S, allow_inf_nan=False)] | None = None
    max_attempts: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] = Field(
        default_factory=dict
    )


def read_envelope(value: object) -> Envelope:
    """Raises BadRequest naming the first field that is wrong, and its bound."""
    if not isinstance(value, dict):
        raise BadRequest(f"a job must be a JSON object, got {_brief(value)}")
    try:
        return Envelope.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"] if part != "[key]")[:100]
    if first["type"] == "extra_forbidden":
        raise BadRequest(f"{param} is not a field of a job", param=param, code="unknown_field")
    if first["type"] == "missing":
        raise BadRequest(f"{param} is required", param=param)
    message = f"{param} {_as_predicate(first['msg'])}, got {_brief(first['input'])}"
    raise BadRequest(message, param=param)


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
