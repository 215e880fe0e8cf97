"""POST /v1/chat/completions and /v1/completions: a job that somebody waits for, or streams."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api import core, sse
from api.calls import Call, call_of, read_body
from api.door import Door
from api.errors import ApiError, Unavailable, json_response
from api.query import read_query
from api.routing import Router
from api.services import Services
from jobs import openai
from jobs.openai_streaming import Chunks
from jobs.records import JobRecord
from jobs.settings import Settings
from jobs.streams import StreamMode

router = Router()


@router.post(openai.CHAT)
async def chat_completion(request: Request, services: Services, tenant: str) -> Response:
    return await _complete(openai.CHAT, request, services, tenant)


@router.post(openai.COMPLETIONS)
async def completion(request: Request, services: Services, tenant: str) -> Response:
    return await _complete(openai.COMPLETIONS, request, services, tenant)


async def _complete(url: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    key = core.idempotency_key(request)
    services.waiters.check_room()
    async with services.bodies.json_body(request) as raw:
        call = await services.intake(
            raw, partial(_read, url, raw, services.door, services.settings)
        )
    # who gave a key may come back with it for the same job
    keep = call.body.get("store") is True or key is not None
    submitted = await core.accept(
        services, [call.new_job], tenant=tenant, key=key, body_sha256=call.body_sha256, keep=keep
    )
    record = submitted.records[0]
    headers = {"idempotent-replayed": "true"} if submitted.replayed else {}
    if call.streams:
        return sse.response(_stream(services, record, call, keep=keep), headers)
    record = await core.result(services, request, record, keep=keep)
    if record.output is None:
        raise core.failure(record)
    return json_response(record.output, headers=headers)


def _read(url: str, raw: bytes, door: Door, settings: Settings) -> Call:
    body, body_sha256 = read_body(raw, settings)
    stream = StreamMode.LIVE if body.get("stream") is True else None
    return call_of(
        url, body, body_sha256, door, settings,
        stream=stream, waits=body.get("store") is not True,
    )  # fmt: skip


async def _stream(
    services: Services, record: JobRecord, call: Call, *, keep: bool
) -> AsyncIterator[bytes]:
    chunks = _chunks(record, call)
    try:
        yield _frames(chunks.begin(call.body.get("n") or 1))
        async for news in core.follow(services, record):
            record = news.record
            said = [chunk for run in news.runs for chunk in chunks.of(run)]
            if record.ended and record.output is not None:
                yield _frames([*said, *chunks.end(record.output)]) + sse.DONE
                return
            if record.ended:
                yield _frames(said) + sse.error(core.failure(record))
                return
            yield _frames(said) or sse.STILL_HERE
        yield sse.error(Unavailable("the service is shutting down", code="shutting_down"))
    except ApiError as error:
        yield sse.error(error)
    finally:
        if not keep and not record.ended:
            core.let_go(services, record)


def _chunks(record: JobRecord, call: Call) -> Chunks:
    options: dict[str, Any] = call.body.get("stream_options") or {}
    return Chunks(
        chat=record.url == openai.CHAT,
        reply_id=openai.reply_id(record.url, record.id),
        job_id=record.id,
        model=record.model,
        created=record.created_at,
        usage=options.get("include_usage") is True,
    )


def _frames(chunks: Any) -> bytes:
    return b"".join(map(sse.data, chunks))
