"""When a job will probably end: tokens ahead of it over the tokens per second measured lately.

A forecast is an interval, since it rests on a small sample of a changing load: how much of their
`max_tokens` jobs used, how long a token took while they ran, and how the rate of the whole differed
from one quarter of the time looked at to the next. Without a live worker, or with too few jobs
ended lately, there is no forecast.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from sqlalchemy import Connection, func, literal_column, select

from jobs.lifecycle import JobState
from jobs.models import QUEUED, RUNNING, jobs, workers
from jobs.places import Line, line, place
from jobs.records import JobRecord

WINDOW_S = 300.0
MAX_RECENT = 500
MIN_RECENT = 5
PACE_KEPT_S = 1.0
KEPT_S_FOR_EACH = 0.001  # of the jobs in a queue, up to a second
NUM_SLICES = 4
TAIL = 0.1  # share of past jobs outside an interval, at each end
DEVIATIONS = 1.64  # of a sum of many jobs' tokens: the same tails


@dataclass(frozen=True, slots=True)
class Run:
    """One job's time in an engine; `tokens` were made in it."""

    start: float
    end: float
    tokens: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Pace:
    """What the last minutes say of one model. The pairs are a low and a high value."""

    mean_share: float  # of max_tokens that jobs used
    share_deviation: float
    share: tuple[float, float]
    token_s: tuple[float, float]  # seconds a job runs for each of its tokens
    tokens_per_s: tuple[float, float]  # of all jobs together, while any ran
    measured_at: float


class Forecast:
    """A model's queue and pace at one moment."""

    def __init__(self, taken_at: float, pace: Pace | None, line: Line) -> None:
        self.taken_at = taken_at
        self.pace = pace
        self._line = line
        # what stands before the first, before the second, … ; squares for the spread of the sum
        self._tokens_ahead = [0]
        self._squares_ahead = [0]
        self._add_up()

    def __len__(self) -> int:
        return len(self._line)

    def _add_up(self) -> None:
        """All that is in line and not in the sums yet."""
        more = self._line.max_tokens(len(self._tokens_ahead) - 1)
        for ahead, power in ((self._tokens_ahead, 1), (self._squares_ahead, 2)):
            ahead += accumulate((num**power for num in more), initial=ahead.pop())

    def with_jobs(self, jobs: Iterable[JobRecord]) -> "Forecast":
        """The same with jobs that joined the queue since; itself when it knows them all."""
        places = [place(job) for job in jobs if self.position(job) is None]
        longer = self._line.with_last(places)
        if longer is None:
            return Forecast(self.taken_at, self.pace, self._line.with_places(places))
        if longer is self._line:
            return self
        extended = Forecast(self.taken_at, self.pace, Line())
        extended._line = longer  # most come behind all others: adding up all anew costs ms
        extended._tokens_ahead = self._tokens_ahead.copy()
        extended._squares_ahead = self._squares_ahead.copy()
        extended._add_up()
        return extended

    def seconds_for(self, num_jobs: int) -> float:
        """About how long the first so many jobs of the queue take to start; 1 if unknown."""
        if self.pace is None or not self._line:
            return 1.0
        rate = statistics.fmean(self.pace.tokens_per_s)
        ahead = self._tokens_ahead[min(num_jobs, len(self))]
        return ahead * self.pace.mean_share / rate

    def position(self, job: JobRecord) -> int | None:
        """1 is next; None for a job that is not queued, or further back than MAX_POSITION."""
        if job.state != JobState.QUEUED:
            return None
        index = self._line.index(job.id)
        return None if index is None else index + 1

    def eta_s(self, job: JobRecord, now: float) -> tuple[float, float] | None:
        """Seconds until the job's end, at least and at most, None when nobody can know."""
        if self.pace is None or job.max_tokens == 0:
            return None
        low, high = (
            share * job.max_tokens * token_s
            for share, token_s in zip(self.pace.share, self.pace.token_s, strict=True)
        )
        position = self.position(job)
        if job.state == JobState.RUNNING and job.started_at is not None:
            elapsed = now - job.started_at
            low, high = low - elapsed, high - elapsed
        elif job.state == JobState.QUEUED and position is not None:
            wait_low, wait_high = self._wait_s(self.pace, position - 1)
            low, high = low + wait_low, high + wait_high
        else:
            return None
        # a job that runs longer than all others did is past what the past can tell
        return None if high <= 0 else (max(0.0, low), high)

    def start_s(self, job: JobRecord) -> tuple[float, float] | None:
        """Seconds until a queued job starts, at least and at most, None when nobody can know."""
        position = self.position(job)
        if self.pace is None or position is None:
            return None
        return self._wait_s(self.pace, position - 1)

    def _wait_s(self, pace: Pace, num_ahead: int) -> tuple[float, float]:
        mean = pace.mean_share * self._tokens_ahead[num_ahead]
        spread = DEVIATIONS * pace.share_deviation * self._squares_ahead[num_ahead] ** 0.5
        slow, fast = pace.tokens_per_s
        return max(0.0, mean - spread) / fast, (mean + spread) / slow


def forecast(
    connection: Connection, model: str, now: float, earlier: Forecast | None = None
) -> Forecast:
    """The model's queue as it stands and the pace of its last WINDOW_S seconds.

    What is still good of an `earlier` one is not asked for again: the longer the queue, the less
    does a moment matter to it and the more does it cost to read.
    """
    if earlier is not None and now - earlier.taken_at <= min(1.0, len(earlier) * KEPT_S_FOR_EACH):
        return earlier
    pace = earlier.pace if earlier is not None else None
    if pace is None or now - pace.measured_at > PACE_KEPT_S:
        pace = _pace(connection, model, now)
    return Forecast(now, pace, line(connection, model))


def _pace(connection: Connection, model: str, now: float) -> Pace | None:
    has_worker = connection.execute(
        select(func.count()).where(workers.c.model == model, workers.c.lease_until > now)
    ).scalar_one()
    if not has_worker:
        return None
    return measure(_recent(connection, model, now), _running(connection, model), now)


def measure(recent: Sequence[Run], running: Sequence[tuple[float, int]], now: float) -> Pace | None:
    """The pace of `recent` runs; `running` are start and max_tokens of those under way."""
    if len(recent) < MIN_RECENT:
        return None
    shares = sorted(run.tokens / run.max_tokens for run in recent)
    token_s = sorted((run.end - run.start) / run.tokens for run in recent)
    mean_share, mean_token_s = statistics.fmean(shares), statistics.fmean(token_s)
    if mean_token_s <= 0:
        return None
    under_way = [
        Run(start, now, min((now - start) / mean_token_s, max_tokens), max_tokens)
        for start, max_tokens in running
        if start < now
    ]
    rates = _rates([*recent, *under_way], now)
    if not rates:
        return None
    return Pace(
        mean_share=mean_share,
        share_deviation=statistics.pstdev(shares),
        share=_tails(shares),
        token_s=_tails(token_s),
        tokens_per_s=(min(rates), max(rates)),
        measured_at=now,
    )


def _rates(runs: Sequence[Run], now: float) -> list[float]:
    """Tokens per second in each slice of the time looked at, idle moments left out.

    A run's tokens are spread evenly over it, so that a slice gets what was made in it, whenever
    the jobs ended.
    """
    start = max(now - WINDOW_S, min(run.start for run in runs))
    edges = [start + (now - start) * i / NUM_SLICES for i in range(NUM_SLICES + 1)]
    rates = []
    for low, high in pairwise(edges):
        parts = [(max(run.start, low), min(run.end, high), run) for run in runs]
        parts = [(a, b, run) for a, b, run in parts if a < b]
        tokens = sum(run.tokens * (b - a) / (run.end - run.start) for a, b, run in parts)
        busy_s = _union([(a, b) for a, b, _ in parts])
        if busy_s > 0 and tokens > 0:
            rates.append(tokens / busy_s)
    return rates


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the time covered by any of the spans."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _tails(values: Sequence[float]) -> tuple[float, float]:
    """The sorted values without the lowest and highest TAIL of them: what is left at each end."""
    cut = int(len(values) * TAIL)
    return values[cut], values[-1 - cut]


def _recent(connection: Connection, model: str, now: float) -> list[Run]:
    query = (
        select(jobs.c.started_at, jobs.c.finished_at, jobs.c.completion_tokens, jobs.c.max_tokens)
        .where(
            jobs.c.state == literal_column("'succeeded'"),
            jobs.c.model == model,
            jobs.c.finished_at > now - WINDOW_S,
            jobs.c.finished_at > jobs.c.started_at,
            jobs.c.completion_tokens > 0,
            jobs.c.max_tokens > 0,
        )
        .order_by(jobs.c.finished_at.desc())
        .limit(MAX_RECENT)
    )
    return [Run(*row) for row in connection.execute(query)]


def _running(connection: Connection, model: str) -> list[tuple[float, int]]:
    query = (
        select(jobs.c.started_at, jobs.c.max_tokens)
        .where(RUNNING, jobs.c.model == model, jobs.c.started_at.is_not(None))
        .limit(MAX_RECENT)
    )
    return [(started_at, max_tokens) for started_at, max_tokens in connection.execute(query)]


@dataclass(frozen=True, slots=True)
class Backlog:
    """A model's queued jobs of one priority, taken together."""

    oldest_created_at: float
    prompt_tokens: int
    max_tokens: int

    def __add__(self, other: "Backlog") -> "Backlog":
        return Backlog(
            min(self.oldest_created_at, other.oldest_created_at),
            self.prompt_tokens + other.prompt_tokens,
            self.max_tokens + other.max_tokens,
        )


def backlogs(connection: Connection) -> dict[tuple[str, int], Backlog]:
    """The backlog of each model and priority that has one."""
    query = (
        select(
            jobs.c.model,
            jobs.c.priority,
            func.min(jobs.c.created_at),
            func.sum(jobs.c.prompt_tokens),
            func.sum(jobs.c.max_tokens),
        )
        .where(QUEUED)
        .group_by(jobs.c.model, jobs.c.priority)
    )
    return {
        (model, priority): Backlog(oldest, int(prompt_tokens), int(max_tokens))
        for model, priority, oldest, prompt_tokens, max_tokens in connection.execute(query)
    }
