"""A job that came whole in a Celery message (`tokenmill.generate`), checked where it arrives.

The door of this road is the worker: the client has no answer to read, so a job that is refused
still becomes a row, which says why. Only what cannot stand in a row is left out of it.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jobs import strict_json
from jobs.lifecycle import RETRIED, ErrorCode
from jobs.records import MAX_CUSTOM_ID_BYTES, JobError, NewJob, storable
from worker.generation import Refusal

MAX_SHOWN = 128  # characters of a url or model that a row or a message repeats
# how msgspec ends its messages: "… unknown field `foo`", "… got `int` - at `$.url`"
_FIELD = re.compile(r"(?:field|at) `(?:\$\.)?([^`]{1,128})`$")


class _Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a job; bounds are NewJob's."""

    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]
    method: Literal["POST"] = "POST"  # a line of an OpenAI batch file has it
    custom_id: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    max_attempts: int | None = None
    retry_on: list[str] | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SentJob:
    new_job: NewJob
    refusal: Refusal | None  # with one, the row is stored as failed


def read_sent_job(
    job_id: str,
    kwargs: object,
    *,
    max_attempts: int,
    max_bytes: int,
    served: Collection[str],  # the deployment's models
    refusal: Refusal | None = None,  # for what stands around the job in its message
    trace_parent: str | None = None,  # likewise
) -> SentJob:
    """Never raises: what is wrong is in the refusal."""
    try:
        sent = msgspec.convert(_strict(kwargs, max_bytes), _Job)
        model = sent.body.get("model")
        if not isinstance(model, str) or model not in served:
            shown = repr(model)[:MAX_SHOWN]
            raise JobError("model", f"{shown} is not served here; served: {', '.join(served)}")
        new_job = NewJob(
            id=job_id,
            url=sent.url,
            model=model,
            body=sent.body,
            custom_id=sent.custom_id,
            priority=sent.priority,
            max_attempts=max_attempts if sent.max_attempts is None else sent.max_attempts,
            retry_on=RETRIED if sent.retry_on is None else sent.retry_on,
            deadline_s=sent.deadline_s,
            metadata=sent.metadata or {},
            trace_parent=trace_parent,
        )
    except ValueError as error:  # msgspec's, strict_json's and NewJob's own are ValueErrors
        refusal = refusal or Refusal(ErrorCode.INVALID_REQUEST, str(error), param=_param(error))
        return SentJob(new_job=_what_can_stand(job_id, kwargs), refusal=refusal)
    return SentJob(new_job=new_job, refusal=refusal)


def _param(error: ValueError) -> str | None:
    """The field to change, a body's by its own name as the engine says it."""
    if isinstance(error, JobError):
        return error.param
    if isinstance(error, strict_json.JSONError):
        return error.path.removeprefix("body.") or None
    field = _FIELD.search(str(error))
    return field[1] if field else None


def _strict(kwargs: object, max_bytes: int) -> object:
    """As strictly read as a body over HTTP: Celery's JSON lets NaN and lone surrogates through, and
    makes more than JSON has of what a sender's Python had: times, decimals, UUIDs, bytes."""
    try:
        data = json.dumps(kwargs).encode()
    except (TypeError, RecursionError):
        strict_json.check(kwargs)  # says which field
        raise ValueError("a job must be JSON") from None
    if len(data) > max_bytes:
        raise ValueError(f"a job may have at most {max_bytes} bytes, got {len(data)}")
    return strict_json.loads(data)


def _what_can_stand(job_id: str, kwargs: object) -> NewJob:
    """A row to hang the refusal on."""
    sent = kwargs if isinstance(kwargs, dict) else {}
    body = sent.get("body")
    model = body.get("model") if isinstance(body, dict) else None
    custom_id = sent.get("custom_id")
    return NewJob(
        id=job_id,
        url=_text(sent.get("url")),
        model=_text(model),
        body={},
        custom_id=_text(custom_id, max_bytes=MAX_CUSTOM_ID_BYTES) or None,
    )


def _text(value: object, *, max_bytes: int = 4 * MAX_SHOWN) -> str:
    text = value[:MAX_SHOWN] if isinstance(value, str) else ""
    return text.encode()[:max_bytes].decode(errors="ignore") if storable(text) else ""
