"""Identical rows of a batch are generated once, if asked; a column that no version uses goes."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    for name in ("dedupe", "num_same"):
        op.add_column(
            "batches", sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
        )
    op.drop_column("batches", "input_offset")
    op.add_column("jobs", sa.Column("saved_tokens", sa.BigInteger))
    where = sa.text("saved_tokens IS NOT NULL")
    op.create_index(
        "jobs_copies", "jobs", ["batch_id", "tenant_id", "state", "saved_tokens"],
        sqlite_where=where, postgresql_where=where,
    )  # fmt: skip


def downgrade() -> None:
    op.drop_index("jobs_copies", "jobs")
    op.drop_column("jobs", "saved_tokens")
    op.add_column(
        "batches", sa.Column("input_offset", sa.BigInteger, nullable=False, server_default="0")
    )
    for name in ("num_same", "dedupe"):
        op.drop_column("batches", name)
