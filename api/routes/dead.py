"""Jobs that have failed, all tenants', and queueing them again: /admin/v1/dead_jobs."""

import asyncio
from dataclasses import asdict
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from api.errors import json_response
from api.fields import read_object
from api.query import integer, one_of, read_query, text
from api.routing import Router
from api.services import Services
from jobs import dead
from jobs.dead import Which
from jobs.lifecycle import ErrorCode

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
LIST_QUERY = {
    "model": text,
    "tenant": text,
    "error": one_of(ErrorCode),
    "limit": integer(1, MAX_LIMIT),
}

router = Router()


class Requeue(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    ids: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[!-~]*$")]],
        Field(min_length=1, max_length=dead.ROUND),
    ]


@router.get("/admin/v1/dead_jobs")
async def list_dead_jobs(request: Request, services: Services) -> Response:
    filters = read_query(request, LIST_QUERY)
    limit = filters.pop("limit", DEFAULT_LIMIT)
    found = await services.sql.read(
        lambda connection, now: dead.list_dead(connection, Which(**filters), limit=limit)
    )
    data = [{"object": "dead_job", **asdict(record)} for record in found]
    return json_response({"object": "list", "data": data})


@router.post("/admin/v1/dead_jobs/requeue")
async def requeue_dead_jobs(request: Request, services: Services) -> Response:
    read_query(request, {})
    async with services.bodies.json_body(request) as raw:
        wanted = await asyncio.to_thread(read_object, raw, Requeue)
    answers = await services.sql.write(
        lambda connection, now: dead.requeue(connection, wanted.ids, now=now)
    )
    data = [
        {"id": job_id, "requeued": answers[job_id] is None, "reason": answers[job_id]}
        for job_id in dict.fromkeys(wanted.ids)
    ]
    return json_response({"object": "list", "data": data})
