"""A call of one of OpenAI's endpoints as a job: its own body, and ours around it.

What a queue needs stands beside the endpoint's fields, or in an object `tokenmill` of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from api.door import Door, UnknownModel
from api.envelope import read_envelope
from api.errors import BadRequest, NotFound
from api.intake import check_size, digest, job_of, parse_json
from jobs.records import NewJob
from jobs.settings import Settings
from jobs.streams import StreamMode

NAMESPACE = "tokenmill"
EXTENSIONS = ("priority", "deadline_s")
NAMESPACED = (*EXTENSIONS, "custom_id", "max_attempts", "retry_on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    new_job: NewJob
    body_sha256: bytes

    @property
    def body(self) -> Mapping[str, Any]:
        return self.new_job.body

    @property
    def streams(self) -> bool:
        return self.body.get("stream") is True


def read_body(raw: bytes, settings: Settings) -> tuple[dict[str, Any], bytes]:
    """The endpoint's object, and its digest. Raises BadRequest, BodyTooLarge."""
    check_size(len(raw), settings)
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body, digest(body)


def call_of(
    url: str,
    body: dict[str, Any],
    body_sha256: bytes,
    door: Door,
    settings: Settings,
    *,
    stream: StreamMode | None,
    waits: bool,  # somebody, for the job's end: it must not outlive them for long
    resolved: bool = False,  # what the body names instead of giving it is in it by now
) -> Call:
    """Raises BadRequest, whose `param` is a field of the body, and NotFound for a model that is
    not served: so OpenAI has it."""
    around = _take_envelope(body)
    if isinstance(metadata := body.get("metadata"), dict):
        around["metadata"] = metadata
    if waits and around.get("deadline_s") is None:
        around["deadline_s"] = settings.sync_s
    envelope = read_envelope({"url": url, "body": body, **around})
    try:
        new_job = job_of(envelope, door, settings, stream=stream, resolved=resolved)
    except UnknownModel as error:
        raise NotFound(error.message, param=error.param, code=error.code) from None
    return Call(new_job=new_job, body_sha256=body_sha256)


def _take_envelope(body: dict[str, Any]) -> dict[str, Any]:
    """Our fields, taken out of the endpoint's."""
    around = {name: body.pop(name) for name in EXTENSIONS if name in body}
    ours = body.pop(NAMESPACE, None)
    if ours is None:
        return around
    if not isinstance(ours, dict):
        raise BadRequest(f"{NAMESPACE} must be an object", param=NAMESPACE)
    for name in ours:
        at = f"{NAMESPACE}.{name}"[:100]
        if name not in NAMESPACED:
            known = ", ".join(NAMESPACED)
            message = f"{at} is not a field; there are {known}"
            raise BadRequest(message, param=at, code="unknown_field")
        if name in around:
            raise BadRequest(f"{name} and {at} are one field: give one", param=at)
    return around | ours
