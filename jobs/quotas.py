"""What a tenant may use, held to in the transaction that would use it.

A tenant's row is locked while its use is counted: of many submissions at once exactly those are
admitted that fit, on both databases. A tenant without quotas costs one look at its row. Every
function takes an open connection and `now`, seconds by the database's clock.

QuotaExceeded
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, case, func, literal, or_, select, update

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


def held_back(connection: Connection, ids: Collection[str], *, now: float) -> set[str]:
    """Of queued jobs about to be claimed, those that would be more than their tenants may run, and
    rows of batches beyond what their tenants' minute has room for."""
    limits = _limits(connection)
    if not limits or not ids:
        return set()
    back: set[str] = set()
    wanted: dict[str, list[_Wanted]] = {}
    columns = (jobs.c.id, jobs.c.tenant_id, jobs.c.row_number, jobs.c.prompt_tokens)
    queued = select(*columns, jobs.c.max_tokens).where(jobs.c.id.in_(ids), QUEUED)
    for job_id, tenant, row, *tokens in connection.execute(queued.order_by(*QUEUE_ORDER)):
        if tenant in limits:
            wanted.setdefault(tenant, []).append(_Wanted(job_id, row is not None, sum(tokens)))
    for tenant in sorted(wanted):  # in one order everywhere: two workers cannot wait crosswise
        connection.execute(select(tenants.c.id).where(tenants.c.id == tenant).with_for_update())
        back |= _beyond(connection, tenant, limits[tenant], wanted[tenant], now)
    return back


@dataclass(frozen=True, slots=True)
class _Wanted:
    job_id: str
    is_row: bool  # of a batch
    tokens: int


def _beyond(
    connection: Connection, tenant: str, limits: Quotas, wanted: Sequence[_Wanted], now: float
) -> set[str]:
    room: float = NEVER
    if limits.max_running_jobs is not None:
        room = limits.max_running_jobs - _num_running(connection, tenant)
    minute = _row_minute(connection, tenant, limits, now)
    back = set()
    for each in wanted:
        if room <= 0 or (each.is_row and minute.is_full(limits)):
            back.add(each.job_id)
            continue
        room -= 1
        if each.is_row:
            minute = _RowMinute(minute.rows + 1, minute.tokens + each.tokens)
    return back


def at_limit(connection: Connection, *, now: float) -> tuple[list[str], list[str]]:
    """Tenants that may not run another job just now: theirs wait in SQL, not on the runway. And
    those whose batches may not start another row: their rows wait likewise."""
    limits = _limits(connection)
    resting = [
        tenant
        for tenant, each in limits.items()
        if each.max_running_jobs is not None
        and _num_running(connection, tenant) >= each.max_running_jobs
    ]
    full = [
        tenant
        for tenant, each in limits.items()
        if _row_minute(connection, tenant, each, now).is_full(each)
    ]
    return resting, full


@dataclass(frozen=True, slots=True)
class _RowMinute:
    """Rows of a tenant's batches that started in the last minute, and their tokens: of those that
    have ended what they took, of others what they may."""

    rows: int = 0
    tokens: int = 0

    def is_full(self, limits: Quotas) -> bool:
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        return (requests is not None and self.rows >= requests) or (
            tokens is not None and self.tokens >= tokens
        )


def _row_minute(connection: Connection, tenant: str, limits: Quotas, now: float) -> _RowMinute:
    if limits.requests_per_minute is None and limits.tokens_per_minute is None:
        return _RowMinute()
    output = case((jobs.c.finished_at.is_(None), jobs.c.max_tokens), else_=jobs.c.completion_tokens)
    row = connection.execute(
        select(func.count(), func.coalesce(func.sum(jobs.c.prompt_tokens + output), 0)).where(
            jobs.c.tenant_id == tenant,
            jobs.c.row_number.is_not(None),
            jobs.c.started_at > now - MINUTE_S,
        )
    ).one()
    return _RowMinute(row[0], int(row[1]))


_LIMITED = select(tenants.c.id, *QUOTA_COLUMNS).where(
    or_(
        tenants.c.max_running_jobs.is_not(None),
        tenants.c.requests_per_minute.is_not(None),
        tenants.c.tokens_per_minute.is_not(None),
    )
)


def _limits(connection: Connection) -> dict[str, Quotas]:
    """Of tenants whose jobs may have to wait for their start."""
    return {row.id: Quotas.of(row) for row in connection.execute(_LIMITED)}


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
