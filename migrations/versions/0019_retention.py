"""How long a batch's rows are kept once it has ended, and when they went."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.add_column("batches", sa.Column("rows_ttl_s", sa.BigInteger))
    op.add_column("batches", sa.Column("rows_expire_at", sa.Double))
    op.add_column("batches", sa.Column("rows_removed_at", sa.Double))
    where = sa.text("rows_expire_at IS NOT NULL")
    op.create_index(
        "batches_to_empty", "batches", ["rows_expire_at"],
        sqlite_where=where, postgresql_where=where,
    )  # fmt: skip


def downgrade() -> None:
    op.drop_index("batches_to_empty", "batches")
    for name in ("rows_removed_at", "rows_expire_at", "rows_ttl_s"):
        op.drop_column("batches", name)
