"""Leases of API processes, and which of them a job that ends with its caller hangs on."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"

WAITED_FOR = sa.text("waiter_id IS NOT NULL AND finished_at IS NULL")


def upgrade() -> None:
    op.create_table(
        "api_processes",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("lease_until", sa.Double, nullable=False),
    )
    op.add_column("jobs", sa.Column("waiter_id", sa.String(64)))
    op.create_index(
        "jobs_waited_for",
        "jobs",
        ["waiter_id"],
        sqlite_where=WAITED_FOR,
        postgresql_where=WAITED_FOR,
    )


def downgrade() -> None:
    op.drop_index("jobs_waited_for", "jobs")
    op.drop_column("jobs", "waiter_id")
    op.drop_table("api_processes")
