"""In which order a model's queued jobs come onto the runway.

By priority first. Among jobs of one priority tenants take turns: next is the one with the fewest
jobs ahead, running or on the runway. Of one tenant's jobs the deadline decides, then age. And each
EIGHTH place goes to the job that has waited longest, whatever its priority and whosever it is: with
n jobs older than itself a job waits for at most 8 (n + 1) others, however many come before it.

Jobs in the background, of a priority below 0, have a runway of their own, in the same order; the
oldest of them have their eighth of the other one too, so that they go on beside any number of jobs
that somebody waits for.

This is deficit round robin (Shreedhar and Varghese 1995) in units of jobs, its counters recomputed
from rows. Functions take an open connection and `now`, seconds by the database's clock.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Integer,
    Select,
    Text,
    bindparam,
    func,
    literal,
    or_,
    select,
)

from jobs import batches, quotas
from jobs.models import BACKGROUND, FOREGROUND, QUEUE_ORDER, QUEUED, RUNNING, jobs
from jobs.retries import due

EIGHTH = 8
MOST_TENANTS = 500  # whose jobs are compared; of more, the others' jobs come by their age alone


def best(
    connection: Connection,
    model: str,
    *,
    limit: int,
    now: float,
    num_before: int,
    background: bool | None = None,  # None: of both runways together
) -> list[str]:
    """Ids of the next `limit` jobs that are not on the runway yet, in order.

    `num_before`: how many the caller has taken of this model so far, of which every eighth was the
    oldest.
    """
    if not (tenants := waiting_tenants(connection)):
        return []
    resting, full = quotas.at_limit(connection, now=now)
    tenants = [tenant for tenant in tenants if tenant not in resting]
    waiting = _Waiting(model, batches.paused(connection), full, now, background)
    heads = {
        tenant: found
        for tenant in tenants
        if (found := _of_tenant(connection, tenant, waiting, limit=limit))
    }
    ahead = _ahead(connection, model) if len(heads) > 1 else Counter()
    elders: Sequence[tuple[str, str, int]] = ()
    if any_eighth(num_before, limit) or len(tenants) >= MOST_TENANTS - len(resting):
        # as many as there are places: some of them may come in another one
        if heads and background is False:
            waiting = replace(waiting, background=None)
        elders = _oldest(connection, waiting, resting, limit=limit)
    guests = {job_id for job_id, _, priority in elders if background is False and priority < 0}
    oldest = ((job_id, tenant) for job_id, tenant, _ in elders)
    turns = merged(heads, ahead, oldest, limit=limit, num_before=num_before, guests=guests)
    return [turn.job_id for turn in turns]


def any_eighth(num_before: int, limit: int) -> bool:
    return (num_before + limit) // EIGHTH > num_before // EIGHTH


Key = tuple[int, float, float, str]  # as QUEUE_ORDER: rank, due_at, created_at, id


class Turn(NamedTuple):
    """A job's place in the order, and why it has it."""

    job_id: str
    tenant: str
    # by which it came: of places that no elder took these ascend
    turn: tuple[float, int, Key]  # rank, the tenant's jobs before it, its own key
    elder: bool  # it came by its age alone


def merged(
    queues: Mapping[str, Sequence[Key]],  # of each tenant its best, in order
    ahead: Counter[str],  # jobs of each tenant that run or are on the runway; added to
    oldest: Iterable[tuple[str, str]],  # ids and tenants
    *,
    limit: int,
    num_before: int,
    guests: Collection[str] = (),  # of the oldest: they come at eighth places and no other
) -> Iterator[Turn]:
    """The order that the rule makes of them."""
    keys = {key[3]: key for queue in queues.values() for key in queue}
    waiting = {tenant: iter(queue) for tenant, queue in queues.items()}
    taken: set[str] = set()
    elders = iter(oldest)
    heads: dict[str, tuple[float, int, Key]] = {}
    heap: list[tuple[tuple[float, int, Key], str]] = []  # heads, and some that are no more

    def advance(tenant: str) -> None:
        following = next((key for key in waiting[tenant] if key[3] not in taken), None)
        if following is None:
            heads.pop(tenant, None)
        else:
            put(tenant, following)

    def put(tenant: str, key: Key) -> None:
        heads[tenant] = (key[0], ahead[tenant], key)
        heapq.heappush(heap, (heads[tenant], tenant))

    for tenant in waiting:
        advance(tenant)
    for place in range(num_before, num_before + limit):
        elder = None
        if place % EIGHTH == EIGHTH - 1:
            elder = next((each for each in elders if each[0] not in taken), None)
        elif not heads:
            own = (each for each in elders if each[0] not in guests)
            elder = next((each for each in own if each[0] not in taken), None)
        while heap and heads.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        if elder is not None:
            job_id, tenant = elder
            key = keys.get(job_id, _LAST)
            turn: tuple[float, int, Key] = (key[0], ahead[tenant], key)
        elif heap:
            turn, tenant = heap[0]
            job_id = turn[2][3]
        else:
            return
        taken.add(job_id)
        ahead[tenant] += 1
        if tenant in heads:
            head = heads[tenant][2]
            if head[3] == job_id:
                advance(tenant)
            else:
                put(tenant, head)
        yield Turn(job_id, tenant, turn, elder is not None)


_LAST: Key = (1 << 31, 0.0, 0.0, "")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Which jobs may come onto a runway now."""

    model: str
    paused: Sequence[str]  # batches
    full: Sequence[str]  # tenants of whose batches no row may start now
    now: float
    background: bool | None

    @property
    def shape(self) -> tuple[bool, bool, bool | None]:
        return bool(self.paused), bool(self.full), self.background

    @property
    def parameters(self) -> dict[str, Any]:
        found: dict[str, Any] = {"of_model": self.model, "at": self.now}
        if self.paused:
            found["paused"] = self.paused
        if self.full:
            found["full"] = self.full
        return found


# statements are made once: making one takes longer than most of them run


def _that_wait(
    query: Select[Any], any_paused: bool, any_full: bool, background: bool | None
) -> Select[Any]:
    query = query.where(
        jobs.c.model == bindparam("of_model", type_=Text()),
        QUEUED,
        jobs.c.published_at.is_(None),
        due(bindparam("at", type_=Double())),
    )
    if any_paused:
        paused: ColumnElement[str] = bindparam("paused", expanding=True)
        query = query.where(or_(jobs.c.batch_id.is_(None), jobs.c.batch_id.not_in(paused)))
    if any_full:
        others = jobs.c.tenant_id.not_in(bindparam("full", expanding=True))
        query = query.where(or_(jobs.c.row_number.is_(None), others))
    if background is not None:
        query = query.where(BACKGROUND if background else FOREGROUND)
    return query


@cache
def _tenant_query(*shape: Any) -> Select[Any]:
    query = select(*QUEUE_ORDER).where(jobs.c.tenant_id == bindparam("of_tenant", type_=Text()))
    return _that_wait(query.order_by(*QUEUE_ORDER).limit(_MOST), *shape)


@cache
def _oldest_query(any_resting: bool, *shape: Any) -> Select[Any]:
    query = select(jobs.c.id, jobs.c.tenant_id, jobs.c.priority)
    if any_resting:
        query = query.where(jobs.c.tenant_id.not_in(bindparam("resting", expanding=True)))
    return _that_wait(query.order_by(jobs.c.created_at).limit(_MOST), *shape)


_MOST: ColumnElement[int] = bindparam("most", type_=Integer())


def waiting_tenants(connection: Connection) -> list[str]:
    """Those with queued jobs, of whatever model: one step into the index for each."""
    return list(connection.scalars(_tenants_query()))


@cache
def _tenants_query() -> Select[str]:
    first = select(func.min(jobs.c.tenant_id).label("tenant")).where(QUEUED)
    steps = first.cte("steps", recursive=True)
    following = (
        select(func.min(jobs.c.tenant_id))
        .where(QUEUED, jobs.c.tenant_id > steps.c.tenant)
        .scalar_subquery()
    )
    steps = steps.union_all(select(following).where(steps.c.tenant.is_not(None)))
    return select(steps.c.tenant).where(steps.c.tenant.is_not(None)).limit(MOST_TENANTS)


def _of_tenant(connection: Connection, tenant: str, waiting: _Waiting, *, limit: int) -> list[Key]:
    parameters = waiting.parameters | {"of_tenant": tenant, "most": limit}
    return [tuple(row) for row in connection.execute(_tenant_query(*waiting.shape), parameters)]


def _oldest(
    connection: Connection, waiting: _Waiting, resting: Sequence[str], *, limit: int
) -> list[tuple[str, str, int]]:
    """Ids, tenants and priorities."""
    query = _oldest_query(bool(resting), *waiting.shape)
    parameters = waiting.parameters | {"most": limit} | ({"resting": resting} if resting else {})
    return [(row.id, row.tenant_id, row.priority) for row in connection.execute(query, parameters)]


def _ahead(connection: Connection, model: str) -> Counter[str]:
    """Of each tenant, how many run or are on the runway."""
    num: Counter[str] = Counter()
    # above 0: worded as a range, which an index answers on both databases
    for state in (RUNNING, QUEUED & (jobs.c.published_at > literal(0.0))):
        query = select(jobs.c.tenant_id, func.count()).where(jobs.c.model == model, state)
        for tenant, count in connection.execute(query.group_by(jobs.c.tenant_id)):
            num[tenant] += count
    return num
