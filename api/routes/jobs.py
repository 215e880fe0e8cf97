"""Reading and cancelling jobs: GET /v1/jobs, GET /v1/jobs/{id}, POST /v1/jobs/{id}/cancel."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from api.core import JOB_ID, disconnected
from api.errors import BadRequest, NotFound, json_response
from api.present import list_object, with_attempts
from api.query import integer, one_of, read_query, seconds, text
from api.routing import Router
from api.services import Services
from jobs import store
from jobs.lifecycle import JobState
from jobs.records import JobRecord

R = TypeVar("R")

MAX_WAIT_S = 60
DEFAULT_LIMIT, MAX_LIMIT = 20, 1000  # jobs in one page
LIST_QUERY = {
    "status": one_of(JobState),
    "model": text,
    "batch_id": text,
    "custom_id": text,
    "limit": integer(1, MAX_LIMIT),
    "after": text,  # the id of the last job of the page before
}
GET_QUERY = {"wait": seconds(0, MAX_WAIT_S)}  # for the job's end

router = Router()


@router.get("/v1/jobs")
async def list_jobs(request: Request, services: Services, tenant: str) -> Response:
    filters = read_query(request, LIST_QUERY)
    limit = filters.pop("limit", DEFAULT_LIMIT)

    def page(connection: Connection, now: float) -> list[dict[str, Any]]:
        records = store.list_jobs(connection, tenant=tenant, limit=limit + 1, **filters)
        return services.presenter.objects(records, connection, now)

    try:
        data = await services.sql.read(page)
    except store.UnknownCursor as error:
        raise BadRequest(str(error)[:200], param="after") from None
    return json_response(list_object(data, limit))


@router.get("/v1/jobs/{job_id}")
async def get_job(job_id: str, request: Request, services: Services, tenant: str) -> Response:
    wait = read_query(request, GET_QUERY).get("wait", 0)
    if wait == 0:
        return json_response(await read_job(services, tenant, job_id))
    loop = asyncio.get_running_loop()
    until = loop.time() + wait
    with services.waiters.register(job_id) as ended:  # before the look, or an end could slip by
        async with disconnected(request) as gone:
            gone.add_done_callback(lambda _: ended.set())
            while not gone.done():
                if loop.time() >= until or services.waiters.closing:
                    return json_response(await read_job(services, tenant, job_id))
                record = await look(services, tenant, job_id)
                if record.ended:
                    return json_response(await read_job(services, tenant, job_id))
                await services.waiters.sleep(ended, until - loop.time())
            raise ClientDisconnect


@router.post("/v1/jobs/{job_id}/cancel")
async def cancel_job(job_id: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    _check_id(job_id)

    def cancel(connection: Connection, now: float) -> dict[str, Any] | None:
        record = store.cancel(connection, job_id, tenant=tenant, now=now)
        if record is None:
            return None
        job = services.presenter.objects([record], connection, now)[0]
        return with_attempts(job, record, connection)

    job = await services.sql.write(cancel)
    if job is None:
        raise _unknown(job_id)
    services.hints.cancelled([job_id])
    return json_response(job)


async def read_job(services: Services, tenant: str, job_id: str) -> dict[str, Any]:
    """The job object. Raises NotFound."""

    def read(record: JobRecord, connection: Connection, now: float) -> dict[str, Any]:
        job = services.presenter.objects([record], connection, now)[0]
        return with_attempts(job, record, connection)

    return await _read(services, tenant, job_id, read)


async def look(services: Services, tenant: str, job_id: str) -> JobRecord:
    """The row alone: waiters look often, a forecast costs more than the row. Raises NotFound."""
    return await _read(services, tenant, job_id, lambda record, connection, now: record)


async def _read(
    services: Services,
    tenant: str,
    job_id: str,
    view: Callable[[JobRecord, Connection, float], R],
) -> R:
    _check_id(job_id)

    def read(connection: Connection, now: float) -> R | None:
        record = store.get(connection, job_id, tenant=tenant)
        return None if record is None else view(record, connection, now)

    seen = await services.sql.read(read)
    if seen is None:
        raise _unknown(job_id)
    return seen


def _check_id(job_id: str) -> None:
    """No other string can be a job's id, and some of them a database would refuse to compare."""
    if not JOB_ID.fullmatch(job_id):
        raise _unknown(job_id)


def _unknown(job_id: str) -> NotFound:
    return NotFound(f"no job with id {job_id[:100]!r}", param="id", code="job_not_found")
