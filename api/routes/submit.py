"""POST /v1/jobs: one job or an array of them, accepted or refused together."""

from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from api.core import accept, idempotency_key
from api.door import Door
from api.errors import ApiError, BadRequest, json_response
from api.intake import digest, dump, new_job, parse_json
from api.present import job_object
from api.query import read_query
from api.routing import Router
from api.services import Services
from jobs.records import NewJob
from jobs.settings import Settings

router = Router()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    jobs: list[NewJob]
    is_array: bool
    body_sha256: bytes


@router.post("/v1/jobs")
async def submit(request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    key = idempotency_key(request)
    async with services.bodies.json_body(request) as raw:
        submission = await services.intake(
            raw, partial(read, raw, services.door, services.settings)
        )
    accepted = await accept(
        services, submission.jobs, tenant=tenant, key=key, body_sha256=submission.body_sha256
    )
    objects = accepted.objects or [job_object(record) for record in accepted.records]
    headers = {"idempotent-replayed": "true"} if accepted.replayed else {}
    content = {"object": "list", "data": objects} if submission.is_array else objects[0]
    return json_response(content, status=202, headers=headers)


def read(raw: bytes, door: Door, settings: Settings) -> Submission:
    """The jobs in a request's body. Raises BadRequest or BodyTooLarge; in an array they name the
    index of the first job that is wrong."""
    value = parse_json(raw)
    if not isinstance(value, list):
        jobs = [new_job(value, len(raw), door, settings)]
    else:
        if not 1 <= len(value) <= settings.max_jobs_per_call:
            raise BadRequest(
                f"an array must have 1 to {settings.max_jobs_per_call} jobs, got {len(value)}"
            )
        jobs = _new_jobs(value, len(raw), door, settings)
    return Submission(jobs=jobs, is_array=isinstance(value, list), body_sha256=digest(value))


def _new_jobs(items: list[object], num_bytes: int, door: Door, settings: Settings) -> list[NewJob]:
    jobs = []
    for index, item in enumerate(items):
        # an item is never longer than its array: only a long array has its items measured
        size = len(dump(item)) if num_bytes > settings.max_job_bytes else num_bytes
        try:
            jobs.append(new_job(item, size, door, settings))
        except ApiError as error:
            error.message = f"job {index}: {error.message}"
            error.param = f"[{index}].{error.param}" if error.param else f"[{index}]"
            raise
    return jobs
