"""The worker's writes: one thread, one transaction for all that came up within a short window.

An entry is posted from any thread and answered on the ledger's own, after the commit: a message is
acknowledged, a result announced, a place freed only for what SQL has. When the database is away
the window is kept and tried again until it is back; nothing is answered meanwhile, so nothing is
lost and nothing is falsely acknowledged.

A commit whose outcome is unknown (the connection broke) is not repeated blindly: what the lost
answer would have said is read back from the rows. What no fence guards, tokens that are added up,
is written with a number of its window in the worker's row, which says whether it is in. See
Kleppmann, "How to do distributed locking", for why the store has to compare the fence.
"""

import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from jobs import accounting, attempts, claims, finishing, quotas, store
from jobs.accounting import Wasted
from jobs.attempts import Count
from jobs.claims import ClaimedJob, Held
from jobs.database import Database, Moment, transient, trouble
from jobs.finishing import JobResult
from jobs.lifecycle import TERMINAL, JobState, error_object
from jobs.retries import Backoff
from worker.entries import (
    Cancel,
    Claim,
    Died,
    Entry,
    Finish,
    Flush,
    HandBack,
    Insert,
    PutBack,
    Waste,
)
from worker.entries import Count as Counting
from worker.guard import start_thread

STOP_S = 5.0
LAST_S = 1.0  # of these, for what came last: tokens of a step that ended meanwhile
STRANGERS_PAUSE_S = 60.0  # between two warnings of messages that are not ours
RETRY_WAITS_S = (0.05, 0.2, 0.5, 1.0)

logger = logging.getLogger(__name__)


_E = TypeVar("_E", bound=Entry)


@dataclass(slots=True)
class _Written:
    """What a transaction did; told after its commit."""

    answers: list[Callable[[], None]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # jobs in a terminal state since
    num_stale: int = 0  # results that the fence refused


class Ledger:
    """The only writer of this worker's jobs, but for the lease."""

    def __init__(
        self,
        database: Database,
        *,
        worker_id: str,
        window_s: float,
        max_rows: int,
        max_crashes: int,
        backoff: Backoff = Backoff(),  # noqa: B008 (frozen)
        announce: Callable[[Sequence[str]], None],  # ids that ended, after the commit
    ) -> None:
        self._database = database
        self._worker_id = worker_id
        self._window_s = window_s
        self._max_rows = max_rows
        self._max_crashes = max_crashes
        self._backoff = backoff
        self._announce = announce
        # SimpleQueue: its put may be called from a signal handler that interrupted another put
        self._inbox: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._abandoned = threading.Event()
        self._strangers_due = 0.0
        # of any number, so that two ledgers of one worker have none in common
        self._window_number = secrets.randbits(48)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = start_thread("ledger", self._run)

    def post(self, entry: Entry) -> None:
        """From any thread; never blocks."""
        self._inbox.put(entry)

    def flush(self) -> threading.Event:
        """Set once everything posted so far is in SQL and answered."""
        done = threading.Event()
        self.post(Flush(answer=done.set))
        return done

    def stop(self) -> None:
        """End the thread; whatever is not in SQL soon is left to the lease."""
        if self._thread is not None:
            self.flush().wait(LAST_S)
        self._abandoned.set()
        self.flush()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        committed_at = 0.0
        while not self._abandoned.is_set():
            window = self._collect(until=committed_at + self._window_s)
            written = self._commit(window)
            committed_at = time.monotonic()
            if written is None:
                return
            if written.ended:
                self._announce(written.ended)
            for answer in written.answers:
                answer()

    def _collect(self, *, until: float) -> list[Entry]:
        """At least one entry, and all that come before `until`: a lone one waits for nobody."""
        window = [self._inbox.get()]
        while len(window) < self._max_rows:
            try:
                window.append(self._inbox.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                break
        return window

    def _commit(self, window: list[Entry]) -> _Written | None:
        """One transaction, tried until it is known to be in; None when the worker gave up."""
        self._window_number += 1
        for tries in itertools.count():
            try:
                with self._database.begin() as connection:
                    written = self._write_once(connection, window, again=tries > 0)
            except SQLAlchemyError as error:
                if not transient(error):
                    raise
                if tries == 0:
                    logger.warning(
                        "database away, %d entries wait: %s", len(window), trouble(error)
                    )
                if self._abandoned.wait(RETRY_WAITS_S[min(tries, len(RETRY_WAITS_S) - 1)]):
                    return None
            else:
                if tries:
                    logger.warning("database back after %d tries", tries)
                return written
        raise AssertionError("unreachable")

    def _write_once(self, connection: Connection, window: list[Entry], *, again: bool) -> _Written:
        """A window that adds something up is marked; one of an earlier try is found by its mark.

        The others' statements change nothing if they come twice.
        """
        adds_up = any(isinstance(entry, Waste | HandBack) for entry in window)
        marked = again and claims.marked_window(connection, self._worker_id) == self._window_number
        was_in = again and (marked or not adds_up)
        moment = self._database.moment(connection)
        written = self._write(connection, window, moment, was_in=was_in, marked=marked)
        if (
            adds_up or written.num_stale
        ):  # last: by now it waits for no row, and whoever waits for this one holds none
            claims.mark_window(connection, self._worker_id, self._window_number)
        return written

    def _write(
        self,
        connection: Connection,
        window: list[Entry],
        moment: Moment,
        *,
        was_in: bool,
        marked: bool,
    ) -> _Written:
        """All entries of a window. `was_in`: an earlier try was, or may have been, committed;
        `marked`: it was, and has left a mark.

        Rows that came whole in a message come first, then cancels, then claims: a job revoked in
        the window it arrived in has a row to cancel, and never runs.
        """
        written = _Written()
        now = moment.now
        for died in _of(Died, window):
            attempts.record_death(
                connection,
                died.id,
                worker_id=self._worker_id,
                model=died.model,
                ending=died.ending,
                job_ids=died.job_ids,
                now=now,
            )
        self._hand_back(connection, _of(HandBack, window), moment, was_in, written)
        self._finish(connection, _of(Finish, window), moment, was_in, marked, written)
        new_jobs = [
            entry.new_job
            for entry in window
            if isinstance(entry, Insert | Claim | Cancel) and entry.new_job is not None
        ]
        store.insert_new(connection, new_jobs, now=now)
        written.answers += [insert.answer for insert in _of(Insert, window)]
        for cancel in _of(Cancel, window):
            if finishing.revoke(connection, cancel.job_id, now=now):
                written.ended.append(cancel.job_id)
            written.answers.append(cancel.answer)
        if not was_in:
            for account, whole in (
                (accounting.account_left, True),
                (accounting.account_wasted, False),
            ):
                account(
                    connection,
                    [
                        _wasted(waste.held, waste.tokens, waste.first_token_at, moment)
                        for waste in _of(Waste, window)
                        if waste.whole is whole
                    ],
                )
        accounting.count_prompts(connection, [count.counted for count in _of(Counting, window)])
        put_back = _of(PutBack, window)
        claims.put_back(connection, [entry.job_id for entry in put_back])
        written.answers += [entry.answer for entry in put_back]
        self._claim(connection, _of(Claim, window), now, was_in, written)
        written.answers += [flush.answer for flush in _of(Flush, window)]
        return written

    def _hand_back(
        self,
        connection: Connection,
        entries: list[HandBack],
        moment: Moment,
        was_in: bool,
        written: _Written,
    ) -> None:
        for crashed, failed in ((False, False), (False, True), (True, False)):
            batch = [
                entry
                for entry in entries
                if (entry.crashed, entry.failed is not None) == (crashed, failed)
            ]
            states = claims.release(
                connection,
                [entry.held for entry in batch],
                now=moment.now,
                crashed=crashed,
                max_crashes=self._max_crashes,
                checkpoints={
                    entry.held: entry.checkpoint for entry in batch if entry.checkpoint is not None
                },
                first_tokens={
                    entry.held: moment.at(entry.first_token_at)
                    for entry in batch
                    if entry.first_token_at is not None
                },
                pieces={entry.held: entry.pieces for entry in batch if entry.pieces is not None},
                failures={e.held: e.failed for e in batch if e.failed} if failed else None,
                backoff=self._backoff,
            )
            written.ended += [held.id for held, state in states.items() if state in TERMINAL]
            written.answers += [entry.answer for entry in batch]
            if not was_in:  # one not released had been lost before, with its newest tokens
                late = [
                    _wasted(e.held, e.num_tokens, e.first_token_at, moment)
                    for e in batch
                    if e.held not in states
                ]
                accounting.account_left(connection, late)
                attempts.count(connection, {(Count.STALE_WRITES, "hand_back"): len(late)})

    def _finish(
        self,
        connection: Connection,
        entries: list[Finish],
        moment: Moment,
        was_in: bool,
        marked: bool,
        written: _Written,
    ) -> None:
        accepted = finishing.finish(
            connection, [_result(entry, moment) for entry in entries], now=moment.now
        )
        if was_in:
            refused = [entry.held for entry in entries if entry.held not in accepted]
            accepted |= finishing.ended_under(connection, refused)
        written.num_stale = sum(entry.held not in accepted for entry in entries)
        if not marked:
            attempts.count(connection, {(Count.STALE_WRITES, "result"): written.num_stale})
        written.ended += sorted(held.id for held in accepted)
        for entry in entries:
            written.answers.append(_bind(entry.answer, entry.held in accepted))

    def _claim(
        self,
        connection: Connection,
        entries: list[Claim],
        now: float,
        was_in: bool,
        written: _Written,
    ) -> None:
        if not entries:
            return
        claimed: list[ClaimedJob] = []
        ids = [entry.job_id for entry in entries]
        if claims.lease_stands(connection, self._worker_id, now=now):
            back = quotas.held_back(connection, ids, now=now)
            claims.put_back(connection, sorted(back))
            mine = [job_id for job_id in ids if job_id not in back]
            claimed = claims.claim(connection, mine, worker_id=self._worker_id, now=now)
        else:
            # asleep for longer than the lease: a claim would be taken away by the next sweep, at
            # the price of an attempt; after the next beat all is well again
            logger.warning("the lease has lapsed: %d jobs not claimed", len(ids))
            claims.put_back(connection, ids)
        if was_in:
            claimed += claims.claimed_by(connection, ids, worker_id=self._worker_id)
        by_id = {job.id: job for job in claimed}
        self._tell_of_strangers(connection, [job_id for job_id in ids if job_id not in by_id])
        for entry in entries:
            # the second message of one job gets None, as it would in a later window
            written.answers.append(_bind(entry.answer, by_id.pop(entry.job_id, None), now))

    def _tell_of_strangers(self, connection: Connection, refused: list[str]) -> None:
        """A message that names no row of ours was sent by another deployment."""
        if not refused or time.monotonic() < self._strangers_due:
            return
        if strangers := store.unknown(connection, refused):
            self._strangers_due = time.monotonic() + STRANGERS_PAUSE_S
            logger.warning(
                "%d messages name jobs that this database does not have, such as %s: does another "
                "deployment use this Redis with the same TOKENMILL_KEY_PREFIX?",
                *(len(strangers), min(strangers)),
            )


def _of(kind: type[_E], window: list[Entry]) -> list[_E]:
    return [entry for entry in window if isinstance(entry, kind)]


def _bind(answer: Callable[..., None], *values: object) -> Callable[[], None]:
    return lambda: answer(*values)


def _result(entry: Finish, moment: Moment) -> JobResult:
    outcome = entry.outcome
    succeeded = outcome.state == JobState.SUCCEEDED
    assert succeeded == (outcome.code is None)
    return JobResult(
        id=entry.held.id,
        fence=entry.held.fence,
        state=outcome.state,
        output=outcome.output,
        error=None
        if outcome.code is None
        else error_object(outcome.code, outcome.message, param=outcome.param),
        finish_reason=outcome.finish_reason,
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        completion_tokens=outcome.completion_tokens,
        wasted_tokens=entry.wasted_tokens,
        pieces=entry.pieces,
        first_token_at=_sql_time(outcome.first_token_at, moment),
    )


def _wasted(held: Held, tokens: int, first_token_at: float | None, moment: Moment) -> Wasted:
    return Wasted(held.id, tokens, _sql_time(first_token_at, moment), held.fence)


def _sql_time(at: float | None, moment: Moment) -> float | None:
    return None if at is None else moment.at(at)
