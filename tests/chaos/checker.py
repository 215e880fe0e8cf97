"""Judges a run by what clients heard, what the rows say and what processes left behind.

In the manner of Jepsen: nothing here knows which faults there were. Invariants I1 to I12; each has
a test that plants its violation.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jobs.lifecycle import TERMINAL, JobState
from tests.chaos.history import OK, PEEK, Event, History

GROWTH = 0.05  # of descriptors, threads and memory, once all is at rest


@dataclass(frozen=True, slots=True)
class Tried:
    """An attempt, as its own row has it."""

    outcome: str | None  # None: it goes on
    kept_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the database says of a job in the end."""

    id: str
    custom_id: str
    state: str
    fence: int
    attempt: int
    max_attempts: int
    crash_count: int
    text: str | None
    output_tokens: int | None  # usage.completion_tokens of the output
    completion_tokens: int
    wasted_tokens: int
    error_code: str | None
    finished_at: float | None
    tried: tuple[Tried, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """A result that a worker brought to SQL, and what SQL said."""

    job_id: str
    fence: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class Held:
    """A resource before a run and after it, at rest."""

    what: str
    before: float
    after: float
    slack: float = 1.0  # that is no leak: pools fill as they are used


@dataclass(frozen=True, slots=True)
class Recovery:
    kind: str
    seconds: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: str
    what: str


@dataclass(kw_only=True)
class Evidence:
    """All a checker may look at."""

    history: History
    rows: Sequence[Row]
    writes: Sequence[Write] = ()
    texts: Mapping[str, str] = field(default_factory=dict)  # the oracle's, by custom_id
    may_fail: Mapping[str, str | None] = field(default_factory=dict)  # custom_id: its error code
    canaries_found: Sequence[str] = ()  # "canary in place"
    free_blocks: Sequence[tuple[int, int]] = ()  # of each engine at rest: free, all
    held: Sequence[Held] = ()
    recoveries: Sequence[Recovery] = ()
    # of each batch that has ended, ids of the events that came to its tenant's receiver
    webhooks: Mapping[str, Sequence[str]] = field(default_factory=dict)


def check(evidence: Evidence) -> list[Violation]:
    """Every violation found; empty when all promises were kept."""
    return [
        Violation(name, what) for name, invariant in INVARIANTS.items()
        for what in invariant(evidence)
    ]  # fmt: skip


def one_terminal_state(evidence: Evidence) -> Iterator[str]:
    """I1: every accepted job has ended, and none failed that need not."""
    rows = {row.id: row for row in evidence.rows}
    accepted = [*evidence.history.accepted.items()]
    accepted += [(r.custom_id, r.id) for r in evidence.rows if r.custom_id in evidence.history.rows]
    for custom_id, job_id in accepted:
        row = rows.get(job_id)
        if row is None:
            continue  # I4's
        if row.state not in TERMINAL:
            yield f"{job_id} is {row.state}"
        elif row.state in (JobState.FAILED, JobState.EXPIRED):
            expected = evidence.may_fail.get(custom_id, "")
            if row.error_code == "max_attempts" and _spent(row):
                continue
            if expected is not None and row.error_code != expected:
                yield f"{job_id} is {row.state} with {row.error_code}"
        elif row.state == JobState.CANCELLED and not _cancelled(evidence.history, job_id):
            yield f"{job_id} is cancelled, and nobody asked for it"


def one_output(evidence: Evidence) -> Iterator[str]:
    """I2: one accepted result at most for a job, under the fence its row has."""
    rows = {row.id: row for row in evidence.rows}
    taken = Counter(write.job_id for write in evidence.writes if write.accepted)
    for job_id, num in taken.items():
        if num > 1:
            yield f"{job_id} had {num} results accepted"
    for write in evidence.writes:
        row = rows.get(write.job_id)
        if write.accepted and row is not None and row.fence != write.fence:
            yield f"{write.job_id} took a result under fence {write.fence}, and has {row.fence}"
    for row in evidence.rows:
        if (row.text is not None) != (row.state == JobState.SUCCEEDED):
            yield f"{row.id} is {row.state} and has {'an' if row.text else 'no'} output"


def nothing_after_the_end(evidence: Evidence) -> Iterator[str]:
    """I3: what a client was told as the end is what the row says for ever."""
    rows = {row.id: row for row in evidence.rows}
    for _, job_id, state in _told(evidence.history.events):
        row = rows.get(job_id)
        if state in TERMINAL and row is not None and row.state != state:
            yield f"{job_id} was told as {state} and is {row.state}"


def every_acceptance_is_there(evidence: Evidence) -> Iterator[str]:
    """I4: each 202 has its rows, each submission whose answer was lost is there once or not."""
    ids = {row.id for row in evidence.rows}
    for custom_id, job_id in evidence.history.accepted.items():
        if job_id not in ids:
            yield f"{job_id} ({custom_id}) was accepted and is not there"
    counts = Counter(row.custom_id for row in evidence.rows)
    for custom_id in sorted(evidence.history.rows - counts.keys()):
        yield f"row {custom_id} of a batch that was accepted is not there"
    for custom_id, num in counts.items():
        if num > 1:
            yield f"{custom_id} is there {num} times"
    first: dict[str, str] = {}
    for event in evidence.history.events:
        if event.kind == "submit" and event.outcome == OK:
            for job_id, custom_id, _ in event.jobs:
                if first.setdefault(custom_id, job_id) != job_id:
                    yield f"{custom_id} was told as {first[custom_id]} and as {job_id}"


def states_go_forward(evidence: Evidence) -> Iterator[str]:
    """I5: who saw a job end never sees it otherwise. Calls that overlap prove nothing."""
    ended: dict[str, tuple[float, str]] = {}
    for event in sorted(evidence.history.events, key=lambda event: event.ended):
        for job_id, _, state in event.jobs:
            if job_id in ended and event.began > ended[job_id][0] and state != ended[job_id][1]:
                yield f"{job_id} was {ended[job_id][1]} and later {state}"
            if state in TERMINAL:
                ended.setdefault(job_id, (event.ended, state))


def own_writes_are_read(evidence: Evidence) -> Iterator[str]:
    """I6: a client that was told of its job finds it; a cancel that was answered has ended it."""
    known: dict[str, float] = {}
    for event in sorted(evidence.history.events, key=lambda event: event.ended):
        found = event.kind in ("submit", PEEK) or event.status != 404
        if not found and event.began > known.get(event.key, float("inf")):
            yield f"{event.key} was accepted and a {event.kind} found nothing"
        if event.outcome != OK:
            continue
        for job_id, _, state in event.jobs:
            known.setdefault(job_id, event.ended)
            if event.kind == "cancel" and state not in TERMINAL:
                yield f"{job_id} was cancelled and is {state}"


def usage_is_the_outputs(evidence: Evidence) -> Iterator[str]:
    """I7: tokens billed are those of the output, and what its attempts kept; none without one."""
    for row in evidence.rows:
        if row.state in TERMINAL and any(each.outcome is None for each in row.tried):
            yield f"{row.id} is {row.state}, and an attempt of it goes on"
        if row.state == JobState.SUCCEEDED:
            kept = sum(each.kept_tokens for each in row.tried)
            if [each.outcome for each in row.tried].count("succeeded") != 1:
                yield f"{row.id} succeeded in {[each.outcome for each in row.tried]}"
            elif kept != row.completion_tokens:
                yield f"{row.id} bills {row.completion_tokens} tokens, its attempts kept {kept}"
        if row.state == JobState.SUCCEEDED and row.completion_tokens != row.output_tokens:
            yield f"{row.id} bills {row.completion_tokens} tokens, its output {row.output_tokens}"
        if row.state != JobState.SUCCEEDED and row.completion_tokens:
            yield f"{row.id} is {row.state} and bills {row.completion_tokens} tokens"


def texts_are_the_oracles(evidence: Evidence) -> Iterator[str]:
    """I8: each output is what an undisturbed run would have given, byte for byte."""
    for row in evidence.rows:
        expected = evidence.texts.get(row.custom_id)
        if row.state == JobState.SUCCEEDED and expected is not None and row.text != expected:
            yield f"{row.id}: {row.text!r:.60} instead of {expected!r:.60}"


def no_canary_elsewhere(evidence: Evidence) -> Iterator[str]:
    """I9: no prompt turns up in a log, in Redis or in another tenant's answer."""
    yield from evidence.canaries_found
    for event in evidence.history.events:
        if event.kind == PEEK and event.outcome == OK:
            yield f"another tenant was told of {event.key}"


def nothing_leaks(evidence: Evidence) -> Iterator[str]:
    """I10: at rest all KV blocks are free, and processes hold what they held before."""
    for free, num in evidence.free_blocks:
        if free != num:
            yield f"{num - free} of {num} KV blocks are held at rest"
    for held in evidence.held:
        if held.after > held.before * (1 + GROWTH) + held.slack:
            yield f"{held.what} grew from {held.before:g} to {held.after:g}"


def recoveries_in_time(evidence: Evidence) -> Iterator[str]:
    """I11: 95 of 100 faults of a kind are over within their bound."""
    for kind in sorted({each.kind for each in evidence.recoveries}):
        mine = [each for each in evidence.recoveries if each.kind == kind]
        late = sorted((each.seconds for each in mine if each.seconds > each.bound_s), reverse=True)
        if len(late) > len(mine) // 20:
            yield f"{len(late)} of {len(mine)} recoveries from {kind} took too long: {late[:3]}"


def every_end_is_told(evidence: Evidence) -> Iterator[str]:
    """I12: the webhook of each batch's end came at least once, always under one event id."""
    for batch_id, events in evidence.webhooks.items():
        if not events:
            yield f"{batch_id} has ended and nobody was told"
        if len(set(events)) > 1:
            yield f"{batch_id} was told under {len(set(events))} event ids"


INVARIANTS = {
    "I1": one_terminal_state,
    "I2": one_output,
    "I3": nothing_after_the_end,
    "I4": every_acceptance_is_there,
    "I5": states_go_forward,
    "I6": own_writes_are_read,
    "I7": usage_is_the_outputs,
    "I8": texts_are_the_oracles,
    "I9": no_canary_elsewhere,
    "I10": nothing_leaks,
    "I11": recoveries_in_time,
    "I12": every_end_is_told,
}


def stale_writes(evidence: Evidence) -> tuple[int, int]:
    """Results of workers that had lost their job: how many were refused, how many accepted."""
    fences = {row.id: row.fence for row in evidence.rows}
    refused = sum(not write.accepted for write in evidence.writes)
    accepted = sum(
        write.accepted and fences.get(write.job_id, write.fence) != write.fence
        for write in evidence.writes
    )
    return refused, accepted


def _told(events: Iterable[Event]) -> Iterator[tuple[Event, str, str]]:
    for event in events:
        for job_id, _, state in event.jobs:
            yield event, job_id, state


def _spent(row: Row) -> bool:
    """Each of its attempts was taken from it by somebody's death."""
    taken = sum(each.outcome in ("lapsed", "suspect") for each in row.tried)
    return taken == row.attempt == row.max_attempts


def _cancelled(history: History, job_id: str) -> bool:
    """Asked for, whatever became of the answer."""
    return any(event.kind == "cancel" and event.key == job_id for event in history.events)
