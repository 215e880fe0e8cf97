"""Which jobs are to be listed as stored chats; indexes for them, and for rows that started lately."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("stored", sa.BigInteger))
    jobs = sa.table(
        "jobs", sa.column("url", sa.Text), sa.column("body", sa.Text), sa.column("stored")
    )
    op.execute(
        sa.update(jobs)
        .where(
            jobs.c.url == "/v1/chat/completions",
            jobs.c.body.contains('"store":true', autoescape=True),
        )
        .values(stored=1)
    )
    partial("jobs_stored", ["tenant_id", "created_at", "id"], "stored IS NOT NULL")
    started = "row_number IS NOT NULL AND started_at IS NOT NULL"
    partial("jobs_rows_started", ["tenant_id", "started_at"], started)


def downgrade() -> None:
    op.drop_index("jobs_rows_started", "jobs")
    op.drop_index("jobs_stored", "jobs")
    op.drop_column("jobs", "stored")


def partial(name: str, columns: list[str], where: str) -> None:
    text = sa.text(where)
    op.create_index(name, "jobs", columns, sqlite_where=text, postgresql_where=text)
