"""The trace that a job's call belongs to."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("trace_parent", sa.String(64)))


def downgrade() -> None:
    op.drop_column("jobs", "trace_parent")
