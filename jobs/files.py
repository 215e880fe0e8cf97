"""Rows of files: what a tenant has stored, listed, counted against its quota, and when it goes.

The bytes are `jobs.file_store`'s. A row stands only for bytes that are on the disk: it is written
after them and deleted before them, so what a crash leaves is a file without a row, never the other
way round. Every function takes an open connection and, where it asks for the time, `now`.

UnknownFile
FileInUse
"""

import secrets
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, exists, func, insert, or_, select, tuple_

from jobs.batches import IS_READING, reads_file
from jobs.models import batches, files, tenants
from jobs.quotas import NEVER, QuotaExceeded

BATCH, BATCH_OUTPUT = "batch", "batch_output"
PURPOSES = (BATCH, BATCH_OUTPUT)
MAX_FILENAME = 255  # characters
MIN_TTL_S, MAX_TTL_S = 3_600, 2_592_000  # of `expires_after`
_ROUND = 500  # rows one call expires
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


class UnknownFile(Exception):
    """No file of that id; the same for one of another tenant."""

    def __init__(self, file_id: str) -> None:
        super().__init__(f"no file with id {file_id[:100]!r}")


class FileInUse(Exception):
    """A batch has not read it to its end."""

    def __init__(self, file_id: str) -> None:
        super().__init__(f"the file {file_id} is being read by a batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file's row."""

    id: str
    tenant_id: str
    filename: str
    purpose: str
    bytes: int
    created_at: float
    expires_at: float | None


_RECORD = tuple(files.c[each.name] for each in fields(FileRecord))


def new_file_id() -> str:
    """An id nobody can guess; it is the file's name in the folder, too."""
    return "file-" + "".join(secrets.choice(_ALPHABET) for _ in range(26))


def add(connection: Connection, record: FileRecord) -> None:
    """Raises QuotaExceeded where the tenant would have stored too much: roll back then."""
    left = bytes_left(connection, record.tenant_id, lock=True)
    if left is not None and record.purpose != BATCH_OUTPUT and record.bytes > left[1]:
        raise _exceeded(*left, record.bytes)
    insert_row(connection, record)


def insert_row(connection: Connection, record: FileRecord) -> None:
    """Whatever the quota says: a result that is there already must not be lost to it."""
    values = {each.name: getattr(record, each.name) for each in fields(FileRecord)}
    connection.execute(insert(files).values(values))


def check_room(connection: Connection, tenant: str, num_bytes: int) -> None:
    """Raises QuotaExceeded where so many bytes would be too many: asked before they are read."""
    left = bytes_left(connection, tenant)
    if left is not None and num_bytes > left[1]:
        raise _exceeded(*left, num_bytes)


def bytes_left(
    connection: Connection, tenant: str, *, lock: bool = False
) -> tuple[int, int] | None:
    """The tenant's quota of stored bytes and what is left of it; None where it has none."""
    query = select(tenants.c.max_stored_bytes).where(tenants.c.id == tenant)
    limit = connection.scalar(query.with_for_update() if lock else query)
    if limit is None:
        return None
    stored = connection.scalar(
        select(func.coalesce(func.sum(files.c.bytes), 0)).where(files.c.tenant_id == tenant)
    )
    return limit, limit - int(stored or 0)


def get(connection: Connection, file_id: str, *, tenant: str, now: float) -> FileRecord:
    """Raises UnknownFile, also for one whose time is over."""
    query = select(*_RECORD).where(files.c.id == file_id, files.c.tenant_id == tenant, _kept(now))
    row = connection.execute(query).one_or_none()
    if row is None:
        raise UnknownFile(file_id)
    return FileRecord(**row._mapping)


def list_files(
    connection: Connection,
    *,
    tenant: str,
    now: float,
    limit: int,
    purpose: str | None = None,
    after: str | None = None,
    ascending: bool = False,
) -> list[FileRecord]:
    """By age, from behind the file `after`. Raises UnknownFile for that one."""
    key = (files.c.created_at, files.c.id)
    order = key if ascending else tuple(column.desc() for column in key)
    query = select(*_RECORD).where(files.c.tenant_id == tenant, _kept(now))
    if purpose is not None:
        query = query.where(files.c.purpose == purpose)
    if after is not None:
        last = connection.execute(
            select(*key).where(files.c.id == after, files.c.tenant_id == tenant)
        ).one_or_none()
        if last is None:
            raise UnknownFile(after)
        behind = tuple_(*key) > tuple_(*last) if ascending else tuple_(*key) < tuple_(*last)
        query = query.where(behind)
    rows = connection.execute(query.order_by(*order).limit(limit))
    return [FileRecord(**row._mapping) for row in rows]


def remove(connection: Connection, file_id: str, *, tenant: str) -> None:
    """Its bytes go after the commit. Raises UnknownFile, FileInUse."""
    if reads_file(connection, file_id, tenant=tenant):
        raise FileInUse(file_id)
    gone = connection.execute(
        delete(files).where(files.c.id == file_id, files.c.tenant_id == tenant)
    )
    if not gone.rowcount:
        raise UnknownFile(file_id)


def expire(connection: Connection, now: float) -> list[str]:
    """Take away the rows of files whose time is over; their ids, whose bytes are to go."""
    reading = exists().where(batches.c.input_file_id == files.c.id, IS_READING)
    over = select(files.c.id).where(files.c.expires_at <= now, ~reading).limit(_ROUND)
    ids = list(connection.scalars(over))
    if ids:
        connection.execute(delete(files).where(files.c.id.in_(ids)))
    return ids


def known(connection: Connection, ids: Collection[str]) -> set[str]:
    """Those of `ids` that have a row."""
    some = list(ids)
    found: set[str] = set()
    for start in range(0, len(some), _ROUND):
        query = select(files.c.id).where(files.c.id.in_(some[start : start + _ROUND]))
        found |= set(connection.scalars(query))
    return found


def _kept(now: float) -> ColumnElement[bool]:
    return or_(files.c.expires_at.is_(None), files.c.expires_at > now)


def _exceeded(limit: int, left: int, asked: int) -> QuotaExceeded:
    return QuotaExceeded(
        "max_stored_bytes", limit, retry_after_s=NEVER, model=None, num_over=asked - left
    )


def file_object(record: FileRecord) -> dict[str, Any]:
    """In OpenAI's shape."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": int(record.created_at),
        "expires_at": None if record.expires_at is None else int(record.expires_at),
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }
