"""Batches, and jobs that are rows of one."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("row_number", sa.BigInteger))
    partial("jobs_row", "jobs", ["batch_id", "row_number"], "row_number IS NOT NULL", unique=True)
    partial("jobs_rows_in", "jobs", ["batch_id", "state", "row_number"], "row_number IS NOT NULL")
    op.create_table(
        "batches",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("metadata", sa.Text),
        sa.Column("priority", sa.BigInteger, nullable=False),
        sa.Column("output_ttl_s", sa.BigInteger),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("ending", sa.String(16)),
        sa.Column("model", sa.Text),
        sa.Column("errors", sa.Text),
        sa.Column("num_rows", sa.BigInteger, nullable=False),
        sa.Column("num_inserted", sa.BigInteger, nullable=False),
        sa.Column("input_offset", sa.BigInteger, nullable=False),
        sa.Column("num_completed", sa.BigInteger, nullable=False),
        sa.Column("num_failed", sa.BigInteger, nullable=False),
        sa.Column("usage", sa.Text),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("in_progress_at", sa.Double),
        sa.Column("finalizing_at", sa.Double),
        sa.Column("cancelling_at", sa.Double),
        sa.Column("closed_at", sa.Double),
        sa.Column("paused_at", sa.Double),
        sa.Column("keeper", sa.String(64)),
        sa.Column("keeper_until", sa.Double),
    )
    op.create_index("batches_of", "batches", ["tenant_id", "created_at", "id"])
    partial("batches_open", "batches", ["created_at"], "closed_at IS NULL")


def downgrade() -> None:
    op.drop_table("batches")
    op.drop_index("jobs_rows_in", "jobs")
    op.drop_index("jobs_row", "jobs")
    op.drop_column("jobs", "row_number")


def partial(name: str, table: str, columns: list[str], where: str, unique: bool = False) -> None:
    condition = sa.text(where)
    op.create_index(
        name, table, columns, unique=unique, sqlite_where=condition, postgresql_where=condition
    )
