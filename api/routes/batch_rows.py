"""What stands under a batch beside OpenAI's calls: its rows before the end, pause, retry."""

from functools import partial
from typing import Any

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from api.core import refuse_key
from api.errors import BadRequest, Conflict, NotFound, json_response
from api.query import boolean, integer, read_query
from api.routes.batches import known
from api.routes.files import write_row
from api.routing import Router
from api.services import Services
from jobs import batches, files, retention
from jobs.batch_record import BatchRecord, BatchState
from jobs.batch_shapes import batch_object, encoded, is_worth_another_try, line, request_line
from jobs.file_store import Incoming
from jobs.files import FileRecord
from jobs.records import JobRecord

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
MAX_REPLY_BYTES = 8 << 20
ROWS = 200  # read at once
RESULTS_QUERY = {
    "after": integer(0, 10**9),
    "limit": integer(1, MAX_LIMIT),
    "skip_unfinished": boolean,
}

router = Router()


@router.get("/v1/batches/{batch_id}/results")
async def results(batch_id: str, request: Request, services: Services, tenant: str) -> Response:
    query = read_query(request, RESULTS_QUERY)
    after, limit = query.get("after", -1), query.get("limit", DEFAULT_LIMIT)

    def read(connection: Connection, now: float) -> dict[str, Any]:
        batch = batches.get(connection, batch_id, tenant=tenant, now=now)
        _need_rows(batch, now)
        skips = query.get("skip_unfinished", False)
        records = batches.rows_after(
            connection, batch_id, tenant=tenant, after=after, limit=limit, ended=skips
        )
        return _page(batch, records, after, skips)

    return json_response(await known(services.sql.read, batch_id, read))


def _need_rows(batch: BatchRecord, now: float) -> None:
    """Raises NotFound where they have been deleted, or are being deleted."""
    if retention.are_over(batch, now):
        raise NotFound(
            "the batch's rows are not kept any more: its rows_ttl_s is over", code="rows_removed"
        )


def _page(batch: BatchRecord, records: list[JobRecord], after: int, skips: bool) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    num_bytes, last_row = 0, after
    for record in records:
        # rows become jobs in the order they run in: one before may not be there yet
        if not record.ended or (record.row_number != last_row + 1 and not skips):
            break
        num_bytes += len(encoded(record))
        if data and num_bytes > MAX_REPLY_BYTES:
            break
        assert record.row_number is not None
        last_row = record.row_number
        told = {
            "row": last_row, "attempt": record.attempt, "timings": record.timings,
            "saved_tokens": record.saved_tokens,
        }  # fmt: skip
        data.append(told | line(record))
    return {
        "object": "list",
        "data": data,
        "last_row": last_row if last_row >= 0 else None,
        "has_more": batch.closed_at is None or last_row + 1 < batch.num_rows,
    }


@router.post("/v1/batches/{batch_id}/pause")
async def pause(batch_id: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})

    def write(connection: Connection, now: float) -> BatchRecord:
        return batches.pause(connection, batch_id, tenant=tenant, now=now)

    return json_response(batch_object(await known(services.sql.write, batch_id, write)))


@router.post("/v1/batches/{batch_id}/resume")
async def resume(batch_id: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})

    def write(connection: Connection, now: float) -> BatchRecord:
        return batches.resume(connection, batch_id, tenant=tenant, now=now)

    record = await known(services.sql.write, batch_id, write)
    services.hints.submitted()
    return json_response(batch_object(record))


@router.post("/v1/batches/{batch_id}/retry_failed")
async def retry_failed(
    batch_id: str, request: Request, services: Services, tenant: str
) -> Response:
    """The rows to be tried again become a file of their own, and that a batch like any other."""
    read_query(request, {})
    refuse_key(request)

    def read(connection: Connection, now: float) -> BatchRecord:
        batch = batches.get(connection, batch_id, tenant=tenant, now=now)
        _need_rows(batch, now)
        return batch

    batch: BatchRecord = await known(services.sql.read, batch_id, read)
    if batch.closed_at is None:
        raise Conflict("the batch has not ended: its rows may yet succeed", code="batch_not_ended")
    incoming = await services.disk.run(services.files.incoming)
    try:
        if not await _write_rows(services, batch, incoming):
            raise BadRequest("no row of the batch is worth another try", code="nothing_to_retry")
        record = await _begin(services, batch, incoming)
    finally:
        incoming.drop()
    return json_response(batch_object(record))


async def _write_rows(services: Services, batch: BatchRecord, incoming: Incoming) -> bool:
    after = -1
    while True:
        records = await services.sql.read(partial(_rows, batch, after))
        if not records:
            return incoming.size > 0
        again = b"".join(request_line(each) for each in records if is_worth_another_try(each))
        await services.disk.run(incoming.write, again)
        after = records[-1].row_number or 0


def _rows(batch: BatchRecord, after: int, connection: Connection, now: float) -> list[JobRecord]:
    return batches.rows_after(
        connection, batch.id, tenant=batch.tenant_id, after=after, limit=ROWS, bodies=True
    )


async def _begin(services: Services, batch: BatchRecord, incoming: Incoming) -> BatchRecord:
    file_id = files.new_file_id()
    await services.disk.run(incoming.keep, file_id)

    def write(connection: Connection, now: float) -> BatchRecord:
        file = FileRecord(
            id=file_id,
            tenant_id=batch.tenant_id,
            filename=f"{batch.id}_retry.jsonl",
            purpose=files.BATCH,
            bytes=incoming.size,
            created_at=now,
            expires_at=now + services.settings.file_ttl_s,
        )
        # rows may have been deleted while they were read
        _need_rows(batches.get(connection, batch.id, tenant=batch.tenant_id, now=now), now)
        files.add(connection, file)
        record = BatchRecord(
            id=batches.new_batch_id(),
            tenant_id=batch.tenant_id,
            endpoint=batch.endpoint,
            input_file_id=file_id,
            metadata=batch.metadata,
            priority=batch.priority,
            output_ttl_s=batch.output_ttl_s,
            dedupe=batch.dedupe,
            rows_ttl_s=batch.rows_ttl_s,
            state=BatchState.VALIDATING,
            created_at=now,
            expires_at=now + batches.WINDOW_S,
        )
        batches.create(connection, record)
        return record

    return await write_row(services, file_id, write)
