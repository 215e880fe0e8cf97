"""GET /v1/jobs/{id}/events: a job's status as server-sent events, until its end.

`event: status` carries {"id", "status", "attempt"} whenever they are seen to differ from what was
sent before; the last event is `event: job` with the whole job object. The row is looked at every
LOOK_S seconds and at the end, so a state shorter than that may not be seen, and a cancelled or
restarted stream begins with the state of now: status events are a view of the row, not a log.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from api.errors import BadRequest, Unavailable
from api.present import is_ended
from api.routes.jobs import read_job
from api.services import Services, ServicesDep

LOOK_S = 0.5
KEEPALIVE_S = 15.0  # a comment, so that proxies don't take a quiet stream for a dead one

router = APIRouter()


@router.get("/v1/jobs/{job_id}/events")
async def job_events(job_id: str, request: Request, services: ServicesDep) -> Response:
    if request.query_params:
        name = next(iter(request.query_params))[:100]
        raise BadRequest(f"{name} is not a parameter of this path", param=name)
    services.waiters.check_room()
    job = await read_job(services, job_id)  # a 404 is a plain reply, not a stream
    headers = {"cache-control": "no-store"}
    return StreamingResponse(
        _stream(services, job_id, job), media_type="text/event-stream", headers=headers
    )


async def _stream(services: Services, job_id: str, job: dict[str, Any]) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    sent: dict[str, Any] = {}
    sent_at = loop.time()
    with services.waiters.register(job_id) as ended:
        while True:
            status = {name: job[name] for name in ("id", "status", "attempt")}
            if status != sent:
                yield _event("status", status)
                sent, sent_at = status, loop.time()
            elif loop.time() - sent_at > KEEPALIVE_S:
                yield b": still here\n\n"
                sent_at = loop.time()
            if is_ended(job):
                yield _event("job", job)
                return
            if services.waiters.closing:
                return  # the end of a stream without a `job` event: connect again
            await services.waiters.sleep(ended, LOOK_S)
            with contextlib.suppress(Unavailable):  # the stream outlives a restart of the database
                job = await read_job(services, job_id)


def _event(name: str, content: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))
