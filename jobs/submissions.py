"""Accepting jobs: one call's alone, or those of many calls in one transaction.

Together they cost one commit, one look at each tenant's quotas and one INSERT; each is accepted or
refused by itself, and what is refused leaves nothing behind. What the database refuses fails the
transaction and all in it: the caller then tries each alone. Every function takes an open
connection and `now`, seconds by the database's clock.

StoreError
└── IdempotencyConflict
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Double, bindparam, delete, insert, select

from jobs import quotas
from jobs.models import idempotency_keys, jobs
from jobs.quotas import QuotaExceeded
from jobs.records import RECORD_COLUMNS, JobRecord, NewJob
from jobs.rows import decode, encode, inserting

CHUNK = 500  # ids in one IN list: below every database's limit on variables
KEPT_S = 86_400.0
_RECORD = tuple(jobs.c[name] for name in RECORD_COLUMNS)


class StoreError(Exception):
    """A submission or question the store cannot answer as asked."""


class IdempotencyConflict(StoreError):
    """The key was used before with another body."""

    def __init__(self, key: str) -> None:
        super().__init__(f"Idempotency-Key {key!r} was used before with a different body")
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The jobs of one call: all of them are accepted, or none."""

    tenant: str
    new_jobs: Sequence[NewJob]
    key: str | None = None  # an Idempotency-Key
    body_sha256: bytes | None = None  # with a key

    def __post_init__(self) -> None:
        if self.key is not None:
            assert self.body_sha256 is not None
            assert len(self.body_sha256) == hashlib.sha256().digest_size

    @property
    def name(self) -> tuple[str, str] | None:
        return None if self.key is None else (self.tenant, self.key)


@dataclass(frozen=True, slots=True)
class Submitted:
    records: tuple[JobRecord, ...]  # in the order submitted
    replayed: bool  # the jobs of an earlier submission with the same key


Outcome = Submitted | IdempotencyConflict | QuotaExceeded


def submit(
    connection: Connection,
    new_jobs: Sequence[NewJob],
    *,
    tenant: str,
    now: float,
    key: str | None = None,
    body_sha256: bytes | None = None,
    ttl_s: float = KEPT_S,
) -> Submitted:
    """Accept all of them or none. A key still remembered gives back the jobs of its first use.

    Raises IdempotencyConflict when that first use had another body, and QuotaExceeded.
    """
    one = Submission(tenant=tenant, new_jobs=new_jobs, key=key, body_sha256=body_sha256)
    [outcome] = submit_together(connection, [one], now=now, ttl_s=ttl_s)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def submit_together(
    connection: Connection,
    submissions: Sequence[Submission],
    *,
    now: float,
    ttl_s: float = KEPT_S,
) -> list[Outcome]:
    """What becomes of each, in order. No two of them have the same key of the same tenant."""
    outcomes: dict[int, Outcome] = {}
    names = [each.name for each in submissions]
    keyed = [(name, i) for i, name in enumerate(names) if name is not None]
    assert len(keyed) == len({name for name, _ in keyed})
    # keys first and then tenants, both in one order everywhere: two processes cannot wait crosswise
    for _, i in sorted(keyed):
        if (earlier := _earlier(connection, submissions[i], now=now, ttl_s=ttl_s)) is not None:
            outcomes[i] = earlier
    new: dict[str, list[int]] = {}
    for i, each in enumerate(submissions):
        if i not in outcomes:
            new.setdefault(each.tenant, []).append(i)
    for tenant in sorted(new):
        asked = [submissions[i].new_jobs for i in new[tenant]]
        verdicts = quotas.admit(connection, tenant, asked, now=now)
        for i, refusal in zip(new[tenant], verdicts, strict=True):
            if refusal is not None:
                outcomes[i] = refusal
                if (key := submissions[i].key) is not None:
                    _give_back(connection, tenant, key)
    admitted = {i: each for i, each in enumerate(submissions) if i not in outcomes}
    records = _insert(connection, admitted, now)
    return [
        outcomes[i] if i in outcomes else Submitted(records[i], replayed=False)
        for i in range(len(submissions))
    ]


def _insert(
    connection: Connection, admitted: Mapping[int, Submission], now: float
) -> dict[int, tuple[JobRecord, ...]]:
    records: dict[int, tuple[JobRecord, ...]] = {}
    num_before = 0
    for i, each in admitted.items():
        # a microsecond apart: jobs keep their order in the queue and in lists
        records[i] = tuple(
            job.accepted(each.tenant, now + (num_before + n) * 1e-6)
            for n, job in enumerate(each.new_jobs)
        )
        num_before += len(each.new_jobs)
    if rows := [record.row() for each in records.values() for record in each]:
        connection.execute(insert(jobs), rows)
    return records


def _earlier(
    connection: Connection, submission: Submission, *, now: float, ttl_s: float
) -> Submitted | IdempotencyConflict | None:
    """What the key's first use became; None where this is it, and the key taken."""
    assert submission.key is not None
    assert submission.body_sha256 is not None
    ids = [job.id for job in submission.new_jobs]
    try:
        earlier = take_key(
            connection, submission.key, submission.body_sha256, ids,
            tenant=submission.tenant, now=now, ttl_s=ttl_s,
        )  # fmt: skip
    except IdempotencyConflict as conflict:
        return conflict
    if earlier is None:
        return None
    found = {record.id: record for record in _get_many(connection, earlier, submission.tenant)}
    return Submitted(tuple(found[i] for i in earlier if i in found), replayed=True)


def take_key(
    connection: Connection,
    key: str,
    body_sha256: bytes,
    ids: Sequence[str],
    *,
    tenant: str,
    now: float,
    ttl_s: float,
) -> list[str] | None:
    """None when the key is ours to use now, else the ids of its first use.

    Raises IdempotencyConflict.
    """
    values = {"tenant_id": tenant, "key": key, "created_at": now, "forgotten": now - ttl_s}
    values |= {"body_sha256": body_sha256, "job_ids": encode(list(ids))}
    # a twin that has not committed yet makes this statement wait for it, on both databases
    taken = connection.execute(_taking(connection.dialect.name), values).one_or_none()
    if taken is not None:
        return None
    row = connection.execute(
        select(idempotency_keys.c.body_sha256, idempotency_keys.c.job_ids).where(
            idempotency_keys.c.tenant_id == tenant, idempotency_keys.c.key == key
        )
    ).one()
    if row.body_sha256 != body_sha256:
        raise IdempotencyConflict(key)
    earlier: list[str] = decode(row.job_ids)
    return earlier


@cache
def _taking(dialect: str) -> Any:
    """Made once: making it takes longer than it runs."""
    keys = idempotency_keys.c
    taking = inserting(dialect, idempotency_keys)
    again = {name: taking.excluded[name] for name in ("body_sha256", "job_ids", "created_at")}
    forgotten: ColumnElement[float] = bindparam("forgotten", type_=Double())
    return taking.on_conflict_do_update(
        index_elements=[keys.tenant_id, keys.key], set_=again, where=keys.created_at <= forgotten
    ).returning(keys.key)


def _give_back(connection: Connection, tenant: str, key: str) -> None:
    """Forget a key that was taken just now for what was then refused."""
    connection.execute(
        delete(idempotency_keys).where(
            idempotency_keys.c.tenant_id == tenant, idempotency_keys.c.key == key
        )
    )


def _get_many(connection: Connection, ids: Sequence[str], tenant: str) -> list[JobRecord]:
    return [
        JobRecord.of(row)
        for start in range(0, len(ids), CHUNK)
        for row in connection.execute(
            select(*_RECORD).where(
                jobs.c.id.in_(ids[start : start + CHUNK]), jobs.c.tenant_id == tenant
            )
        )
    ]
