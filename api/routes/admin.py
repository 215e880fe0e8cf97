"""Tenants, their quotas and their keys, for who runs the deployment: /admin/v1/…"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from api.core import refuse_key
from api.errors import BadRequest, NotFound, json_response
from api.fields import read_object
from api.query import read_query, text
from api.routing import Router
from api.services import Services
from jobs import keys, tenants
from jobs.keys import KeyRecord, Scope
from jobs.tenants import MAX_QUOTA, QUOTAS, Quotas, TenantRecord

R = TypeVar("R")
M = TypeVar("M", bound=BaseModel)

KEYS_QUERY = {"tenant": text}

router = Router()

Quota = Annotated[int, Field(ge=0, le=MAX_QUOTA)] | None


class QuotaFields(BaseModel):
    """Quotas as they come in; null lifts one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    requests_per_minute: Quota = None
    tokens_per_minute: Quota = None
    max_queued_jobs: Quota = None
    max_running_jobs: Quota = None
    max_stored_bytes: Quota = None


class NewTenant(QuotaFields):
    id: Annotated[
        str, Field(min_length=1, max_length=64, json_schema_extra={"pattern": tenants.ID_PATTERN})
    ]


class NewKey(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tenant: Annotated[str, Field(min_length=1, max_length=64)] = tenants.DEFAULT_TENANT
    name: Annotated[str, Field(min_length=1, max_length=keys.MAX_NAME)]
    scopes: list[str] = Field(
        default_factory=lambda: [str(scope) for scope in keys.TENANT_SCOPES],
        min_length=1,
        json_schema_extra={"items": {"enum": [str(scope) for scope in Scope]}},
    )


@router.post("/admin/v1/keys")
async def create_key(request: Request, services: Services) -> Response:
    refuse_key(request)
    new = await _read(request, services, NewKey)
    scopes = _scopes(new.scopes)
    record, key = await _write(
        services,
        lambda connection, now: keys.create(connection, new.tenant, new.name, scopes, now=now),
    )
    return json_response(key_object(record) | {"key": key}, status=201)


@router.get("/admin/v1/keys")
async def list_keys(request: Request, services: Services) -> Response:
    tenant = read_query(request, KEYS_QUERY).get("tenant")
    records = await services.sql.read(lambda connection, now: keys.list_keys(connection, tenant))
    return json_response({"object": "list", "data": [key_object(record) for record in records]})


@router.delete("/admin/v1/keys/{key_id}")
async def revoke_key(key_id: str, request: Request, services: Services) -> Response:
    read_query(request, {})
    record = await _write(
        services, lambda connection, now: keys.revoke(connection, _storable(key_id), now=now)
    )
    return json_response(key_object(record))


@router.post("/admin/v1/tenants")
async def create_tenant(request: Request, services: Services) -> Response:
    refuse_key(request)
    new = await _read(request, services, NewTenant)
    quotas = Quotas(**new.model_dump(exclude={"id"}))
    record = await _write(
        services, lambda connection, now: tenants.create(connection, new.id, quotas, now=now)
    )
    return json_response(tenant_object(record), status=201)


@router.get("/admin/v1/tenants")
async def list_tenants(request: Request, services: Services) -> Response:
    read_query(request, {})
    records = await services.sql.read(lambda connection, now: tenants.list_tenants(connection))
    return json_response({"object": "list", "data": [tenant_object(record) for record in records]})


@router.post("/admin/v1/tenants/{tenant_id}")
async def change_tenant(tenant_id: str, request: Request, services: Services) -> Response:
    changes = (await _read(request, services, QuotaFields)).model_dump(exclude_unset=True)
    record = await _write(
        services,
        lambda connection, now: tenants.change(connection, _storable(tenant_id), changes),
    )
    return json_response(tenant_object(record))


def key_object(record: KeyRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "api_key",
        "tenant": record.tenant_id,
        "name": record.name,
        "scopes": list(record.scopes),
        "created_at": record.created_at,
        "revoked_at": record.revoked_at,
    }


def tenant_object(record: TenantRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "tenant",
        "created_at": record.created_at,
        **{name: asdict(record.quotas)[name] for name in QUOTAS},
    }


async def _read(request: Request, services: Services, model: type[M]) -> M:
    read_query(request, {})
    async with services.bodies.json_body(request) as raw:
        return await asyncio.to_thread(read_object, raw, model)


async def _write(services: Services, statement: Callable[[Connection, float], R]) -> R:
    try:
        return await services.sql.write(statement)
    except (tenants.UnknownTenant, keys.UnknownKey) as error:
        raise NotFound(str(error), code="not_found") from None
    except (tenants.TenantError, keys.KeyRefused) as error:
        raise BadRequest(str(error)) from None


def _scopes(names: list[str]) -> list[Scope]:
    for index, name in enumerate(names):
        if name not in list(Scope):
            known = ", ".join(Scope)
            raise BadRequest(f"scopes must be of {known}", param=f"scopes[{index}]")
    return [Scope(name) for name in names]


def _storable(value: str) -> str:
    """An id from a path; what no id can be would be refused by the database in its own words."""
    return value if value.isascii() and value.isprintable() else ""
