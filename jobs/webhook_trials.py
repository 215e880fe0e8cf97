"""An event for one webhook endpoint, made because somebody tries it out."""

from sqlalchemy import Connection, select

from jobs import webhooks
from jobs.models import webhook_deliveries

MAX_WAITING = 100  # deliveries of one endpoint, beyond which it is not tried out


def try_out(
    connection: Connection, tenant: str, endpoint_id: str, event_type: str, *, now: float
) -> webhooks.Delivery:
    """Make an event for one endpoint alone, whatever it asks for.

    Raises UnknownWebhook, and WebhookError where many of its deliveries are not over: each call
    makes one more.
    """
    endpoint = webhooks.get_endpoint(connection, tenant, endpoint_id)
    some = (
        select(webhook_deliveries.c.id)
        .where(
            webhook_deliveries.c.tenant_id == tenant,
            webhook_deliveries.c.endpoint_id == endpoint_id,
            webhook_deliveries.c.next_try_at.is_not(None),
        )
        .limit(MAX_WAITING)
    )
    if len(connection.execute(some).all()) == MAX_WAITING:
        raise webhooks.WebhookError(f"{MAX_WAITING} deliveries to the endpoint are still under way")
    [delivery] = webhooks.record(
        connection, tenant, event_type, endpoint.id, now=now, only=endpoint.id
    )
    return delivery
