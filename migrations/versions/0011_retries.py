"""Which failures of a job are tried again, and when."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column(
        "jobs",
        sa.Column("retry_on", sa.Text, nullable=False, server_default="engine_crash worker_lost"),
    )
    op.add_column("jobs", sa.Column("not_before", sa.Double))


def downgrade() -> None:
    op.drop_column("jobs", "not_before")
    op.drop_column("jobs", "retry_on")
