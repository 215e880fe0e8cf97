"""POST /v1/chat/completions and /v1/completions: jobs that somebody waits for, or streams.

A chat is one job. So is a text; a list of prompts is a job for each, accepted together, and the
reply has all of their choices.
"""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api import core, sse
from api.calls import Call, call_of, read_body
from api.door import Door
from api.errors import ApiError, BadRequest, Unavailable, json_response
from api.query import read_query
from api.routing import Router
from api.services import Services
from jobs import openai, openai_prompts
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
        calls = await services.intake(
            raw, partial(_read, url, raw, services.door, services.settings)
        )
    call, new_jobs = calls[0], [each.new_job for each in calls]
    # who gave a key may come back with it for the same job
    keep = call.body.get("store") is True or key is not None
    submitted = await core.accept(
        services, new_jobs, tenant=tenant, key=key, body_sha256=call.body_sha256, keep=keep
    )
    records = submitted.records
    headers = {"idempotent-replayed": "true"} if submitted.replayed else {}
    if call.streams:
        return sse.response(_stream(services, records, call, keep=keep), headers)
    ended = await core.results(services, request, records, keep=keep)
    outputs = [record.output for record in ended if record.output is not None]
    return json_response(openai_prompts.joined(outputs), headers=headers)


def _read(url: str, raw: bytes, door: Door, settings: Settings) -> list[Call]:
    body, body_sha256 = read_body(raw, settings)
    stream = StreamMode.LIVE if body.get("stream") is True else None
    make = partial(
        call_of, url, body_sha256=body_sha256, door=door, settings=settings,
        stream=stream, waits=body.get("store") is not True,
    )  # fmt: skip
    prompts = openai_prompts.several(body) if url == openai.COMPLETIONS else None
    if prompts is None:
        return [make(body=body)]
    if len(prompts) > settings.max_jobs_per_call:
        raise BadRequest(
            f"prompt must have at most {settings.max_jobs_per_call} prompts, got {len(prompts)}",
            param="prompt",
        )
    calls = []
    for i, prompt in enumerate(prompts):
        try:
            calls.append(make(body=body | {"prompt": prompt}))
        except BadRequest as error:
            if error.param == "prompt":
                error.message, error.param = f"prompt[{i}]: {error.message}", f"prompt[{i}]"
            raise
    return calls


async def _stream(
    services: Services, records: Sequence[JobRecord], call: Call, *, keep: bool
) -> AsyncIterator[bytes]:
    latest, num_samples = list(records), call.body.get("n") or 1
    chunks = _chunks(records[0], call)
    try:
        yield _frames(chunks.begin(num_samples))
        async for place, news in core.follow_all(services, records):
            record = latest[place] = news.record
            first = place * num_samples
            said = [chunk for run in news.runs for chunk in chunks.of(run, first)]
            if record.ended and record.output is None:
                yield _frames(said) + sse.error(core.failure(record))
                return
            if record.output is not None:
                said += chunks.end(record.output, first)
            yield _frames(said) or sse.STILL_HERE
        outputs = [record.output for record in latest if record.output is not None]
        if len(outputs) == len(latest):
            yield _frames(chunks.usage(openai_prompts.joined(outputs))) + sse.DONE
        else:
            yield sse.error(Unavailable("the service is shutting down", code="shutting_down"))
    except ApiError as error:
        yield sse.error(error)
    finally:
        if not keep:
            core.let_go(services, [record for record in latest if not record.ended])


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
