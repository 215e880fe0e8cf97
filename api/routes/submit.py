"""POST /v1/jobs: one job or an array of them, accepted or refused together."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import Connection
from starlette.responses import Response

from api.door import Door, bound_of
from api.envelope import read_envelope
from api.errors import (
    ApiError,
    BadRequest,
    BodyTooLarge,
    Conflict,
    Unavailable,
    json_response,
)
from api.present import job_object
from api.query import read_header, read_query
from api.services import Services, ServicesDep, TenantDep
from jobs import store, strict_json
from jobs.records import JobRecord, NewJob, new_job_id
from jobs.settings import Settings

MAX_KEY_CHARACTERS = 255
_OPTION = re.compile(r"(?:\[[0-9]+\]\.)?body\.(\w+)")

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    jobs: list[NewJob]
    is_array: bool
    body_sha256: bytes  # of the parsed body, so that spaces and the order of keys don't count


@router.post("/v1/jobs", status_code=202)
async def submit(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    read_query(request, {})
    key = _idempotency_key(request)
    async with services.bodies.json_body(request) as raw:
        submission = await services.cpu.run(read, raw, services.door, services.settings)

    def accept(connection: Connection, now: float) -> store.Submitted:
        return store.submit(
            connection,
            submission.jobs,
            tenant=tenant,
            now=now,
            key=key,
            body_sha256=submission.body_sha256,
            ttl_s=services.settings.idempotency_ttl_s,
        )

    try:
        submitted = await services.sql.write(accept)
    except store.IdempotencyConflict:
        raise Conflict(
            "this Idempotency-Key was used with another body",
            param="idempotency-key",
            code="idempotency_conflict",
        ) from None
    if len(submitted.records) < len(submission.jobs):
        raise Conflict(
            "jobs of this Idempotency-Key's first call have been deleted since",
            param="idempotency-key",
            code="job_deleted",
        )
    services.hints.submitted()
    objects = await _objects(services, submitted.records)
    headers = {"idempotent-replayed": "true"} if submitted.replayed else {}
    content = {"object": "list", "data": objects} if submission.is_array else objects[0]
    return json_response(content, status=202, headers=headers)


async def _objects(services: Services, records: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """The accepted jobs; read after the commit, since nobody should wait for a forecast to write.

    A database that went away in between takes nothing back: the reply then has no forecast.
    """
    try:
        return await services.sql.read(partial(services.presenter.objects, records))
    except Unavailable:
        return [job_object(record) for record in records]


def read(raw: bytes, door: Door, settings: Settings) -> Submission:
    """The jobs in a request's body. Raises BadRequest or BodyTooLarge; in an array they name the
    index of the first job that is wrong."""
    try:
        value = strict_json.loads(raw)
    except strict_json.JSONError as error:
        option = _OPTION.fullmatch(error.path) if error.of_number else None
        bound = bound_of(option[1]) if option else None
        message = f"{error}; {bound}" if bound else str(error)
        raise BadRequest(message, param=error.path or None, code="invalid_json") from None
    if not isinstance(value, list):
        jobs = [_new_job(value, len(raw), door, settings)]
    else:
        if not 1 <= len(value) <= settings.max_jobs_per_call:
            raise BadRequest(
                f"an array must have 1 to {settings.max_jobs_per_call} jobs, got {len(value)}"
            )
        jobs = _new_jobs(value, len(raw), door, settings)
    return Submission(
        jobs=jobs,
        is_array=isinstance(value, list),
        body_sha256=hashlib.sha256(_dump(value)).digest(),
    )


def _new_jobs(items: list[object], num_bytes: int, door: Door, settings: Settings) -> list[NewJob]:
    jobs = []
    for index, item in enumerate(items):
        # an item is never longer than its array: only a long array has its items measured
        size = len(_dump(item)) if num_bytes > settings.max_job_bytes else num_bytes
        try:
            jobs.append(_new_job(item, size, door, settings))
        except ApiError as error:
            error.message = f"job {index}: {error.message}"
            error.param = f"[{index}].{error.param}" if error.param else f"[{index}]"
            raise
    return jobs


def _new_job(value: object, num_bytes: int, door: Door, settings: Settings) -> NewJob:
    if num_bytes > settings.max_job_bytes:
        raise BodyTooLarge(
            f"a job may have at most {settings.max_job_bytes} bytes, got {num_bytes}"
        )
    envelope = read_envelope(value)
    try:
        checked = door.check(envelope.url, envelope.body)
    except BadRequest as error:
        error.param = f"body.{error.param}" if error.param else "body"
        raise
    return NewJob(
        id=new_job_id(),
        custom_id=envelope.custom_id,
        url=envelope.url,
        model=checked.model,
        body=envelope.body,
        priority=envelope.priority,
        max_attempts=envelope.max_attempts or settings.max_attempts,
        deadline_s=envelope.deadline_s,
        metadata=envelope.metadata,
        prompt_tokens=checked.prompt_tokens,
        max_tokens=checked.max_tokens,
    )


def _dump(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _idempotency_key(request: Request) -> str | None:
    key = read_header(request, "idempotency-key")
    if key is not None and not (1 <= len(key) <= MAX_KEY_CHARACTERS and key.isascii()):
        raise BadRequest(
            f"idempotency-key must have 1 to {MAX_KEY_CHARACTERS} ASCII characters, got {len(key)}",
            param="idempotency-key",
        )
    return key
