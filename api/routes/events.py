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
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api.errors import Unavailable
from api.present import job_object
from api.query import read_query
from api.routes.jobs import look
from api.routing import Router
from api.services import Services
from jobs.records import JobRecord

LOOK_S = 0.5
KEEPALIVE_S = 15.0  # a comment, so that proxies don't take a quiet stream for a dead one

router = Router()


@router.get("/v1/jobs/{job_id}/events")
async def job_events(job_id: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    services.waiters.check_room()
    record = await look(services, tenant, job_id)  # a 404 is a plain reply, not a stream
    headers = {"cache-control": "no-store"}
    return StreamingResponse(
        _stream(services, record), media_type="text/event-stream", headers=headers
    )


async def _stream(services: Services, record: JobRecord) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    sent: dict[str, Any] = {}
    sent_at = loop.time()
    with services.waiters.register(record.id) as ended:
        while True:
            status = {"id": record.id, "status": str(record.state), "attempt": record.attempt}
            if status != sent:
                yield _event("status", status)
                sent, sent_at = status, loop.time()
            elif loop.time() - sent_at > KEEPALIVE_S:
                yield b": still here\n\n"
                sent_at = loop.time()
            if record.ended:
                yield _event("job", job_object(record))
                return
            if services.waiters.closing:
                return  # the end of a stream without a `job` event: connect again
            await services.waiters.sleep(ended, LOOK_S)
            with contextlib.suppress(Unavailable):  # the stream outlives a restart of the database
                record = await look(services, record.tenant_id, record.id)


def _event(name: str, content: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))
