"""`tokenmill keys` and `tokenmill tenants`: who may use a deployment, straight in its database."""

from typing import Any

import click

from cli.rows import in_database, show, shown_time
from jobs import keys as key_rows
from jobs import tenants as tenant_rows
from jobs.keys import KeyRecord, Scope
from jobs.tenants import DEFAULT_TENANT, QUOTAS, Quotas, TenantRecord

tenant_option = click.option("--tenant", default=DEFAULT_TENANT, show_default=True)


@click.group()
def keys() -> None:
    """API keys. They count where TOKENMILL_AUTH is keys."""


@keys.command("create")
@tenant_option
@click.option("--name", required=True, help="What it is for.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice([str(scope) for scope in Scope]),
    help="May be repeated; read, write and webhooks unless given.",
)
def create_key(tenant: str, name: str, scopes: tuple[str, ...]) -> None:
    """Make a key and print it on standard output. It cannot be shown again."""
    asked = [Scope(scope) for scope in scopes] or list(key_rows.TENANT_SCOPES)
    record, key = in_database(
        lambda connection, now: key_rows.create(connection, tenant, name, asked, now=now)
    )
    scopes_text = ", ".join(record.scopes)
    click.echo(f"key {record.id} of tenant {tenant} may: {scopes_text}", err=True)
    click.echo(key)


@keys.command("list")
@click.option("--tenant", help="Only this tenant's.")
def list_keys(tenant: str | None) -> None:
    """Show keys, without their secrets."""
    records = in_database(lambda connection, now: key_rows.list_keys(connection, tenant))
    show(("id", "tenant", "name", "scopes", "created", "revoked"), map(_key_row, records))


@keys.command("revoke")
@click.argument("key_id")
def revoke_key(key_id: str) -> None:
    """Let a key open nothing any more, within seconds. Jobs it has submitted go on."""
    record = in_database(lambda connection, now: key_rows.revoke(connection, key_id, now=now))
    click.echo(f"key {record.id} ({record.name}) of tenant {record.tenant_id} is revoked")


@click.group()
def tenants() -> None:
    """Tenants: who shares this deployment, and what each may use."""


@tenants.command("create")
@click.argument("tenant")
@click.option("--quota", "quotas", multiple=True, metavar="NAME=N", help=f"{', '.join(QUOTAS)}.")
def create_tenant(tenant: str, quotas: tuple[str, ...]) -> None:
    """Make a tenant; without quotas it has no limit."""
    wanted = {name: value for name, value in _quotas(quotas).items() if value is not None}
    record = in_database(
        lambda connection, now: tenant_rows.create(connection, tenant, Quotas(**wanted), now=now)
    )
    click.echo(f"tenant {record.id} created")


@tenants.command("set")
@click.argument("tenant")
@click.option(
    "--quota", "quotas", multiple=True, required=True, metavar="NAME=N", help="NAME=none lifts it."
)
def set_quotas(tenant: str, quotas: tuple[str, ...]) -> None:
    """Change a tenant's quotas."""
    changes = _quotas(quotas)
    in_database(lambda connection, now: tenant_rows.change(connection, tenant, changes))
    click.echo(f"tenant {tenant} changed")


@tenants.command("list")
def list_tenants() -> None:
    """Show tenants and their quotas."""
    records = in_database(lambda connection, now: tenant_rows.list_tenants(connection))
    show(("id", "created", *QUOTAS), map(_tenant_row, records))


def _quotas(texts: tuple[str, ...]) -> dict[str, int | None]:
    quotas: dict[str, int | None] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in QUOTAS or not (value == "none" or (value.isascii() and value.isdecimal())):
            raise click.BadParameter(
                f"must be NAME=NUMBER or NAME=none with NAME of {', '.join(QUOTAS)}, got {text!r}",
                param_hint="--quota",
            )
        quotas[name] = None if value == "none" else int(value)
    return quotas


def _key_row(record: KeyRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "tenant": record.tenant_id,
        "name": record.name,
        "scopes": ",".join(record.scopes),
        "created": shown_time(record.created_at),
        "revoked": shown_time(record.revoked_at),
    }


def _tenant_row(record: TenantRecord) -> dict[str, Any]:
    quotas = {name: getattr(record.quotas, name) for name in QUOTAS}
    return {"id": record.id, "created": shown_time(record.created_at), **quotas}
