"""Batches: POST /v1/batches and what follows. A file's rows are jobs; here they are only begun,
shown and cancelled."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from api.core import idempotency_key, key_conflict
from api.envelope import Metadata
from api.errors import BadRequest, NotFound, json_response
from api.fields import checked
from api.intake import digest, parse_json
from api.present import list_object
from api.query import integer, read_query, text
from api.routing import Router
from api.services import Services
from jobs import batches, files, openai, store
from jobs.batch_record import BatchRecord, BatchState
from jobs.batch_shapes import batch_object
from jobs.records import MAX_DEADLINE_S, MAX_PRIORITY, MIN_PRIORITY
from jobs.settings import MAX_ROWS_TTL_S, MIN_ROWS_TTL_S

R = TypeVar("R")

DEFAULT_LIMIT = 20
LIST_QUERY = {
    "limit": integer(1, batches.MAX_LISTED),
    "after": text,  # the id of the last batch of the page before
}
assert set(openai.URLS) == {"/v1/chat/completions", "/v1/completions", "/v1/responses"}

router = Router()


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ExpiresAfter(Fields):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=files.MIN_TTL_S, le=files.MAX_TTL_S)]


class NewBatch(Fields):
    """As OpenAI's call has it; from `priority` on fields are ours."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=256)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = batches.PRIORITY
    deadline_s: Annotated[int, Field(ge=1, le=MAX_DEADLINE_S)] | None = None
    token_budget: Annotated[int, Field(ge=1, le=2**53)] | None = None
    max_error_rate: Annotated[float, Field(ge=0, lt=1)] | None = None
    dedupe: bool = False
    rows_ttl_s: Annotated[int, Field(ge=MIN_ROWS_TTL_S, le=MAX_ROWS_TTL_S)] | None = None


@router.post("/v1/batches")
async def create(request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    key = idempotency_key(request)
    async with services.bodies.json_body(request) as raw:
        new, sha256 = await services.cpu.run(_read, raw)
    batch_id = batches.new_batch_id()

    def write(connection: Connection, now: float) -> tuple[BatchRecord, bool]:
        if key is not None:
            earlier = store.take_key(
                connection, key, sha256, [batch_id],
                tenant=tenant, now=now, ttl_s=services.settings.idempotency_ttl_s,
            )  # fmt: skip
            if earlier is not None:
                return batches.get(connection, earlier[0], tenant=tenant, now=now), True
        file = files.get(connection, new.input_file_id, tenant=tenant, now=now)
        if file.purpose != files.BATCH:
            raise BadRequest("the file's purpose must be batch", param="input_file_id")
        record = _record(new, batch_id, tenant, now, services.settings.batch_rows_ttl_s)
        batches.create(connection, record)
        return record, False

    try:
        record, replayed = await services.sql.write(write)
    except files.UnknownFile as error:
        raise BadRequest(str(error), param="input_file_id", code="file_not_found") from None
    except store.IdempotencyConflict:
        raise key_conflict() from None
    headers = {"idempotent-replayed": "true"} if replayed else {}
    return json_response(batch_object(record), headers=headers)


@router.get("/v1/batches")
async def list_batches(request: Request, services: Services, tenant: str) -> Response:
    query = read_query(request, LIST_QUERY)
    limit = query.pop("limit", DEFAULT_LIMIT)

    def page(connection: Connection, now: float) -> list[BatchRecord]:
        return batches.list_batches(connection, tenant=tenant, limit=limit + 1, now=now, **query)

    try:
        found = await services.sql.read(page)
    except batches.UnknownBatch as error:
        raise BadRequest(str(error), param="after") from None
    return json_response(list_object([batch_object(record) for record in found], limit))


@router.get("/v1/batches/{batch_id}")
async def get(batch_id: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    record = await known(
        services.sql.read,
        batch_id,
        lambda connection, now: batches.get(connection, batch_id, tenant=tenant, now=now),
    )
    return json_response(batch_object(record))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel(batch_id: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    record = await known(
        services.sql.write,
        batch_id,
        lambda connection, now: batches.cancel(connection, batch_id, tenant=tenant, now=now),
    )
    return json_response(batch_object(record))


def _read(raw: bytes) -> tuple[NewBatch, bytes]:
    value = parse_json(raw)
    return checked(value, NewBatch, noun="a batch"), digest(value)


def _record(
    new: NewBatch, batch_id: str, tenant: str, now: float, rows_ttl_s: int | None
) -> BatchRecord:
    after = new.output_expires_after
    return BatchRecord(
        id=batch_id,
        tenant_id=tenant,
        endpoint=new.endpoint,
        input_file_id=new.input_file_id,
        metadata=None if new.metadata is None else dict(new.metadata),
        priority=new.priority,
        output_ttl_s=None if after is None else after.seconds,
        state=BatchState.VALIDATING,
        created_at=now,
        expires_at=now + (new.deadline_s or batches.WINDOW_S),
        token_budget=new.token_budget,
        max_error_rate=new.max_error_rate,
        dedupe=new.dedupe,
        rows_ttl_s=new.rows_ttl_s or rows_ttl_s,
    )


async def known(
    run: Callable[..., Any], batch_id: str, statement: Callable[[Connection, float], R]
) -> Any:
    """What the statement gives. Raises NotFound."""
    if not (batch_id.isascii() and batch_id.isprintable()):
        raise _unknown(batch_id)
    try:
        return await run(statement)
    except batches.UnknownBatch:
        raise _unknown(batch_id) from None


def _unknown(batch_id: str) -> NotFound:
    message = f"no batch with id {batch_id[:100]!r}"
    return NotFound(message, param="id", code="batch_not_found")
