"""Where events are sent, and what became of each."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0007"

UNANNOUNCED = "url = '/v1/responses' AND finished_at IS NOT NULL AND announced_at IS NULL"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("announced_at", sa.Double))
    partial("jobs_to_announce", "jobs", ["finished_at"], UNANNOUNCED)
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("event_types", sa.Text, nullable=False),
        sa.Column("secret", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_index("webhook_endpoints_of", "webhook_endpoints", ["tenant_id"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("endpoint_id", sa.String(64), nullable=False),
        sa.Column("event_id", sa.String(64), nullable=False),
        sa.Column("event_type", sa.Text, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("num_tries", sa.BigInteger, nullable=False),
        sa.Column("next_try_at", sa.Double),
        sa.Column("delivered_at", sa.Double),
        sa.Column("tried_at", sa.Double),
        sa.Column("status_code", sa.BigInteger),
        sa.Column("error", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_index(
        "webhook_deliveries_of", "webhook_deliveries", ["tenant_id", "endpoint_id", "created_at"]
    )
    partial("webhook_deliveries_due", "webhook_deliveries", ["next_try_at"], "next_try_at IS NOT NULL")


def downgrade() -> None:
    op.drop_table("webhook_deliveries")
    op.drop_table("webhook_endpoints")
    op.drop_index("jobs_to_announce", "jobs")
    op.drop_column("jobs", "announced_at")


def partial(name: str, table: str, columns: list[str], where: str) -> None:
    text = sa.text(where)
    op.create_index(name, table, columns, sqlite_where=text, postgresql_where=text)
