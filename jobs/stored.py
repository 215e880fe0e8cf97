"""Chat completions that are stored, because their bodies asked for it: they are found again.

Each is a job that has succeeded; nothing is kept beside its row.
"""

from collections.abc import Mapping

from sqlalchemy import Connection, select, tuple_, update

from jobs import openai
from jobs.lifecycle import JobState
from jobs.models import jobs
from jobs.records import RECORD_COLUMNS, JobRecord
from jobs.rows import encode
from jobs.store import UnknownCursor

_RECORD = tuple(jobs.c[name] for name in RECORD_COLUMNS)
_CHATS = jobs.c.url == openai.CHAT, jobs.c.state == str(JobState.SUCCEEDED)


def is_stored(record: JobRecord) -> bool:
    """Whether it is such a chat, its body read."""
    assert record.body is not None
    done = record.url == openai.CHAT and record.state == JobState.SUCCEEDED
    return done and record.body.get("store") is True


def list_stored(
    connection: Connection,
    *,
    tenant: str,
    model: str | None = None,
    metadata: Mapping[str, str] | None = None,
    limit: int,
    after: str | None = None,
    ascending: bool,
) -> list[JobRecord]:
    """By the time they were made, from behind the job `after`; with all of these labels.

    Raises UnknownCursor.
    """
    at = tuple_(jobs.c.created_at, jobs.c.id)
    in_order = (jobs.c.created_at, jobs.c.id) if ascending else (
        jobs.c.created_at.desc(), jobs.c.id.desc(),
    )  # fmt: skip
    query = select(*_RECORD).where(jobs.c.tenant_id == tenant, *_CHATS, jobs.c.stored.is_not(None))
    for label in (metadata or {}).items():
        # no text inside a JSON string looks so: its quotes are escaped
        written = encode(dict([label]))[1:-1]
        query = query.where(jobs.c.metadata.contains(written, autoescape=True))
    if model is not None:
        query = query.where(jobs.c.model == model)
    if after is not None:
        mine = jobs.c.id == after, jobs.c.tenant_id == tenant
        last = connection.execute(select(jobs.c.created_at, jobs.c.id).where(*mine)).one_or_none()
        if last is None:
            raise UnknownCursor(after)
        query = query.where(at > tuple_(*last) if ascending else at < tuple_(*last))
    rows = connection.execute(query.order_by(*in_order).limit(limit))
    return [JobRecord.of(row) for row in rows]


def set_metadata(
    connection: Connection, job_id: str, metadata: Mapping[str, str], *, tenant: str
) -> JobRecord | None:
    """The job with its new labels; None where there is none."""
    row = connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id, jobs.c.tenant_id == tenant, *_CHATS)
        .values(metadata=encode(dict(metadata)))
        .returning(*_RECORD)
    ).one_or_none()
    return None if row is None else JobRecord.of(row)
