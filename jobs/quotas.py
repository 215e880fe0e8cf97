"""What a tenant may use, held to in the transaction that would use it.

A tenant's row is locked while its use is counted: of many submissions at once exactly those are
admitted that fit, on both databases. A tenant without quotas costs one look at its row. Every
function takes an open connection and `now`, seconds by the database's clock.

QuotaExceeded
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, literal, select, update

from jobs.models import QUEUE_ORDER, QUEUED, RUNNING, jobs, tenants
from jobs.records import NewJob
from jobs.tenants import QUOTA_COLUMNS, Quotas

MINUTE_S = 60.0
NEVER = float("inf")


class QuotaExceeded(Exception):
    """The tenant has used what it may. `retry_after_s` is None where that depends on its queue,
    and NEVER where what was asked for is more than the whole quota."""

    def __init__(
        self,
        quota: str,
        limit: int,
        *,
        retry_after_s: float | None,
        model: str | None,
        num_over: int,
    ) -> None:
        super().__init__(f"the tenant's quota {quota} is {limit}: {num_over} more than that")
        self.quota = quota
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.model = model
        self.num_over = num_over


def admit(
    connection: Connection, tenant: str, submissions: Sequence[Sequence[NewJob]], *, now: float
) -> list[QuotaExceeded | None]:
    """Count the jobs of each submission that are about to be inserted, one after the other.

    What keeps one from being accepted, for each; nothing of such a one is counted.
    """
    quotas = _quotas(connection, tenant)
    if not quotas.of_submitting:
        return [None] * len(submissions)
    use = _use(connection, tenant, now)
    if (limit := quotas.max_queued_jobs) is not None:
        use.queued = _num_queued(connection, tenant, limit)
    refused = [_count(quotas, use, new_jobs, now) for new_jobs in submissions]
    connection.execute(
        update(tenants)
        .where(tenants.c.id == tenant)
        .values(
            minute_began_at=use.began_at, minute_requests=use.requests, minute_tokens=use.tokens
        )
    )
    return refused


@dataclass(slots=True)
class _Use:
    """What a tenant has used of its minute, and of the queue."""

    began_at: float
    requests: int
    tokens: int
    queued: int = 0


def _count(
    quotas: Quotas, use: _Use, new_jobs: Sequence[NewJob], now: float
) -> QuotaExceeded | None:
    if not new_jobs:
        return None
    tokens = sum(map(max_tokens_of, new_jobs))
    left_s = use.began_at + MINUTE_S - now
    for quota, used, asked, wait_s in (
        ("requests_per_minute", use.requests, len(new_jobs), left_s),
        ("tokens_per_minute", use.tokens, tokens, left_s),
        ("max_queued_jobs", use.queued, len(new_jobs), None),
    ):
        limit = getattr(quotas, quota)
        if limit is not None and used + asked > limit:
            return QuotaExceeded(
                quota, limit, retry_after_s=NEVER if asked > limit else wait_s,
                model=new_jobs[0].model, num_over=used + asked - limit,
            )  # fmt: skip
    use.requests += len(new_jobs)
    use.tokens += tokens
    use.queued += len(new_jobs)
    return None


def check_queued(connection: Connection, tenant: str, num_rows: int, num_promised: int) -> None:
    """Of a batch's rows, beside those queued and those of batches that are still read: whether the
    tenant may have as many. Locks its row. Raises QuotaExceeded."""
    query = select(tenants.c.max_queued_jobs).where(tenants.c.id == tenant)
    limit = connection.scalar(query.with_for_update())
    if limit is None:
        return
    num_over = _num_queued(connection, tenant, limit) + num_promised + num_rows - limit
    if num_over > 0:
        raise QuotaExceeded(
            "max_queued_jobs", limit, retry_after_s=None, model=None, num_over=num_over
        )


def held_back(connection: Connection, ids: Collection[str]) -> set[str]:
    """Of queued jobs about to be claimed, those that would be more than their tenants may run."""
    limits = _running_limits(connection)
    if not limits or not ids:
        return set()
    back: set[str] = set()
    queued = select(jobs.c.id, jobs.c.tenant_id).where(jobs.c.id.in_(ids), QUEUED)
    wanted: dict[str, list[str]] = {}
    for job_id, tenant in connection.execute(queued.order_by(*QUEUE_ORDER)):
        if tenant in limits:
            wanted.setdefault(tenant, []).append(job_id)
    for tenant in sorted(wanted):  # in one order everywhere: two workers cannot wait crosswise
        connection.execute(select(tenants.c.id).where(tenants.c.id == tenant).with_for_update())
        room = max(0, limits[tenant] - _num_running(connection, tenant))
        back |= set(wanted[tenant][room:])
    return back


def at_running_limit(connection: Connection) -> list[str]:
    """Tenants that may not run another job just now: theirs wait in SQL, not on the runway."""
    return [
        tenant
        for tenant, limit in _running_limits(connection).items()
        if _num_running(connection, tenant) >= limit
    ]


def _running_limits(connection: Connection) -> dict[str, int]:
    query = select(tenants.c.id, tenants.c.max_running_jobs).where(
        tenants.c.max_running_jobs.is_not(None)
    )
    return {row.id: row.max_running_jobs for row in connection.execute(query)}


def _quotas(connection: Connection, tenant: str) -> Quotas:
    row = connection.execute(select(*QUOTA_COLUMNS).where(tenants.c.id == tenant)).one_or_none()
    return Quotas() if row is None else Quotas.of(row)


def _use(connection: Connection, tenant: str, now: float) -> _Use:
    """Of the tenant's minute, a new one where the last is over; locks its row."""
    row = connection.execute(
        select(tenants.c.minute_began_at, tenants.c.minute_requests, tenants.c.minute_tokens)
        .where(tenants.c.id == tenant)
        .with_for_update()
    ).one()
    if row.minute_began_at <= now - MINUTE_S:
        return _Use(now, 0, 0)
    return _Use(row.minute_began_at, row.minute_requests, row.minute_tokens)


def _num_queued(connection: Connection, tenant: str, limit: int) -> int:
    """Up to the limit: a tenant that is far above it need not be counted to the end."""
    some = select(literal(1)).where(jobs.c.tenant_id == tenant, QUEUED).limit(limit + 1)
    return connection.scalar(select(func.count()).select_from(some.subquery())) or 0


def _num_running(connection: Connection, tenant: str) -> int:
    query = select(func.count()).where(jobs.c.tenant_id == tenant, RUNNING)
    return connection.scalar(query) or 0


def max_tokens_of(job: NewJob) -> int:
    """At most: those of the prompt, and of every sample's longest output."""
    num_samples = job.body.get("n")
    return job.prompt_tokens + job.max_tokens * (num_samples if type(num_samples) is int else 1)
