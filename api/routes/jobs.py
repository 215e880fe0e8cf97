"""Reading and cancelling jobs: GET /v1/jobs, GET /v1/jobs/{id}, POST /v1/jobs/{id}/cancel."""

import asyncio
import re
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy import Connection
from starlette.responses import Response

from api.errors import BadRequest, NotFound, json_response
from api.present import is_ended
from api.services import Services, ServicesDep
from jobs import store
from jobs.lifecycle import JobState

MAX_WAIT_S = 60
JOB_ID = re.compile(r"job_[0-9A-Za-z_-]{1,100}")

router = APIRouter()


def _without_nul(text: str) -> str:
    # the databases disagree about NUL, so it never reaches one
    if "\x00" in text:
        raise ValueError("NUL is not allowed")
    return text


Text = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_without_nul)]


class ListQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    status: JobState | None = None
    model: Text | None = None
    batch_id: Text | None = None
    custom_id: Text | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 20
    after: Text | None = None  # the id of the last job of the page before


class GetQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    # seconds to wait for the job's end
    wait: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0


@router.get("/v1/jobs")
async def list_jobs(query: Annotated[ListQuery, Query()], services: ServicesDep) -> Response:
    def page(connection: Connection, now: float) -> tuple[list[dict[str, Any]], bool]:
        records = store.list_jobs(
            connection,
            status=query.status,
            model=query.model,
            batch_id=query.batch_id,
            custom_id=query.custom_id,
            limit=query.limit + 1,
            after=query.after,
        )
        objects = services.presenter.objects(records[: query.limit], connection, now)
        return objects, len(records) > query.limit

    try:
        data, has_more = await services.sql.read(page)
    except store.UnknownCursor as error:
        raise BadRequest(str(error)[:200], param="after") from None
    return json_response(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": has_more,
        }
    )


@router.get("/v1/jobs/{job_id}")
async def get_job(
    job_id: str, query: Annotated[GetQuery, Query()], services: ServicesDep
) -> Response:
    if query.wait == 0:
        return json_response(await read_job(services, job_id))
    loop = asyncio.get_running_loop()
    until = loop.time() + query.wait
    with services.waiters.register(job_id) as ended:  # before the read, or an end could slip by
        while True:
            job = await read_job(services, job_id)
            left = until - loop.time()
            if is_ended(job) or left <= 0 or services.waiters.closing:
                return json_response(job)
            await services.waiters.sleep(ended, left)


@router.post("/v1/jobs/{job_id}/cancel")
async def cancel_job(job_id: str, services: ServicesDep) -> Response:
    _check_id(job_id)

    def cancel(connection: Connection, now: float) -> dict[str, Any] | None:
        record = store.cancel(connection, job_id, now=now)
        if record is None:
            return None
        return services.presenter.objects([record], connection, now)[0]

    job = await services.sql.write(cancel)
    if job is None:
        raise _unknown(job_id)
    services.hints.cancelled([job_id])
    return json_response(job)


async def read_job(services: Services, job_id: str) -> dict[str, Any]:
    """The job object. Raises NotFound."""
    _check_id(job_id)

    def read(connection: Connection, now: float) -> dict[str, Any] | None:
        record = store.get(connection, job_id)
        if record is None:
            return None
        return services.presenter.objects([record], connection, now)[0]

    job = await services.sql.read(read)
    if job is None:
        raise _unknown(job_id)
    return job


def _check_id(job_id: str) -> None:
    """No other string can be a job's id, and some of them a database would refuse to compare."""
    if not JOB_ID.fullmatch(job_id):
        raise _unknown(job_id)


def _unknown(job_id: str) -> NotFound:
    return NotFound(f"no job with id {job_id[:100]!r}", param="id", code="job_not_found")
