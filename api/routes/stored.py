"""/v1/chat/completions/…: chats whose bodies said `store`, found again and labelled."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from api.core import JOB_ID, find
from api.envelope import Metadata
from api.errors import BadRequest, NotFound, json_response
from api.fields import read_object
from api.present import list_object
from api.query import integer, labels, one_of, read_query, text
from api.routing import Router
from api.services import Services
from jobs import openai, store, stored
from jobs.records import JobRecord

PREFIX = openai.reply_id(openai.CHAT, "")
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
PAGE_QUERY = {
    "limit": integer(1, MAX_LIMIT),
    "order": one_of(("asc", "desc")),
    "after": text,  # the id of the last of the page before
}
LIST_QUERY = {"model": text, "metadata": labels, **PAGE_QUERY}

router = Router()


class Labels(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    metadata: Metadata | None


@router.get(openai.CHAT)
async def list_completions(request: Request, services: Services, tenant: str) -> Response:
    query = read_query(request, LIST_QUERY)
    limit, ascending = query.pop("limit", DEFAULT_LIMIT), query.pop("order", "asc") == "asc"
    if (after := query.pop("after", None)) is not None:
        query["after"] = _job_id(after) or after

    def page(connection: Connection, now: float) -> list[JobRecord]:
        return stored.list_stored(
            connection, tenant=tenant, limit=limit + 1, ascending=ascending, **query
        )

    try:
        found = await services.sql.read(page)
    except store.UnknownCursor:
        raise BadRequest(f"no completion {after!r} to list after", param="after") from None
    return json_response(list_object([_object(record) for record in found], limit))


@router.get(openai.CHAT + "/{completion_id}")
async def get_completion(
    completion_id: str, request: Request, services: Services, tenant: str
) -> Response:
    read_query(request, {})
    return json_response(_object(await _find(services, tenant, completion_id)))


@router.post(openai.CHAT + "/{completion_id}")
async def update_completion(
    completion_id: str, request: Request, services: Services, tenant: str
) -> Response:
    read_query(request, {})
    async with services.bodies.json_body(request) as raw:
        labels = await services.cpu.run(read_object, raw, Labels)
    record = await _find(services, tenant, completion_id)
    changed = await services.sql.write(
        lambda connection, now: stored.set_metadata(
            connection, record.id, labels.metadata or {}, tenant=tenant
        )
    )
    if changed is None:
        raise _unknown(completion_id)
    return json_response(_object(changed))


@router.delete(openai.CHAT + "/{completion_id}")
async def delete_completion(
    completion_id: str, request: Request, services: Services, tenant: str
) -> Response:
    read_query(request, {})
    record = await _find(services, tenant, completion_id)
    await services.sql.write(
        lambda connection, now: store.delete(connection, record.id, tenant=tenant)
    )
    deleted = {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}
    return json_response(deleted)


@router.get(openai.CHAT + "/{completion_id}/messages")
async def list_messages(
    completion_id: str, request: Request, services: Services, tenant: str
) -> Response:
    """What the chat was asked."""
    query = read_query(request, PAGE_QUERY)
    record = await _find(services, tenant, completion_id)
    assert record.body is not None
    messages = [
        _message(f"{completion_id}-{number}", message)
        for number, message in enumerate(record.body["messages"])
    ]
    if query.get("order") == "desc":
        messages.reverse()
    if "after" in query:
        ids = [message["id"] for message in messages]
        if query["after"] not in ids:
            raise BadRequest(f"no message {query['after']!r} to list after", param="after")
        messages = messages[ids.index(query["after"]) + 1 :]
    return json_response(list_object(messages, query.get("limit", DEFAULT_LIMIT)))


def _object(record: JobRecord) -> dict[str, Any]:
    assert record.output is not None
    return record.output | {"metadata": record.metadata}


def _message(message_id: str, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    said = {"content": None if parts else content, "content_parts": parts}
    return {"id": message_id, **message, **said}


async def _find(services: Services, tenant: str, completion_id: str) -> JobRecord:
    """Raises NotFound."""
    job_id = _job_id(completion_id)
    record = None if job_id is None else await find(services, tenant, job_id)
    if record is None or not stored.is_stored(record):
        raise _unknown(completion_id)
    return record


def _job_id(completion_id: str) -> str | None:
    job_id = "job_" + completion_id.removeprefix(PREFIX)
    is_one = completion_id.startswith(PREFIX) and JOB_ID.fullmatch(job_id)
    return job_id if is_one else None


def _unknown(completion_id: str) -> NotFound:
    message = f"no stored completion with id {completion_id[:100]!r}"
    return NotFound(message, param="completion_id", code="completion_not_found")
