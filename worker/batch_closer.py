"""Makes a batch's files of its ended rows, in the order of its input, and closes it."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from sqlalchemy import Connection

from jobs import batch_progress, batch_shapes, batches, files, webhooks
from jobs.batch_record import BatchRecord, BatchState
from jobs.file_store import FileStore, Incoming
from jobs.files import FileRecord
from jobs.lifecycle import JobState
from jobs.records import JobRecord
from jobs.rows import encode
from jobs.settings import Settings

R = TypeVar("R")

ROWS = 200  # read at once: each may have a long text
KEEP_EVERY_S = 5.0
USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")

logger = logging.getLogger(__name__)


class Keeper(Protocol):
    """What is needed of one."""

    name: str
    settings: Settings
    store: FileStore

    def write(self, statement: Callable[[Connection, float], R]) -> R: ...
    def read(self, statement: Callable[[Connection, float], R]) -> R: ...


@dataclass(slots=True)
class _Files:
    """The two files while they are written; one without a line is not made."""

    store: FileStore
    output: Incoming | None = None
    errors: Incoming | None = None
    num_completed: int = 0
    num_failed: int = 0
    usage: Counter[str] = field(default_factory=Counter)
    ids: dict[str, str] = field(default_factory=dict)

    def add(self, record: JobRecord) -> None:
        if record.state == JobState.SUCCEEDED:
            self.output = self.output or self.store.incoming()
            self.num_completed += 1
            self.output.write(batch_shapes.encoded(record))
        else:
            self.errors = self.errors or self.store.incoming()
            self.num_failed += 1
            self.errors.write(batch_shapes.encoded(record))
        self.usage.update({name: getattr(record, name) for name in USAGE})

    def keep(self) -> None:
        for name, incoming in (("output", self.output), ("error", self.errors)):
            if incoming is not None:
                file_id = files.new_file_id()
                incoming.keep(file_id)
                self.ids[name] = file_id

    def drop(self) -> None:
        for incoming in (self.output, self.errors):
            if incoming is not None:
                incoming.drop()

    def forget(self) -> None:
        for file_id in self.ids.values():
            self.store.remove(file_id)


def close(keeper: Keeper, batch: BatchRecord) -> Iterator[None]:
    """All rows have ended. Raises LostBatch, and then nothing of it is left."""
    made = _Files(keeper.store)
    closed = False
    try:
        if batch.num_inserted:
            yield from _write_lines(keeper, batch, made)
        made.keep()
        keeper.write(lambda connection, now: _closed(connection, now, keeper, batch, made))
        closed = True
    finally:
        made.drop()
        if not closed:
            made.forget()
    logger.info(
        "batch %s %s: completed=%d failed=%d",
        *(batch.id, batch.ending, made.num_completed, made.num_failed),
    )


def _write_lines(keeper: Keeper, batch: BatchRecord, made: _Files) -> Iterator[None]:
    after, keep_at = -1, time.monotonic() + KEEP_EVERY_S
    while True:
        records = keeper.read(partial(_rows, batch, after))
        if not records:
            break
        for record in records:
            made.add(record)
        assert records[-1].row_number is not None
        after = records[-1].row_number
        if time.monotonic() >= keep_at:
            keeper.write(
                lambda connection, now: batches.keep(connection, batch, keeper.name, now=now)
            )
            keep_at = time.monotonic() + KEEP_EVERY_S
        yield
    num_lines = made.num_completed + made.num_failed
    assert num_lines == batch.num_inserted, (batch.id, num_lines, batch.num_inserted)


def _rows(batch: BatchRecord, after: int, connection: Connection, now: float) -> list[JobRecord]:
    return batches.rows_after(connection, batch.id, tenant=batch.tenant_id, after=after, limit=ROWS)


def _closed(
    connection: Connection, now: float, keeper: Keeper, batch: BatchRecord, made: _Files
) -> None:
    assert batch.ending is not None
    state = BatchState(batch.ending)
    values = {
        "state": state,
        "closed_at": now,
        "num_completed": made.num_completed,
        "num_failed": made.num_failed,
        "usage": encode({name: made.usage[name] for name in USAGE}),
        "output_file_id": made.ids.get("output"),
        "error_file_id": made.ids.get("error"),
    }
    ended = replace(batch, finalizing_at=batch.finalizing_at or now)
    found = batch_progress.progress(connection, ended, now=now)
    if batch.rows_ttl_s is not None:
        values["rows_expire_at"] = now + batch.rows_ttl_s
    values["progress"] = encode(batch_progress.progress_object(batch, found))
    batches.keep(connection, batch, keeper.name, now=now, values=values)
    ttl_s = batch.output_ttl_s or keeper.settings.file_ttl_s
    for name, incoming in (("output", made.output), ("error", made.errors)):
        if incoming is not None:
            files.insert_row(
                connection,
                FileRecord(
                    id=made.ids[name],
                    tenant_id=batch.tenant_id,
                    filename=f"{batch.id}_{name}.jsonl",
                    purpose=files.BATCH_OUTPUT,
                    bytes=incoming.size,
                    created_at=now,
                    expires_at=now + ttl_s,
                ),
            )
    webhooks.record(connection, batch.tenant_id, f"batch.{state}", batch.id, now=now)
