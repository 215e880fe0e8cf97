"""OpenAI's responses: a job that somebody waits for, streams, or comes back to."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from api import core, sse
from api.calls import NAMESPACE, Call, call_of, read_body
from api.door import Door
from api.errors import ApiError, BadRequest, NotFound, Unavailable, json_response
from api.present import STANDING, job_object, list_object
from api.query import any_text, boolean, integer, one_of, read_query, text
from api.routing import Router
from api.services import Services
from jobs import openai, store
from jobs import openai_response_object as objects
from jobs.lifecycle import JobState
from jobs.openai_fields import BodyError
from jobs.openai_response_events import ResponseEvents
from jobs.records import JobRecord
from jobs.settings import Settings
from jobs.streams import StreamMode

MAX_SEQUENCE_NUMBER = 2**31
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
GET_QUERY = {
    "stream": boolean,
    "starting_after": integer(0, MAX_SEQUENCE_NUMBER),
    "include_obfuscation": boolean,
    # what can be included is in the response, if it was asked for when it was made
    "include": any_text,
    "include[]": any_text,
}
ITEMS_QUERY = {
    "limit": integer(1, MAX_LIMIT),
    "order": one_of(("asc", "desc")),
    "after": text,
    "include": any_text,
    "include[]": any_text,
}

router = Router()


@router.post(openai.RESPONSES)
async def create_response(request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    key = core.idempotency_key(request)
    services.waiters.check_room()
    async with services.bodies.json_body(request) as raw:
        body, body_sha256 = await services.cpu.run(read_body, raw, services.settings)
        before = await _previous(services, tenant, body)
        call = await services.cpu.run(
            _read, body, body_sha256, before, services.door, services.settings
        )
    keep = _stored(call.body) or key is not None
    submitted = await core.accept(
        services, [call.new_job], tenant=tenant, key=key, body_sha256=call.body_sha256, keep=keep
    )
    record = submitted.records[0]
    headers = {"idempotent-replayed": "true"} if submitted.replayed else {}
    if call.streams:
        return sse.response(_stream(services, record, keep=keep), headers)
    if call.body.get("background") is not True:
        [record] = await core.results(services, request, [record], keep=keep)
    return json_response(await _shown(services, record), headers=headers)


@router.get(openai.RESPONSES + "/{response_id}")
async def get_response(
    response_id: str, request: Request, services: Services, tenant: str
) -> Response:
    query = read_query(request, GET_QUERY)
    after = query.get("starting_after")
    if not query.get("stream", False):
        if after is not None:
            raise BadRequest("starting_after needs stream=true", param="starting_after")
        return json_response(await _shown(services, await _find(services, tenant, response_id)))
    services.waiters.check_room()
    record = await _find(services, tenant, response_id)
    first = 0 if after is None else after + 1
    return sse.response(_stream(services, record, keep=True, first=first), {})


@router.delete(openai.RESPONSES + "/{response_id}")
async def delete_response(
    response_id: str, request: Request, services: Services, tenant: str
) -> Response:
    read_query(request, {})
    record = await _find(services, tenant, response_id)

    def delete(connection: Connection, now: float) -> None:
        store.delete(connection, record.id, tenant=tenant)

    await services.sql.write(delete)
    services.hints.cancelled([record.id])
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post(openai.RESPONSES + "/{response_id}/cancel")
async def cancel_response(
    response_id: str, request: Request, services: Services, tenant: str
) -> Response:
    read_query(request, {})
    record = await _find(services, tenant, response_id)
    if not _body(record).get("background"):
        raise BadRequest(
            "only a response with background true can be cancelled; drop the connection of others",
            param="response_id",
        )
    cancelled = await core.cancel(services, tenant, record.id)
    if cancelled is None:
        raise _unknown(response_id)
    return json_response(objects.of_record(cancelled))


@router.get(openai.RESPONSES + "/{response_id}/input_items")
async def list_input_items(
    response_id: str, request: Request, services: Services, tenant: str
) -> Response:
    query = read_query(request, ITEMS_QUERY)
    items = objects.input_items(await _find(services, tenant, response_id))
    if query.get("order", "desc") == "desc":
        items.reverse()
    if "after" in query:
        ids = [item["id"] for item in items]
        if query["after"] not in ids:
            raise BadRequest(f"no item {query['after']!r} to list after", param="after")
        items = items[ids.index(query["after"]) + 1 :]
    limit = query.get("limit", DEFAULT_LIMIT)
    return json_response(list_object(items, limit))


@router.post(openai.RESPONSES + "/input_tokens")
async def count_input_tokens(request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    async with services.bodies.json_body(request) as raw:
        body, body_sha256 = await services.cpu.run(read_body, raw, services.settings)
        before = await _previous(services, tenant, body)
        call = await services.cpu.run(
            _read, body, body_sha256, before, services.door, services.settings
        )
    counted = {"object": "response.input_tokens", "input_tokens": call.new_job.prompt_tokens}
    return json_response(counted)


async def _shown(services: Services, record: JobRecord) -> dict[str, Any]:
    """The response, and until its end where its job stands and when it may end."""
    response = objects.of_record(record)
    if record.ended:
        return response
    try:
        [job] = await services.sql.read(partial(services.presenter.objects, [record]))
    except Unavailable:  # the row was there just now: that is what was asked for
        job = job_object(record)
    return response | {NAMESPACE: {"job_id": record.id} | {name: job[name] for name in STANDING}}


def _read(
    body: dict[str, Any],
    body_sha256: bytes,
    before: JobRecord | None,
    door: Door,
    settings: Settings,
) -> Call:
    if before is not None:
        try:
            body = body | {"input": objects.following_input(before, body.get("input"))}
        except BodyError as error:
            raise BadRequest(str(error), param=error.param, code=error.code) from None
    stream = None
    if body.get("stream") is True:
        stream = StreamMode.KEPT if _stored(body) else StreamMode.LIVE
    waits = body.get("background") is not True and not _stored(body)
    return call_of(
        openai.RESPONSES, body, body_sha256, door, settings,
        stream=stream, waits=waits, resolved=True,
    )  # fmt: skip


async def _previous(services: Services, tenant: str, body: dict[str, Any]) -> JobRecord | None:
    """The response that a body goes on from."""
    name, earlier = "previous_response_id", body.get("previous_response_id")
    if earlier is None:
        return None
    if not isinstance(earlier, str):
        raise BadRequest(f"{name} must be a string", param=name)
    try:
        record = await _find(services, tenant, earlier)
    except NotFound as error:
        raise BadRequest(error.message, param=name, code="previous_response_not_found") from None
    if record.output is None:
        message = f"{name} names a response without output, whose state is {record.state}"
        raise BadRequest(message, param=name)
    return record


async def _stream(
    services: Services, record: JobRecord, *, keep: bool, first: int = 0
) -> AsyncIterator[bytes]:
    """Events from the number `first` on."""
    events = ResponseEvents(record)

    def frames(made: list[dict[str, Any]]) -> bytes:
        return b"".join(
            sse.event(each["type"], each) for each in made if each["sequence_number"] >= first
        )

    try:
        yield frames([*events.begin()])
        async for news in core.follow(services, record):
            record = news.record
            made = [event for run in news.runs for event in events.of(run)]
            if record.state == JobState.RUNNING or record.ended:
                made += events.started()
            if record.ended:
                if record.state != JobState.SUCCEEDED:
                    events.skip_to(first)
                yield frames([*made, *events.end(record)])
                return
            yield frames(made) or sse.STILL_HERE
        yield _error(events, Unavailable("the service is shutting down", code="shutting_down"))
    except NotFound:
        events.skip_to(first)
        yield frames([*events.end_of_deleted()])
    except ApiError as error:
        yield _error(events, error)
    finally:
        if not keep and not record.ended:
            core.let_go(services, [record])


def _error(events: ResponseEvents, error: ApiError) -> bytes:
    """Not the response's end: ask for the rest of it again."""
    content = {"code": error.code, "message": error.message, "param": error.param}
    number = events.next_number
    return sse.event("error", {"type": "error", **content, "sequence_number": number})


async def _find(services: Services, tenant: str, response_id: str) -> JobRecord:
    """Raises NotFound, also for one that is not stored."""
    job_id = "job_" + response_id.removeprefix(objects.PREFIX)
    if not response_id.startswith(objects.PREFIX) or not core.JOB_ID.fullmatch(job_id):
        raise _unknown(response_id)
    record = await core.find(services, tenant, job_id)
    if record is None or record.url != openai.RESPONSES or not _stored(_body(record)):
        raise _unknown(response_id)
    return record


def _body(record: JobRecord) -> dict[str, Any]:
    assert record.body is not None
    return record.body


def _stored(body: Any) -> bool:
    return body.get("store") is not False


def _unknown(response_id: str) -> NotFound:
    message = f"no response with id {response_id[:100]!r}"
    return NotFound(message, param="response_id", code="response_not_found")
