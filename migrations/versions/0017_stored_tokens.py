"""What a job's checkpoint held when it was taken from its worker."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.add_column(
        "attempts", sa.Column("stored_tokens", sa.BigInteger, nullable=False, server_default="0")
    )


def downgrade() -> None:
    op.drop_column("attempts", "stored_tokens")
