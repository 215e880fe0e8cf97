"""Where a tenant's events are sent, and each delivery: tried, to be tried again, over.

An event becomes one delivery for each endpoint that asks for its type, in the transaction that
makes it, or, of a job that has ended, in one that marks the job: none is lost and none is made
twice. Several sweepers may deliver: a delivery in the hands of one is not due for the others.
Every function takes an open connection and, where it writes, `now`, by the database's clock.

WebhookError
└── UnknownWebhook
"""

import base64
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, select, update

from jobs.lifecycle import TERMINAL, JobState
from jobs.models import ENDED_RESPONSE, jobs, tenants, webhook_deliveries, webhook_endpoints
from jobs.openai_response_object import response_id
from jobs.records import new_job_id
from jobs.rows import decode, encode, picked

MAX_ENDPOINTS = 32  # of one tenant
MAX_DELIVERIES_LISTED = 100
# seconds after each try that failed; after the last of them it is given up: some six hours in all
BACKOFF_S = (5, 30, 120, 300, 900, 1800, 3600, 7200, 7200)
IN_HANDS_S = 120.0  # a sweeper that took a delivery and died is waited for so long
KEPT_S = 30 * 86_400.0  # deliveries that are over
TENANT_IN_HANDS = 4  # deliveries of one tenant that one sweeper makes at once: half its threads
_ROUND = 100  # jobs announced, or deliveries taken, in one transaction


class EventType(StrEnum):
    RESPONSE_COMPLETED = "response.completed"
    RESPONSE_FAILED = "response.failed"
    RESPONSE_CANCELLED = "response.cancelled"
    RESPONSE_INCOMPLETE = "response.incomplete"
    BATCH_COMPLETED = "batch.completed"
    BATCH_FAILED = "batch.failed"
    BATCH_EXPIRED = "batch.expired"
    BATCH_CANCELLED = "batch.cancelled"
    PING = "webhook.ping"  # sent to try an endpoint


class WebhookError(ValueError):
    """What cannot be done as asked. The message can be shown as it is."""


class UnknownWebhook(WebhookError):
    """No endpoint, or no delivery, of that id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where events go. Its secret is told once."""

    id: str
    tenant_id: str
    name: str
    url: str
    event_types: tuple[str, ...]
    secret: str
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One event on its way to one endpoint."""

    id: str
    tenant_id: str
    endpoint_id: str
    event_id: str
    event_type: str
    payload: str  # JSON, the same bytes in every try
    num_tries: int
    next_try_at: float | None  # None: delivered, or given up
    delivered_at: float | None
    tried_at: float | None
    status_code: int | None  # of the last try
    error: str | None  # of the last try
    created_at: float


@dataclass(frozen=True, slots=True)
class Due:
    """A delivery in the caller's hands, and where it goes."""

    delivery: Delivery
    url: str
    secret: str


_ENDPOINT = tuple(webhook_endpoints.c[name] for name in Endpoint.__dataclass_fields__)
_DELIVERY = tuple(webhook_deliveries.c[name] for name in Delivery.__dataclass_fields__)


def new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


def create_endpoint(
    connection: Connection,
    tenant: str,
    *,
    name: str,
    url: str,
    event_types: Sequence[str],
    now: float,
) -> Endpoint:
    """Raises WebhookError where the tenant has too many; they are counted under its row's lock."""
    connection.execute(select(tenants.c.id).where(tenants.c.id == tenant).with_for_update())
    if len(list_endpoints(connection, tenant)) >= MAX_ENDPOINTS:
        raise WebhookError(f"a tenant may have at most {MAX_ENDPOINTS} webhook endpoints")
    endpoint = Endpoint(
        id=_new_id("we"), tenant_id=tenant, name=name, url=url, event_types=tuple(event_types),
        secret=new_secret(), created_at=now,
    )  # fmt: skip
    values = {field: getattr(endpoint, field) for field in Endpoint.__dataclass_fields__}
    connection.execute(
        insert(webhook_endpoints).values(values | {"event_types": encode(list(event_types))})
    )
    return endpoint


def list_endpoints(connection: Connection, tenant: str) -> list[Endpoint]:
    """The oldest first."""
    query = select(*_ENDPOINT).where(webhook_endpoints.c.tenant_id == tenant)
    rows = connection.execute(
        query.order_by(webhook_endpoints.c.created_at, webhook_endpoints.c.id)
    )
    return [_endpoint(row) for row in rows]


def get_endpoint(connection: Connection, tenant: str, endpoint_id: str) -> Endpoint:
    """Raises UnknownWebhook."""
    row = connection.execute(select(*_ENDPOINT).where(*_is(tenant, endpoint_id))).one_or_none()
    return _endpoint(_known(row, "webhook endpoint", endpoint_id))


def change_endpoint(
    connection: Connection, tenant: str, endpoint_id: str, changes: dict[str, Any]
) -> Endpoint:
    """Set name, url, event_types or secret. Raises UnknownWebhook."""
    if "event_types" in changes:
        changes = changes | {"event_types": encode(list(changes["event_types"]))}
    if changes:
        connection.execute(
            update(webhook_endpoints).where(*_is(tenant, endpoint_id)).values(changes)
        )
    return get_endpoint(connection, tenant, endpoint_id)


def delete_endpoint(connection: Connection, tenant: str, endpoint_id: str) -> None:
    """With its deliveries, those not yet made too. Raises UnknownWebhook."""
    gone = connection.execute(delete(webhook_endpoints).where(*_is(tenant, endpoint_id)))
    _known(gone.rowcount or None, "webhook endpoint", endpoint_id)
    connection.execute(
        delete(webhook_deliveries).where(
            webhook_deliveries.c.tenant_id == tenant,
            webhook_deliveries.c.endpoint_id == endpoint_id,
        )
    )


def record(
    connection: Connection,
    tenant: str,
    event_type: str,
    object_id: str,
    *,
    now: float,
    only: str | None = None,  # this endpoint, whatever it asks for
) -> list[Delivery]:
    """Make an event: to be called in the transaction that makes what it tells of true."""
    event_id = _new_id("evt")
    payload = encode(
        {
            "id": event_id, "object": "event", "created_at": int(now), "type": event_type,
            "data": {"id": object_id},
        }
    )  # fmt: skip
    deliveries = [
        Delivery(
            id=_new_id("whd"), tenant_id=tenant, endpoint_id=endpoint.id, event_id=event_id,
            event_type=event_type, payload=payload, num_tries=0, next_try_at=now,
            delivered_at=None, tried_at=None, status_code=None, error=None, created_at=now,
        )
        for endpoint in list_endpoints(connection, tenant)
        if endpoint.id == only or (only is None and event_type in endpoint.event_types)
    ]  # fmt: skip
    if deliveries:
        names = Delivery.__dataclass_fields__
        connection.execute(
            insert(webhook_deliveries),
            [{name: getattr(each, name) for name in names} for each in deliveries],
        )
    return deliveries


def announce(connection: Connection, now: float) -> int:
    """Make events of background responses that have ended since the last call; how many ended."""
    ended = (
        select(jobs.c.id)
        .where(ENDED_RESPONSE)
        .limit(_ROUND)
        .with_for_update(skip_locked=True, of=jobs)
    )
    rows = connection.execute(
        update(jobs)
        .where(jobs.c.id.in_(picked(ended)), jobs.c.announced_at.is_(None))
        .values(announced_at=now)
        .returning(jobs.c.id, jobs.c.tenant_id, jobs.c.state, jobs.c.output, jobs.c.body)
    ).all()
    for row in rows:
        if decode(row.body).get("background") is True:
            event_type = _event_of(JobState(row.state), decode(row.output))
            record(connection, row.tenant_id, event_type, response_id(row.id), now=now)
    return len(rows)


def take_due(
    connection: Connection,
    now: float,
    *,
    room: int = _ROUND,
    in_hands: Mapping[str, int] = {},  # by tenant: what the caller makes already
) -> list[Due]:
    """At most `room` deliveries whose time has come, each counted as tried, the caller's for
    IN_HANDS_S. Who has fewest in hands comes first, and no tenant gets beyond TENANT_IN_HANDS: a
    receiver that hangs holds up its own tenant's events, not the others'."""
    due = (
        select(webhook_deliveries.c.id)
        .where(
            webhook_deliveries.c.id.in_(_turns(connection, now, room, in_hands)),
            webhook_deliveries.c.next_try_at <= now,
        )
        .with_for_update(skip_locked=True)
    )
    rows = connection.execute(
        update(webhook_deliveries)
        .where(webhook_deliveries.c.id.in_(picked(due)))
        .values(
            num_tries=webhook_deliveries.c.num_tries + 1,
            tried_at=now,
            next_try_at=now + IN_HANDS_S,
        )
        .returning(*_DELIVERY)
    )
    deliveries = [Delivery(**row._mapping) for row in rows]
    ids = {delivery.endpoint_id for delivery in deliveries}
    places = select(webhook_endpoints.c.id, webhook_endpoints.c.url, webhook_endpoints.c.secret)
    endpoints = {
        row.id: row for row in connection.execute(places.where(webhook_endpoints.c.id.in_(ids)))
    }
    return [
        Due(delivery, endpoints[delivery.endpoint_id].url, endpoints[delivery.endpoint_id].secret)
        for delivery in deliveries
        if delivery.endpoint_id in endpoints
    ]


def _turns(connection: Connection, now: float, room: int, in_hands: Mapping[str, int]) -> list[str]:
    turn = func.row_number().over(
        partition_by=webhook_deliveries.c.tenant_id,
        order_by=(webhook_deliveries.c.next_try_at, webhook_deliveries.c.id),
    )
    columns = (webhook_deliveries.c[name] for name in ("id", "tenant_id", "next_try_at"))
    waiting = (
        select(*columns, turn.label("turn"))
        .where(webhook_deliveries.c.next_try_at <= now)
        .subquery()
    )
    rows = connection.execute(select(waiting).where(waiting.c.turn <= TENANT_IN_HANDS))
    turns = sorted(
        (in_hands.get(row.tenant_id, 0) + row.turn, row.next_try_at, row.id) for row in rows
    )
    return [delivery_id for turn, _, delivery_id in turns if turn <= TENANT_IN_HANDS][:room]


def settle(
    connection: Connection,
    delivery: Delivery,
    *,
    status_code: int | None,
    error: str | None,
    now: float,
) -> None:
    """What became of a try: delivered, to be tried again, or given up."""
    delivered = error is None
    more = delivery.num_tries <= len(BACKOFF_S)
    again_at = None if delivered or not more else now + BACKOFF_S[delivery.num_tries - 1]
    connection.execute(
        update(webhook_deliveries)
        .where(
            webhook_deliveries.c.id == delivery.id,
            webhook_deliveries.c.tenant_id == delivery.tenant_id,
            webhook_deliveries.c.num_tries == delivery.num_tries,  # else another has it by now
        )
        .values(
            status_code=status_code,
            error=error,
            next_try_at=again_at,
            delivered_at=now if delivered else None,
        )
    )


def list_deliveries(
    connection: Connection, tenant: str, endpoint_id: str, *, limit: int
) -> list[Delivery]:
    """An endpoint's, newest first. Raises UnknownWebhook."""
    get_endpoint(connection, tenant, endpoint_id)
    query = (
        select(*_DELIVERY)
        .where(
            webhook_deliveries.c.tenant_id == tenant,
            webhook_deliveries.c.endpoint_id == endpoint_id,
        )
        .order_by(webhook_deliveries.c.created_at.desc(), webhook_deliveries.c.id.desc())
        .limit(limit)
    )
    return [Delivery(**row._mapping) for row in connection.execute(query)]


def redeliver(
    connection: Connection, tenant: str, endpoint_id: str, delivery_id: str, *, now: float
) -> Delivery:
    """Send it once more, with the same event id, whatever became of it. Raises UnknownWebhook."""
    row = connection.execute(
        update(webhook_deliveries)
        .where(
            webhook_deliveries.c.id == delivery_id,
            webhook_deliveries.c.tenant_id == tenant,
            webhook_deliveries.c.endpoint_id == endpoint_id,
        )
        .values(next_try_at=now, num_tries=0)
        .returning(*_DELIVERY)
    ).one_or_none()
    return Delivery(**_known(row, "delivery", delivery_id)._mapping)


def purge(connection: Connection, now: float) -> None:
    """Forget deliveries that have been over for long."""
    connection.execute(
        delete(webhook_deliveries).where(
            webhook_deliveries.c.next_try_at.is_(None),
            webhook_deliveries.c.created_at <= now - KEPT_S,
        )
    )


def _event_of(state: JobState, response: Mapping[str, Any] | None) -> EventType:
    assert state in TERMINAL
    if state is JobState.SUCCEEDED:
        assert response is not None
        cut = response.get("status") == "incomplete"
        return EventType.RESPONSE_INCOMPLETE if cut else EventType.RESPONSE_COMPLETED
    cancelled = state is JobState.CANCELLED
    return EventType.RESPONSE_CANCELLED if cancelled else EventType.RESPONSE_FAILED


def _is(tenant: str, endpoint_id: str) -> Collection[ColumnElement[bool]]:
    return (webhook_endpoints.c.tenant_id == tenant, webhook_endpoints.c.id == endpoint_id)


def _known(found: Any, noun: str, id_: str) -> Any:
    if found is None:
        raise UnknownWebhook(f"no {noun} with id {id_[:100]!r}")
    return found


def _endpoint(row: Row[Any]) -> Endpoint:
    return Endpoint(**{**row._mapping, "event_types": tuple(decode(row.event_types))})


def _new_id(prefix: str) -> str:
    return f"{prefix}_{new_job_id().removeprefix('job_')}"
