"""Files: /v1/files… Uploaded ones are for batches, which make the others."""

from collections.abc import AsyncIterator, Callable
from typing import Any, BinaryIO, TypeVar

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api.core import refuse_key
from api.errors import BadRequest, Conflict, NotFound, json_response
from api.present import list_object
from api.query import integer, one_of, read_query, text
from api.routing import Router
from api.services import Services
from api.upload import Upload
from jobs import files
from jobs.file_store import is_file_id
from jobs.files import FileRecord, file_object
from jobs.quotas import QuotaExceeded

R = TypeVar("R")

READ_BYTES = 256 << 10
MAX_LIMIT = 10_000
LIST_QUERY = {
    "purpose": one_of(files.PURPOSES),
    "limit": integer(1, MAX_LIMIT),
    "order": one_of(("asc", "desc")),
    "after": text,  # the id of the last file of the page before
}
TTL = integer(files.MIN_TTL_S, files.MAX_TTL_S)
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", _ANCHOR, _SECONDS)

router = Router()


@router.post("/v1/files")
async def upload(request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    refuse_key(request)
    declared = int(request.headers.get("content-length", "0"))
    await services.sql.read(
        lambda connection, _: files.check_room(connection, tenant, min(1, declared))
    )
    received = await services.uploads.receive(request)
    try:
        ttl_s = _ttl_s(received, services.settings.file_ttl_s)
        record = await _keep(services, tenant, received, ttl_s)
    finally:
        received.incoming.drop()
    return json_response(file_object(record))


@router.get("/v1/files")
async def list_files(request: Request, services: Services, tenant: str) -> Response:
    query = read_query(request, LIST_QUERY)
    limit, order = query.pop("limit", MAX_LIMIT), query.pop("order", "desc")

    def page(connection: Connection, now: float) -> list[FileRecord]:
        return files.list_files(
            connection, tenant=tenant, now=now, limit=limit + 1, ascending=order == "asc", **query
        )

    try:
        found = await services.sql.read(page)
    except files.UnknownFile as error:
        raise BadRequest(str(error), param="after") from None
    return json_response(list_object([file_object(record) for record in found], limit))


@router.get("/v1/files/{file_id}")
async def get(file_id: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    return json_response(file_object(await find(services, tenant, file_id)))


@router.get("/v1/files/{file_id}/content")
async def content(file_id: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    record = await find(services, tenant, file_id)
    try:
        opened: BinaryIO = await services.disk.run(services.files.open, record.id)
    except FileNotFoundError:  # deleted just now
        raise unknown(file_id) from None
    return StreamingResponse(
        _chunks(services, opened),
        media_type="application/octet-stream",
        headers={"content-length": str(record.bytes), "content-disposition": "attachment"},
    )


@router.delete("/v1/files/{file_id}")
async def delete(file_id: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    if not is_file_id(file_id):
        raise unknown(file_id)

    def remove(connection: Connection, now: float) -> None:
        files.remove(connection, file_id, tenant=tenant)

    try:
        await _known(services.sql.write, remove, file_id)
    except files.FileInUse as error:
        raise Conflict(str(error), param="id", code="file_in_use") from None
    await services.disk.run(services.files.remove, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def find(services: Services, tenant: str, file_id: str) -> FileRecord:
    """Raises NotFound."""
    if not is_file_id(file_id):
        raise unknown(file_id)

    def read(connection: Connection, now: float) -> FileRecord:
        return files.get(connection, file_id, tenant=tenant, now=now)

    record: FileRecord = await _known(services.sql.read, read, file_id)
    return record


def unknown(file_id: str) -> NotFound:
    return NotFound(f"no file with id {file_id[:100]!r}", param="id", code="file_not_found")


async def _keep(services: Services, tenant: str, received: Upload, ttl_s: float) -> FileRecord:
    """The bytes first, then the row: one without the other is a stray, swept later."""
    assert received.filename is not None
    file_id, filename = files.new_file_id(), received.filename
    await services.uploads.keep(received, file_id)

    def add(connection: Connection, now: float) -> FileRecord:
        record = FileRecord(
            id=file_id,
            tenant_id=tenant,
            filename=filename,
            purpose=files.BATCH,
            bytes=received.incoming.size,
            created_at=now,
            expires_at=now + ttl_s,
        )
        files.add(connection, record)
        return record

    return await write_row(services, file_id, add)


async def write_row(services: Services, file_id: str, write: Callable[[Connection, float], R]) -> R:
    """Write the row of a file whose bytes are kept. Raises QuotaExceeded, and they are gone."""
    try:
        return await services.sql.write(write)
    except QuotaExceeded:
        await services.disk.run(services.files.remove, file_id)
        raise


def _ttl_s(received: Upload, default: float) -> float:
    """Checks the fields beside the file; how long it is to be kept. Raises BadRequest."""
    fields = received.fields
    for name in fields:
        if name not in _FIELDS:
            raise BadRequest(
                f"{name} is not a field of /v1/files", param=name, code="unknown_field"
            )
    if "purpose" not in fields:
        raise BadRequest("purpose is required", param="purpose")
    if fields["purpose"] != files.BATCH:
        raise BadRequest(
            f"purpose must be batch, others are not supported; got {fields['purpose'][:80]!r}",
            param="purpose",
            code="unsupported_value",
        )
    if _ANCHOR not in fields and _SECONDS not in fields:
        return default
    if fields.get(_ANCHOR) != "created_at":
        raise BadRequest("expires_after.anchor must be created_at", param="expires_after.anchor")
    try:
        return float(TTL(fields.get(_SECONDS, "")))
    except ValueError as error:
        param = "expires_after.seconds"
        raise BadRequest(f"{param} {error}", param=param) from None


async def _chunks(services: Services, opened: BinaryIO) -> AsyncIterator[bytes]:
    with opened:
        while chunk := await services.disk.run(opened.read, READ_BYTES):
            yield chunk


async def _known(run: Callable[..., Any], statement: Callable[..., R], file_id: str) -> Any:
    try:
        return await run(statement)
    except files.UnknownFile:
        raise unknown(file_id) from None
