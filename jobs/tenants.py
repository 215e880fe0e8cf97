"""Who shares a deployment: tenants, and what each of them may use.

A tenant is a name on every row; nothing a client of one tenant does reads or changes a row of
another. Every function takes an open connection.

TenantError
└── UnknownTenant
"""

import re
from dataclasses import dataclass, fields
from typing import Any, Self

from sqlalchemy import Connection, Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from jobs.models import tenants

DEFAULT_TENANT = "default"  # whose everything is in single-user mode, and what comes by Celery
MAX_QUOTA = 2**53
ID_PATTERN = "^[a-z0-9][a-z0-9_-]{0,63}$"
_ID = re.compile(ID_PATTERN)


class TenantError(ValueError):
    """A tenant that cannot be made or changed as asked. The message can be shown as it is."""


class UnknownTenant(TenantError):
    """No tenant of that id."""

    def __init__(self, tenant: str) -> None:
        super().__init__(f"no tenant {tenant[:64]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """What a tenant may use; None is no limit. Raises TenantError on a value out of range."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and, at most, of outputs, when accepted
    max_queued_jobs: int | None = None
    max_running_jobs: int | None = None
    max_stored_bytes: int | None = None  # of files

    def __post_init__(self) -> None:
        for name in QUOTAS:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_QUOTA:
                raise TenantError(f"{name} must be in [0, {MAX_QUOTA}]")

    @property
    def of_submitting(self) -> bool:
        """Whether there is one to be looked at when jobs are accepted."""
        return not (
            self.requests_per_minute is None
            and self.tokens_per_minute is None
            and self.max_queued_jobs is None
        )

    @classmethod
    def of(cls, row: Row[Any]) -> Self:
        return cls(**{name: row._mapping[name] for name in QUOTAS})


QUOTAS = tuple(each.name for each in fields(Quotas))
QUOTA_COLUMNS = tuple(tenants.c[name] for name in QUOTAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord:
    """A tenant's row."""

    id: str
    created_at: float
    quotas: Quotas


def create(connection: Connection, tenant: str, quotas: Quotas, *, now: float) -> TenantRecord:
    """Raises TenantError on a bad id and on one that is taken."""
    if not _ID.fullmatch(tenant):
        raise TenantError("a tenant's id must have 1 to 64 of a-z, 0-9, _ and -")
    values = {name: getattr(quotas, name) for name in QUOTAS}
    try:
        with connection.begin_nested():
            connection.execute(insert(tenants).values(id=tenant, created_at=now, **values))
    except IntegrityError:
        raise TenantError(f"there is a tenant {tenant!r} already") from None
    return TenantRecord(id=tenant, created_at=now, quotas=quotas)


def change(connection: Connection, tenant: str, changes: dict[str, int | None]) -> TenantRecord:
    """Set the quotas named in `changes`. Raises TenantError."""
    Quotas(**changes)
    if changes:
        connection.execute(update(tenants).where(tenants.c.id == tenant).values(changes))
    return get(connection, tenant)


def get(connection: Connection, tenant: str) -> TenantRecord:
    """Raises UnknownTenant."""
    for record in _records(connection, tenant):
        return record
    raise UnknownTenant(tenant)


def list_tenants(connection: Connection) -> list[TenantRecord]:
    """All of them, by id."""
    return _records(connection)


def _records(connection: Connection, tenant: str | None = None) -> list[TenantRecord]:
    query = select(tenants.c.id, tenants.c.created_at, *QUOTA_COLUMNS).order_by(tenants.c.id)
    if tenant is not None:
        query = query.where(tenants.c.id == tenant)
    return [
        TenantRecord(id=row.id, created_at=row.created_at, quotas=Quotas.of(row))
        for row in connection.execute(query)
    ]
