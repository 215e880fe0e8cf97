"""How many tokens a checkpoint holds, so that a job which ends with it counts them as wasted."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column(
        "jobs",
        sa.Column("checkpoint_tokens", sa.BigInteger, nullable=False, server_default="0"),
    )


def downgrade() -> None:
    op.drop_column("jobs", "checkpoint_tokens")
