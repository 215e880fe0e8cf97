"""API keys: who may do what for which tenant. What is handed out once is never stored.

A key is `tm_<id>_<secret>`: the id finds its row, the secret has 256 random bits, so that one
SHA-256 is as good as a slow hash. Every function takes an open connection and, where it writes,
`now`, seconds by the database's clock.

KeyRefused
└── UnknownKey
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from jobs import tenants as tenant_rows
from jobs.models import api_keys, tenants
from jobs.records import storable
from jobs.tenants import QUOTA_COLUMNS, Quotas

MAX_NAME = 128  # characters
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's: no i, l, o, u
_KEY = re.compile(r"tm_([0-9a-hj-km-np-tv-z]{12})_[0-9A-Za-z_-]{43}")
_NO_ROW = hashlib.sha256(b"").digest()


class Scope(StrEnum):
    """What a key may do. Nothing of it reaches beyond its tenant, but for `metrics` and `admin`."""

    READ = "read"  # see what the tenant has
    WRITE = "write"  # submit, cancel, delete
    WEBHOOKS = "webhooks"  # say where events are sent
    METRICS = "metrics"  # of the whole deployment
    ADMIN = "admin"  # tenants, keys and quotas of the whole deployment


TENANT_SCOPES = (Scope.READ, Scope.WRITE, Scope.WEBHOOKS)  # a key's, unless others are asked for


class KeyRefused(ValueError):
    """A key that cannot be made as asked. The message can be shown as it is."""


class UnknownKey(KeyRefused):
    """No key of that id."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"no key {key_id[:32]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """A key as it can be shown: all but its secret."""

    id: str
    tenant_id: str
    name: str
    scopes: tuple[Scope, ...]
    created_at: float
    revoked_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who is calling."""

    tenant: str
    scopes: frozenset[Scope]
    quotas: Quotas
    key_id: str | None  # None in single-user mode


_RECORD = tuple(api_keys.c[name] for name in KeyRecord.__dataclass_fields__)


def create(
    connection: Connection, tenant: str, name: str, scopes: Collection[Scope], *, now: float
) -> tuple[KeyRecord, str]:
    """A new key: its record, and the key itself, which nobody can ask for again.

    Raises KeyRefused, and UnknownTenant.
    """
    if not 1 <= len(name) <= MAX_NAME or not storable(name):
        raise KeyRefused(f"name must have 1 to {MAX_NAME} characters that can be stored")
    if not scopes:
        raise KeyRefused("scopes must name at least one scope")
    tenant_rows.get(connection, tenant)
    record = KeyRecord(
        id="".join(secrets.choice(_ALPHABET) for _ in range(12)),
        tenant_id=tenant,
        name=name,
        scopes=tuple(scope for scope in Scope if scope in scopes),
        created_at=now,
        revoked_at=None,
    )
    key = f"tm_{record.id}_{secrets.token_urlsafe(32)}"
    connection.execute(
        insert(api_keys).values(
            id=record.id,
            tenant_id=tenant,
            name=name,
            sha256=_digest(key),
            scopes=" ".join(record.scopes),
            created_at=now,
        )
    )
    return record, key


def find(connection: Connection, key: str) -> Principal | None:
    """Whose key this is; None for one that was never handed out or has been revoked."""
    parts = _KEY.fullmatch(key)
    if parts is None:
        return None
    row = connection.execute(
        select(api_keys.c.sha256, api_keys.c.tenant_id, api_keys.c.scopes, *QUOTA_COLUMNS)
        .join(tenants, tenants.c.id == api_keys.c.tenant_id)
        .where(api_keys.c.id == parts[1], api_keys.c.revoked_at.is_(None))
    ).one_or_none()
    if not hmac.compare_digest(_NO_ROW if row is None else row.sha256, _digest(key)):
        return None
    assert row is not None
    return Principal(
        tenant=row.tenant_id,
        scopes=frozenset(map(Scope, row.scopes.split())),
        quotas=Quotas.of(row),
        key_id=parts[1],
    )


def list_keys(connection: Connection, tenant: str | None = None) -> list[KeyRecord]:
    """The keys of one tenant or of all, the oldest first; revoked ones too."""
    query = select(*_RECORD).order_by(api_keys.c.created_at, api_keys.c.id)
    if tenant is not None:
        query = query.where(api_keys.c.tenant_id == tenant)
    return [_record(row) for row in connection.execute(query)]


def revoke(connection: Connection, key_id: str, *, now: float) -> KeyRecord:
    """From now on it opens nothing. Its jobs go on: they are the tenant's. Raises UnknownKey."""
    row = connection.execute(
        update(api_keys)
        .where(api_keys.c.id == key_id)
        .values(revoked_at=func.coalesce(api_keys.c.revoked_at, now))
        .returning(*_RECORD)
    ).one_or_none()
    if row is None:
        raise UnknownKey(key_id)
    return _record(row)


def _record(row: Row[Any]) -> KeyRecord:
    values = dict(row._mapping)
    return KeyRecord(**{**values, "scopes": tuple(map(Scope, row.scopes.split()))})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
