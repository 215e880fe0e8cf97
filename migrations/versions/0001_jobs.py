"""Jobs, workers, idempotency keys."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("custom_id", sa.Text),
        sa.Column("batch_id", sa.String(64)),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("priority", sa.BigInteger, nullable=False),
        sa.Column("deadline_at", sa.Double),
        sa.Column("max_attempts", sa.BigInteger, nullable=False),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("rank", sa.BigInteger, sa.Computed("-priority", persisted=True), nullable=False),
        sa.Column(
            "due_at",
            sa.Double,
            sa.Computed("coalesce(deadline_at, 1e15)", persisted=True),
            nullable=False,
        ),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.BigInteger, nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("crash_count", sa.BigInteger, nullable=False),
        sa.Column("worker_id", sa.String(64)),
        sa.Column("checkpoint", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("published_at", sa.Double),
        sa.Column("started_at", sa.Double),
        sa.Column("first_token_at", sa.Double),
        sa.Column("finished_at", sa.Double),
        sa.Column("output", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("finish_reason", sa.String(32)),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("max_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("wasted_tokens", sa.BigInteger, nullable=False),
    )
    partial("jobs_queue", ["model", "rank", "due_at", "created_at", "id"], "state = 'queued'")
    partial("jobs_due", ["deadline_at"], "state = 'queued' AND deadline_at IS NOT NULL")
    partial("jobs_running", ["worker_id"], "state = 'running'")
    partial("jobs_custom_id", ["custom_id"], "custom_id IS NOT NULL")
    partial("jobs_batch_id", ["batch_id"], "batch_id IS NOT NULL")
    op.create_index("jobs_newest", "jobs", ["created_at", "id"])
    op.create_index("jobs_state", "jobs", ["model", "state", "finished_at"])
    if op.get_bind().dialect.name == "postgresql":
        # every job is updated several times: room for it on its page, vacuum before it bloats
        op.execute(
            "ALTER TABLE jobs SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, "
            "autovacuum_analyze_scale_factor = 0.02)"
        )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("hostname", sa.Text, nullable=False),
        sa.Column("pid", sa.BigInteger, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("max_num_seqs", sa.BigInteger, nullable=False),
        sa.Column("kv_tokens", sa.BigInteger, nullable=False),
        sa.Column("max_model_len", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("seen_at", sa.Double, nullable=False),
        sa.Column("lease_until", sa.Double, nullable=False),
        sa.Column("stats", sa.Text, nullable=False),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("body_sha256", sa.LargeBinary, nullable=False),
        sa.Column("job_ids", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_index("idempotency_keys_age", "idempotency_keys", ["created_at"])


def downgrade() -> None:
    op.drop_table("idempotency_keys")
    op.drop_table("workers")
    op.drop_table("jobs")


def partial(name: str, columns: list[str], where: str) -> None:
    op.create_index(
        name, "jobs", columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where)
    )
