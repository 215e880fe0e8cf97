"""Indexes for whose turn it is: the best of each tenant, and who has waited longest."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

WHERE = "state = 'queued'"


def upgrade() -> None:
    op.drop_index("jobs_queued_of", "jobs")
    columns = ["tenant_id", "model", "rank", "due_at", "created_at", "id"]
    partial("jobs_queued_of", columns)
    partial("jobs_waiting", ["model", "published_at", "created_at"])


def downgrade() -> None:
    op.drop_index("jobs_waiting", "jobs")
    op.drop_index("jobs_queued_of", "jobs")
    partial("jobs_queued_of", ["tenant_id"])


def partial(name: str, columns: list[str]) -> None:
    where = sa.text(WHERE)
    op.create_index(name, "jobs", columns, sqlite_where=where, postgresql_where=where)
