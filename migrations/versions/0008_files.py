"""Files that clients upload, and those made for them."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
    )
    op.create_index("files_of", "files", ["tenant_id", "created_at", "id"])
    where = sa.text("expires_at IS NOT NULL")
    op.create_index(
        "files_to_expire", "files", ["expires_at"], sqlite_where=where, postgresql_where=where
    )


def downgrade() -> None:
    op.drop_table("files")
