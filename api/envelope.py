"""What surrounds a generation in a submitted job: its fields, their types and bounds.

The body inside (`jobs.openai`, `SamplingParams`) is checked by `api.door`. Types are strict: true
is no number, 1.0 is no integer, and an unknown field is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from api.fields import checked
from jobs.lifecycle import RETRYABLE
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


RetryOn = Literal[  # lifecycle.RETRYABLE
    "engine_crash",
    "worker_lost",
    "resource_exhausted",
    "engine_error",
    "numerical_error",
    "compiler_busy",
]
MetadataKey = Annotated[str, Field(min_length=1, max_length=MAX_METADATA_KEY)]
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE)]

Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)]


class Envelope(BaseModel):
    """One job as submitted: a line of an OpenAI batch file, plus what a queue needs."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    custom_id: Annotated[str, Field(min_length=1), AfterValidator(_bounded)] | None = None
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    body: dict[str, Any]
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = 0
    deadline_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S, allow_inf_nan=False)] | None = None
    max_attempts: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)] | None = None
    retry_on: Annotated[list[RetryOn], Field(max_length=len(RETRYABLE))] | None = None
    metadata: Metadata = Field(default_factory=dict)


def read_envelope(value: object) -> Envelope:
    """Raises BadRequest naming the first field that is wrong, and its bound."""
    return checked(value, Envelope, noun="a job")
