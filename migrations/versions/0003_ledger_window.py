"""Which of its transactions a worker's ledger committed last: one in doubt is not repeated."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column(
        "workers",
        sa.Column("ledger_window", sa.BigInteger, nullable=False, server_default="0"),
    )


def downgrade() -> None:
    op.drop_column("workers", "ledger_window")
