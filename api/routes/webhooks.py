"""Where a tenant's events go, and the log of what was sent: /v1/webhook_endpoints…"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from api.core import refuse_key
from api.errors import ApiError, BadRequest, NotFound, Unavailable, json_response
from api.fields import read_object
from api.present import list_object
from api.query import integer, read_query, text
from api.routing import Router
from api.services import Services
from jobs import webhooks
from jobs.addresses import literal_address_is_public
from jobs.webhook_trials import try_out
from jobs.webhooks import MAX_DELIVERIES_LISTED, Delivery, Endpoint, EventType

R = TypeVar("R")
M = TypeVar("M", bound=BaseModel)
EventName = Literal[
    "response.completed", "response.failed", "response.cancelled", "response.incomplete",
    "batch.completed", "batch.failed", "batch.expired", "batch.cancelled",
]  # fmt: skip
assert set(get_args(EventName)) == set(EventType) - {EventType.PING}

MAX_ENDPOINTS = 100  # in one page
SWEEPER_S = 5.0  # until a sweeper has taken a delivery up
LOOK_S = 0.25  # between two looks at it
LIST_QUERY = {"limit": integer(1, MAX_ENDPOINTS), "after": text}
DELIVERIES_QUERY = {"limit": integer(1, MAX_DELIVERIES_LISTED)}

router = Router()


def _url(given: str) -> str:
    """What can be known of a URL without asking for its name; the rest is checked at each try."""
    wrong = PydanticCustomError(
        "url", "must be an http or https URL of a host, without user or fragment"
    )
    try:
        parts = urlsplit(given)
        _ = parts.port
    except ValueError:
        raise wrong from None
    plain = given.isascii() and given.isprintable() and " " not in given and "\\" not in given
    odd = parts.username is not None or parts.password is not None or "#" in given
    if not plain or odd or parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong
    return given


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Name = Annotated[str, Field(min_length=1, max_length=128)]
_URL_SCHEMA: dict[str, Any] = {"format": "uri", "pattern": "^https?://"}
Url = Annotated[
    str,
    Field(min_length=1, max_length=2048, json_schema_extra=_URL_SCHEMA),
    AfterValidator(_url),
]


def _each_once(given: list[EventName]) -> list[EventName]:
    if len(set(given)) < len(given):
        raise PydanticCustomError("twice", "must name each type once")
    return given


Types = Annotated[
    list[EventName],
    Field(
        min_length=1,
        max_length=len(get_args(EventName)),
        json_schema_extra={"uniqueItems": True},
    ),
    AfterValidator(_each_once),
]


class NewEndpoint(Fields):
    name: Name
    url: Url
    event_types: Types


class EndpointChanges(Fields):
    name: Name = ""
    url: Url = ""
    event_types: Types = []


class Rotation(Fields):
    keep_old_secret_active_for_24_hours: bool = False


class Test(Fields):
    event_type: EventName | None = None


@router.post("/v1/webhook_endpoints")
async def create(request: Request, services: Services, tenant: str) -> Response:
    refuse_key(request)
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
    query = read_query(request, LIST_QUERY)
    found = await services.sql.read(
        lambda connection, now: webhooks.list_endpoints(connection, tenant)
    )
    if (after := query.get("after")) is not None:
        ids = [each.id for each in found]
        if after not in ids:
            raise BadRequest(f"no webhook endpoint {after[:100]!r} to list after", param="after")
        found = found[ids.index(after) + 1 :]
    objects = [endpoint_object(each) for each in found]
    return json_response(list_object(objects, query.get("limit", MAX_ENDPOINTS)))


@router.get("/v1/webhook_event_types")
async def event_types(request: Request) -> Response:
    read_query(request, {})
    return json_response({"object": "list", "data": list(get_args(EventName))})


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
    refuse_key(request)
    asked = await _read_if_any(request, services, Rotation)
    if asked.keep_old_secret_active_for_24_hours:
        raise BadRequest(
            "keep_old_secret_active_for_24_hours is not supported: the old secret ends at once",
            param="keep_old_secret_active_for_24_hours",
            code="unsupported_value",
        )
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
    """A ping, of which the reply tells that it was put down to be sent; or, as OpenAI's client has
    it, an event of a type, of which the reply tells what its receiver said."""
    refuse_key(request)
    asked = (await _read_if_any(request, services, Test)).event_type

    delivery = await _write(
        services,
        lambda connection, now: try_out(
            connection, tenant, _id(endpoint_id), asked or EventType.PING, now=now
        ),
    )
    if asked is None:
        return json_response(delivery_object(delivery))
    tried = await _once_tried(services, delivery)
    if tried.status_code is None:
        error = ApiError(f"the endpoint was not reached: {tried.error}", code="webhook_failed")
        error.status, error.headers["x-should-retry"] = 502, "false"
        raise error
    return json_response(
        {
            "object": "webhook_endpoint.test",
            "event_type": asked,
            "status_code": tried.status_code,
            "success": True,
            "webhook_endpoint_id": endpoint_id,
        }
    )


async def _once_tried(services: Services, delivery: Delivery) -> Delivery:
    """Raises Unavailable where no sweeper has sent it in time."""
    loop = asyncio.get_running_loop()
    until = loop.time() + services.settings.webhook_timeout_s + SWEEPER_S
    while not services.waiters.closing and loop.time() < until:
        found = await _call(
            services.sql.read,
            lambda connection, now: webhooks.list_deliveries(
                connection, delivery.tenant_id, delivery.endpoint_id, limit=MAX_DELIVERIES_LISTED
            ),
        )
        for each in found:
            # tried_at alone says that a sweeper has it in hand
            known = each.status_code is not None or each.error is not None
            if each.id == delivery.id and known:
                return each
        await asyncio.sleep(LOOK_S)
    raise Unavailable("no sweeper has sent the event yet", code="not_sent")


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
    refuse_key(request)
    delivery = await _write(
        services,
        lambda connection, now: webhooks.redeliver(
            connection, tenant, _id(endpoint_id), _id(delivery_id), now=now
        ),
    )
    return json_response(delivery_object(delivery), status=202)


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


def _id(given: str) -> str:
    """An id from a path; what no id can be would be refused by the database in its own words."""
    return given if given.isascii() and given.isprintable() else ""


async def _read(request: Request, services: Services, model: type[M]) -> M:
    read_query(request, {})
    async with services.bodies.json_body(request) as raw:
        return await services.cpu.run(read_object, raw, model)


async def _read_if_any(request: Request, services: Services, model: type[M]) -> M:
    """A body that may be left out."""
    if (
        request.headers.get("content-length", "0") == "0"
        and "transfer-encoding" not in request.headers
    ):
        read_query(request, {})
        return model()
    return await _read(request, services, model)


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
