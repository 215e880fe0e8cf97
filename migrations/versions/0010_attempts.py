"""A row for each attempt, a row for each engine that died, and what has been counted since."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "attempts",
        sa.Column(
            "job_id", sa.String(64), sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger, nullable=False),
        sa.Column("worker_id", sa.String(64), nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Column("outcome", sa.String(16)),
        sa.Column("error_code", sa.String(32)),
        sa.Column("resumed_tokens", sa.BigInteger, nullable=False),
        sa.Column("kept_tokens", sa.BigInteger, nullable=False),
        sa.Column("wasted_tokens", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "fence"),
    )
    op.create_table(
        "engine_deaths",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("worker_id", sa.String(64), nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("died_at", sa.Double, nullable=False),
        sa.Column("ending", sa.Text, nullable=False),
        sa.Column("job_ids", sa.Text, nullable=False),
    )
    op.create_index("engine_deaths_age", "engine_deaths", ["died_at"])
    op.create_table(
        "tallies",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("label", sa.String(64), nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
    )
    # attempts that go on while this runs, if anybody lets workers run meanwhile
    op.execute(
        "INSERT INTO attempts SELECT id, fence, tenant_id, attempt, worker_id, started_at, "
        "NULL, NULL, NULL, checkpoint_tokens, 0, 0 FROM jobs "
        "WHERE state = 'running' AND worker_id IS NOT NULL AND started_at IS NOT NULL"
    )


def downgrade() -> None:
    op.drop_table("tallies")
    op.drop_table("engine_deaths")
    op.drop_table("attempts")
