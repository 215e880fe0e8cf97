"""Where a tenant's events go, and the log of what was sent: /v1/webhook_endpoints…"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from api.errors import BadRequest, NotFound, json_response
from api.fields import read_object
from api.present import list_object
from api.query import integer, read_query
from api.routing import Router
from api.services import Services
from jobs import webhooks
from jobs.addresses import literal_address_is_public
from jobs.webhooks import MAX_DELIVERIES_LISTED, Delivery, Endpoint, EventType

R = TypeVar("R")
M = TypeVar("M", bound=BaseModel)
EventName = Literal[
    "response.completed", "response.failed", "response.cancelled", "response.incomplete",
    "batch.completed", "batch.failed", "batch.expired", "batch.cancelled",
]  # fmt: skip
assert set(get_args(EventName)) == set(EventType) - {EventType.PING}

DELIVERIES_QUERY = {"limit": integer(1, MAX_DELIVERIES_LISTED)}

router = Router()


def _url(text: str) -> str:
    """What can be known of a URL without asking for its name; the rest is checked at each try."""
    wrong = PydanticCustomError(
        "url", "must be an http or https URL of a host, without user or fragment"
    )
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        raise wrong from None
    plain = text.isascii() and text.isprintable() and " " not in text and "\\" not in text
    odd = parts.username is not None or parts.password is not None or "#" in text
    if not plain or odd or parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong
    return text


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Name = Annotated[str, Field(min_length=1, max_length=128)]
_URL_SCHEMA: dict[str, Any] = {"format": "uri", "pattern": "^https?://"}
Url = Annotated[
    str,
    Field(min_length=1, max_length=2048, json_schema_extra=_URL_SCHEMA),
    AfterValidator(_url),
]
Types = Annotated[list[EventName], Field(min_length=1, max_length=len(get_args(EventName)))]


class NewEndpoint(Fields):
    name: Name
    url: Url
    event_types: Types


class EndpointChanges(Fields):
    name: Name = ""
    url: Url = ""
    event_types: Types = []


@router.post("/v1/webhook_endpoints")
async def create(request: Request, services: Services, tenant: str) -> Response:
    new = await _read(request, services, NewEndpoint)
    _check_address(services, new.url)
    endpoint = await _write(
        services,
        lambda connection, now: webhooks.create_endpoint(
            connection, tenant, name=new.name, url=new.url, event_types=new.event_types, now=now
        ),
    )
    return json_response(endpoint_object(endpoint) | {"signing_secret": endpoint.secret})


@router.get("/v1/webhook_endpoints")
async def list_all(request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    found = await services.sql.read(
        lambda connection, now: webhooks.list_endpoints(connection, tenant)
    )
    return json_response(list_object([endpoint_object(each) for each in found]))


@router.get("/v1/webhook_endpoints/{endpoint_id}")
async def get(endpoint_id: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    endpoint = await _call(
        services.sql.read,
        lambda connection, now: webhooks.get_endpoint(connection, tenant, _id(endpoint_id)),
    )
    return json_response(endpoint_object(endpoint))


@router.post("/v1/webhook_endpoints/{endpoint_id}")
async def change(endpoint_id: str, request: Request, services: Services, tenant: str) -> Response:
    changes = (await _read(request, services, EndpointChanges)).model_dump(exclude_unset=True)
    if "url" in changes:
        _check_address(services, changes["url"])
    endpoint = await _write(
        services,
        lambda connection, now: webhooks.change_endpoint(
            connection, tenant, _id(endpoint_id), changes
        ),
    )
    return json_response(endpoint_object(endpoint))


@router.delete("/v1/webhook_endpoints/{endpoint_id}")
async def delete(endpoint_id: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})
    await _write(
        services,
        lambda connection, now: webhooks.delete_endpoint(connection, tenant, _id(endpoint_id)),
    )
    deleted = {"id": endpoint_id, "object": "webhook_endpoint.deleted", "deleted": True}
    return json_response(deleted)


@router.post("/v1/webhook_endpoints/{endpoint_id}/rotate_secret")
async def rotate_secret(
    endpoint_id: str, request: Request, services: Services, tenant: str
) -> Response:
    read_query(request, {})
    changes = {"secret": webhooks.new_secret()}
    endpoint = await _write(
        services,
        lambda connection, now: webhooks.change_endpoint(
            connection, tenant, _id(endpoint_id), changes
        ),
    )
    return json_response(endpoint_object(endpoint) | {"signing_secret": endpoint.secret})


@router.post("/v1/webhook_endpoints/{endpoint_id}/test")
async def test(endpoint_id: str, request: Request, services: Services, tenant: str) -> Response:
    read_query(request, {})

    def ping(connection: Connection, now: float) -> Delivery:
        endpoint = webhooks.get_endpoint(connection, tenant, _id(endpoint_id))
        [delivery] = webhooks.record(
            connection, tenant, EventType.PING, endpoint.id, now=now, only=endpoint.id
        )
        return delivery

    return json_response(delivery_object(await _write(services, ping)))


@router.get("/v1/webhook_endpoints/{endpoint_id}/deliveries")
async def deliveries(
    endpoint_id: str, request: Request, services: Services, tenant: str
) -> Response:
    limit = read_query(request, DELIVERIES_QUERY).get("limit", 20)
    found = await _call(
        services.sql.read,
        lambda connection, now: webhooks.list_deliveries(
            connection, tenant, _id(endpoint_id), limit=limit
        ),
    )
    return json_response(list_object([delivery_object(each) for each in found]))


@router.post("/v1/webhook_endpoints/{endpoint_id}/deliveries/{delivery_id}/redeliver")
async def redeliver(
    endpoint_id: str,
    delivery_id: str,
    request: Request,
    services: Services,
    tenant: str,
) -> Response:
    read_query(request, {})
    delivery = await _write(
        services,
        lambda connection, now: webhooks.redeliver(
            connection, tenant, _id(endpoint_id), _id(delivery_id), now=now
        ),
    )
    return json_response(delivery_object(delivery))


def endpoint_object(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "id": endpoint.id,
        "object": "webhook_endpoint",
        "created_at": int(endpoint.created_at),
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": list(endpoint.event_types),
        "signing_secret_hint": f"{endpoint.secret[:8]}…{endpoint.secret[-4:]}",
    }


def delivery_object(delivery: Delivery) -> dict[str, Any]:
    shown = asdict(delivery)
    del shown["tenant_id"], shown["payload"]
    over = delivery.next_try_at is None
    status = "delivered" if delivery.delivered_at else "failed" if over else "pending"
    return {"object": "webhook_delivery", "status": status, **shown}


def _check_address(services: Services, url: str) -> None:
    host = urlsplit(url).hostname or ""
    if not services.settings.webhook_private_addresses and not literal_address_is_public(host):
        raise BadRequest("url must not name an address that is not public", param="url")


def _id(text: str) -> str:
    """An id from a path; what no id can be would be refused by the database in its own words."""
    return text if text.isascii() and text.isprintable() else ""


async def _read(request: Request, services: Services, model: type[M]) -> M:
    read_query(request, {})
    async with services.bodies.json_body(request) as raw:
        return await services.cpu.run(read_object, raw, model)


async def _write(services: Services, statement: Callable[[Connection, float], R]) -> R:
    return await _call(services.sql.write, statement)


async def _call(run: Callable[..., Any], statement: Callable[[Connection, float], R]) -> R:
    try:
        result: R = await run(statement)
    except webhooks.UnknownWebhook as error:
        raise NotFound(str(error), param="id", code="webhook_not_found") from None
    except webhooks.WebhookError as error:
        raise BadRequest(str(error)) from None
    return result
