"""Jobs whose tokens are told while they come, and what these have said so far."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("stream", sa.String(8)))
    op.add_column("jobs", sa.Column("pieces", sa.Text))


def downgrade() -> None:
    op.drop_column("jobs", "pieces")
    op.drop_column("jobs", "stream")
