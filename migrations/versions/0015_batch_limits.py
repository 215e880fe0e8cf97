"""Limits of a batch, what it was stopped for, and an index that adds up its rows' tokens."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

ROW = "row_number IS NOT NULL"
COUNTED = ["prompt_tokens", "cached_tokens", "completion_tokens", "max_tokens"]


def upgrade() -> None:
    op.add_column("batches", sa.Column("token_budget", sa.BigInteger))
    op.add_column("batches", sa.Column("max_error_rate", sa.Double))
    op.add_column("batches", sa.Column("stop_reason", sa.String(16)))
    op.add_column("batches", sa.Column("progress", sa.Text))
    op.add_column(
        "batches", sa.Column("paused_s", sa.Double, nullable=False, server_default="0")
    )
    op.drop_index("jobs_rows_in", "jobs")
    partial("jobs_rows_in", ["batch_id", "tenant_id", "state", "row_number", *COUNTED])


def downgrade() -> None:
    op.drop_index("jobs_rows_in", "jobs")
    partial("jobs_rows_in", ["batch_id", "state", "row_number"])
    for name in ("paused_s", "progress", "stop_reason", "max_error_rate", "token_budget"):
        op.drop_column("batches", name)


def partial(name: str, columns: list[str]) -> None:
    where = sa.text(ROW)
    op.create_index(name, "jobs", columns, sqlite_where=where, postgresql_where=where)
