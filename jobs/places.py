"""A model's queued jobs in the order in which they will run, as far as their rows say.

What is on the runway comes first, then the rest as `jobs.order` takes them. Which of its places is
an eighth only the process that refills the runway knows: here each counts from the front.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Select, func, select

from jobs import order
from jobs.models import QUEUE_ORDER, QUEUED, RUNNING, jobs
from jobs.order import Key, Turn
from jobs.records import JobRecord

MAX_POSITION = 10_000  # further back than this a job has no position
NO_DEADLINE = 1e15  # as the column due_at has it: behind every deadline


@dataclass(frozen=True, slots=True)
class Place:
    """A queued job, and how much it may generate."""

    key: Key
    max_tokens: int
    tenant: str
    on_runway: bool = False

    @property
    def job_id(self) -> str:
        return self.key[3]


def place(job: JobRecord) -> Place:
    due_at = NO_DEADLINE if job.deadline_at is None else job.deadline_at
    key = (-job.priority, due_at, job.created_at, job.id)
    return Place(key, job.max_tokens, job.tenant_id)


class Line:
    """The queue in its order, MAX_POSITION places at most."""

    def __init__(
        self,
        places: Iterable[Place] = (),
        *,
        running: Counter[str] | None = None,  # jobs of each tenant
    ) -> None:
        self._running = Counter[str](running or {})
        by_id = {each.job_id: each for each in places}
        turns = _arranged(by_id.values(), self._running)
        self._fill([(by_id[turn.job_id], turn) for turn in islice(turns, MAX_POSITION)])

    def _fill(self, stands: list[tuple[Place, Turn]]) -> None:
        self._stands = stands
        self._index = {each.job_id: index for index, (each, _) in enumerate(stands)}

    def __len__(self) -> int:
        return len(self._stands)

    def max_tokens(self, start: int) -> list[int]:
        """Of each from the place on."""
        return [each.max_tokens for each, _ in self._stands[start:]]

    def index(self, job_id: str) -> int | None:
        """0 is next; None for one that is not in line."""
        return self._index.get(job_id)

    def with_last(self, places: Sequence[Place]) -> "Line | None":
        """The same with some behind all others; itself for none; None if they are not the last."""
        if not places or len(self) == MAX_POSITION:
            return self
        joining = self._turns(places)
        if self._stands and (self._stands[-1][1].elder or joining[0][1].turn < self._last.turn):
            return None
        longer = Line()
        longer._running = self._running
        longer._stands = [*self._stands, *joining[: MAX_POSITION - len(self)]]
        longer._index = self._index.copy()
        for index in range(len(self), len(longer._stands)):
            longer._index[longer._stands[index][0].job_id] = index
        return longer

    @property
    def _last(self) -> Turn:
        return self._stands[-1][1]

    def with_places(self, places: Sequence[Place]) -> "Line":
        """The same with some that joined since, each where its turn is.

        The others' order stays: one that comes before others of its tenant moves these back only
        when the line is read anew.
        """
        joining = self._turns(places)[::-1]
        stands = []
        for stand in self._stands:
            while joining and not stand[1].elder and joining[-1][1].turn < stand[1].turn:
                stands.append(joining.pop())
            stands.append(stand)
        longer = Line()
        longer._running = self._running
        longer._fill([*stands, *reversed(joining)][:MAX_POSITION])
        return longer

    def _turns(self, places: Sequence[Place]) -> list[tuple[Place, Turn]]:
        """Of those that join, in order."""
        own: dict[str, list[Key]] = {each.tenant: [] for each in places}
        for each, _ in self._stands:
            if each.tenant in own:
                own[each.tenant].append(each.key)
        for keys in own.values():
            keys.sort()
        joining = []
        for each in sorted(places, key=lambda each: each.key):
            ahead = self._running[each.tenant] + bisect_left(own[each.tenant], each.key)
            insort(own[each.tenant], each.key)
            turn = (each.key[0], ahead, each.key)
            joining.append((each, Turn(each.job_id, each.tenant, turn, elder=False)))
        return sorted(joining, key=lambda each: each[1].turn)


def _arranged(places: Iterable[Place], running: Counter[str]) -> Iterator[Turn]:
    """Of jobs in the foreground first what is on the runway, then the others; and so of the rest.

    Among the others in the foreground are those in the background that have waited longest.
    """
    ahead = Counter(running)
    left = {each.job_id: each for each in sorted(places, key=lambda each: each.key)}
    for background in (False, True):
        lane = [each for each in left.values() if (each.key[0] > 0) == background]
        published = [each for each in lane if each.on_runway]
        turns = order.merged(_queues(published), ahead, (), limit=len(published), num_before=0)
        for turn in turns:
            del left[turn.job_id]
            yield turn._replace(turn=(_BEFORE[background], *turn.turn[1:]))
        waiting = {each.job_id: each for each in lane if not each.on_runway}
        turns = _by_turns(waiting.copy(), list(left.values()), ahead)
        while waiting:
            turn = next(turns)
            waiting.pop(turn.job_id, None)
            del left[turn.job_id]
            yield turn


def _by_turns(
    lane: Mapping[str, Place], elders: Sequence[Place], ahead: Counter[str]
) -> Iterator[Turn]:
    """At least all of the lane, and elders at their places."""
    oldest = sorted((each for each in elders if not each.on_runway), key=lambda each: each.key[2:])
    queues = _queues(lane.values())
    if len(queues) == 1 and [each.job_id for each in oldest] == list(lane):
        for each in oldest:  # by age alone, as most queues are
            turn = (each.key[0], ahead[each.tenant], each.key)
            ahead[each.tenant] += 1
            yield Turn(each.job_id, each.tenant, turn, elder=False)
        return
    known = ((each.job_id, each.tenant) for each in oldest)
    yield from order.merged(queues, ahead, known, limit=len(oldest), num_before=0)


def _queues(places: Iterable[Place]) -> dict[str, list[Key]]:
    found: dict[str, list[Key]] = defaultdict(list)
    for each in places:
        found[each.tenant].append(each.key)
    return found


# ranks of what is on a runway: before all that waits for it, behind what runs before that
_BEFORE = {False: -(1 << 31), True: 0.5}


def line(connection: Connection, model: str) -> Line:
    """As it stands. Of a tenant's jobs so many are read as can be among the first."""
    rows = _read(connection, _queued(model).limit(MAX_POSITION))
    if len(rows) == MAX_POSITION and len(tenants := order.waiting_tenants(connection)) > 1:
        # one tenant's jobs may fill all that was read, and another's come between them
        share = MAX_POSITION // len(tenants)
        found = {tenant: _of(connection, model, tenant, share) for tenant in tenants}
        cut = [tenant for tenant, places in found.items() if len(places) == share]
        left = MAX_POSITION - sum(map(len, found.values()))
        for tenant in cut if left > len(cut) else ():
            found[tenant] = _of(connection, model, tenant, share + left // len(cut))
        rows = [each for places in found.values() for each in places]
    running: Counter[str] = Counter()
    if len({each.tenant for each in rows}) > 1:  # else nobody's turn is before another's
        query = select(jobs.c.tenant_id, func.count()).where(jobs.c.model == model, RUNNING)
        for tenant, num in connection.execute(query.group_by(jobs.c.tenant_id)):
            running[tenant] = num
    return Line(rows, running=running)


def _queued(model: str) -> Select[Any]:
    return (
        select(*QUEUE_ORDER, jobs.c.max_tokens, jobs.c.tenant_id, jobs.c.published_at)
        .where(jobs.c.model == model, QUEUED)
        .order_by(*QUEUE_ORDER)
    )


def _of(connection: Connection, model: str, tenant: str, limit: int) -> list[Place]:
    return _read(connection, _queued(model).where(jobs.c.tenant_id == tenant).limit(limit))


def _read(connection: Connection, query: Select[Any]) -> list[Place]:
    return [
        Place(tuple(key), max_tokens, tenant, published_at is not None)
        for *key, max_tokens, tenant, published_at in connection.execute(query)
    ]
