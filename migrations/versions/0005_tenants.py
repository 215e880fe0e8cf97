"""A tenant for every row, its quotas, and API keys. What was there belongs to the default tenant."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0003"

QUOTAS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_queued_jobs",
    "max_running_jobs",
    "max_stored_bytes",
)
# index: its columns before, its columns now, of which rows
INDEXES = {
    "jobs_custom_id": (["custom_id"], ["tenant_id", "custom_id"], "custom_id IS NOT NULL"),
    "jobs_batch_id": (["batch_id"], ["tenant_id", "batch_id"], "batch_id IS NOT NULL"),
    "jobs_newest": (["created_at", "id"], ["tenant_id", "created_at", "id"], None),
}


def upgrade() -> None:
    op.add_column(
        "jobs",
        sa.Column("tenant_id", sa.String(64), nullable=False, server_default="default"),
    )
    for name, (_, columns, where) in INDEXES.items():
        op.drop_index(name, "jobs")
        index(name, columns, where)
    index("jobs_queued_of", ["tenant_id"], "state = 'queued'")
    index("jobs_running_of", ["tenant_id"], "state = 'running'")
    create_tenants()
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("sha256", sa.LargeBinary, nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
    )
    op.create_index("api_keys_of", "api_keys", ["tenant_id"])
    tenant = sa.Column("tenant_id", sa.String(64), primary_key=True)
    rebuild_idempotency_keys([tenant], "'default', key, body_sha256, job_ids, created_at")


def downgrade() -> None:
    rebuild_idempotency_keys([], "key, body_sha256, job_ids, created_at")
    op.drop_table("api_keys")
    op.drop_table("tenants")
    for name in ("jobs_queued_of", "jobs_running_of", *INDEXES):
        op.drop_index(name, "jobs")
    for name, (columns, _, where) in INDEXES.items():
        index(name, columns, where)
    op.drop_column("jobs", "tenant_id")


def create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("created_at", sa.Double, nullable=False),
        *(sa.Column(name, sa.BigInteger) for name in QUOTAS),
        sa.Column("minute_began_at", sa.Double, nullable=False, server_default="0"),
        sa.Column("minute_requests", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("minute_tokens", sa.BigInteger, nullable=False, server_default="0"),
    )
    postgres = op.get_bind().dialect.name == "postgresql"
    now = (
        "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
        if postgres
        else "(julianday('now') - 2440587.5) * 86400.0"
    )
    op.execute(f"INSERT INTO tenants (id, created_at) VALUES ('default', {now})")


def rebuild_idempotency_keys(first: list[sa.Column], columns: str) -> None:
    """The primary key changes, which SQLite only does to a new table."""
    op.execute("CREATE TABLE idempotency_keys_kept AS SELECT * FROM idempotency_keys")
    op.drop_table("idempotency_keys")
    op.create_table(
        "idempotency_keys",
        *first,
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("body_sha256", sa.LargeBinary, nullable=False),
        sa.Column("job_ids", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    where = "" if first else " WHERE tenant_id = 'default'"
    op.execute(f"INSERT INTO idempotency_keys SELECT {columns} FROM idempotency_keys_kept{where}")
    op.drop_table("idempotency_keys_kept")
    op.create_index("idempotency_keys_age", "idempotency_keys", ["created_at"])


def index(name: str, columns: list[str], where: str | None) -> None:
    text = None if where is None else sa.text(where)
    op.create_index(name, "jobs", columns, sqlite_where=text, postgresql_where=text)
