"""The book of jobs a worker holds: how far each is, and every move it can make.

A move changes the book and sends what follows from it: an entry to the ledger, a command to the
engine. Whoever makes several moves that belong together holds `lock` around them. What an event
means, and so which move follows, is the Dispatcher's to know.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from jobs.claims import Checkpoint, Held
from jobs.lifecycle import ErrorCode, JobState
from worker.admission import (
    LOOKAHEAD_OF_CHUNKS,
    UNKNOWN_LOAD,
    EngineRoom,
    LengthGuess,
    Load,
    free_places,
    may_join,
    room_of_foreground,
)
from worker.attempt import Attempt, Holding, Phase
from worker.delivery import Delivery, Ending
from worker.entries import Entry, Finish, HandBack, Waste
from worker.generation import Outcome
from worker.messages import Abort, Add, Command
from worker.streaming import Unstored

logger = logging.getLogger(__name__)

_NOTHING = object()


class Book:
    """Every delivery whose end Celery has not been told, and every attempt that is ours in SQL."""

    def __init__(
        self,
        post: Callable[[Entry], None],  # to the ledger
        send: Callable[[Command], None],  # to the engine
        *,
        max_jobs: int,
        max_crashes: int,
        trace: Callable[[Attempt, Outcome], None] | None = None,  # how each attempt went
    ) -> None:
        self._trace = trace
        self._post = post
        self._send = send
        self._max_jobs = max_jobs
        self._max_crashes = max_crashes
        # reentrant: a signal handler may run in the middle of a call on the main thread
        self.lock = threading.RLock()
        self.deliveries: dict[Delivery, Attempt | None] = {}  # None: its claim is not in
        self.unclaimed: dict[Delivery, None] = {}  # of these, whose rows are not asked for yet
        self.attempts: dict[str, Attempt] = {}  # by key, in the order claimed
        self.room: EngineRoom | None = None  # None: there is no engine to run anything
        self.guess = LengthGuess()
        self.draining = False
        self.shut = False  # the lease has lapsed
        self._blocked = False  # a suspect waits for the engine to empty

    # -- what stands in it

    def open_in(self, *phases: Phase) -> list[Attempt]:
        with self.lock:
            return [attempt for attempt in self.attempts.values() if attempt.phase in phases]

    def is_open(self, attempt: Attempt) -> bool:
        """Still ours, and its end not decided."""
        return attempt.key in self.attempts and attempt.phase is not Phase.ENDING

    def places(self) -> int:
        """How many more messages may be taken from Redis now, of jobs somebody waits for."""
        with self.lock:
            if (room := self._open_room()) is None:
                return 0
            loads = self._loads(background=False)
            room = room_of_foreground(room, self._loads(background=True))
            return free_places(room, loads, self.guess, max_jobs=self._max_jobs)

    def takes_background(self) -> bool:
        """Whether there is room for jobs that nobody waits for, beside all those held."""
        with self.lock:
            if (room := self._open_room()) is None or self.unclaimed:
                return False
            loads = self._loads(background=False) + self._loads(background=True)
            return free_places(room, loads, self.guess, max_jobs=self._max_jobs) > 0

    def may_claim(self) -> bool:
        """Whether there is room for one more of those that are not claimed yet."""
        with self.lock:
            if (room := self._open_room()) is None or not self.unclaimed:
                return False
            loads = self._loads(background=False) + self._loads(background=True)
            ahead = LOOKAHEAD_OF_CHUNKS
            return bool(
                free_places(room, loads, self.guess, max_jobs=self._max_jobs, lookahead=ahead)
            )

    def _open_room(self) -> EngineRoom | None:
        return None if self.draining or self.shut or self._blocked else self.room

    def _loads(self, *, background: bool) -> list[Load]:
        return [
            UNKNOWN_LOAD if attempt is None else attempt.load
            for delivery, attempt in self.deliveries.items()
            if delivery not in self.unclaimed
            and (delivery.background if attempt is None else attempt.job.priority < 0) == background
            and (attempt is None or attempt.phase is not Phase.ENDING)
        ]

    def holding(self) -> Holding:
        """What the lease tells SQL: all that is held, and tokens made since the last call.

        Of a job's first beat only when its first token came: one shorter than a beat never costs
        a checkpoint.
        """
        with self.lock:
            checkpoints: dict[Held, Checkpoint] = {}
            first_tokens: dict[Held, float] = {}
            pieces: dict[Held, Unstored] = {}
            for attempt in self.open_in(Phase.RUNNING):
                num_generated = attempt.num_generated
                if 0 < attempt.num_seen < num_generated:
                    checkpoints[attempt.held] = [list(ids) for ids in attempt.generated]
                    if (unstored := attempt.unstored_pieces) is not None:
                        pieces[attempt.held] = unstored
                if attempt.first_token_at is not None and attempt.num_seen < num_generated:
                    first_tokens[attempt.held] = attempt.first_token_at
                attempt.num_seen = num_generated
            held = [attempt.held for attempt in self.attempts.values()]
            return Holding(
                held=held, checkpoints=checkpoints, first_tokens=first_tokens, pieces=pieces
            )

    def stats(self) -> Mapping[str, int]:
        with self.lock:
            phases = [attempt.phase for attempt in self.attempts.values()]
            counts = {f"jobs_{phase.name.lower()}": phases.count(phase) for phase in Phase}
            return {"jobs_in_hands": len(self.deliveries), **counts}

    # -- moves

    def admit(self) -> None:
        """Give waiting attempts to the engine, in order, as far as they may run together."""
        with self.lock:
            if self.room is None:
                return
            self._blocked = False
            running = [attempt.job.crash_count for attempt in self.open_in(Phase.RUNNING)]
            for attempt in self.open_in(Phase.WAITING):
                if not may_join(
                    attempt.job.crash_count,
                    running,
                    max_crashes=self._max_crashes,
                    max_num_seqs=self.room.max_num_seqs,
                ):
                    self._blocked = True  # with all that came later: they might keep it out
                    return
                running.append(attempt.job.crash_count)
                self._run(attempt)

    def _run(self, attempt: Attempt) -> None:
        assert attempt.prompt is not None
        attempt.phase = Phase.RUNNING
        attempt.running_at = time.monotonic()
        deadline_at = attempt.deadline_at
        self._send(
            Add(
                key=attempt.key,
                prompt_ids=attempt.prompt.token_ids,
                params=attempt.prompt.params,
                priority=attempt.job.priority,
                deadline_s=None if deadline_at is None else deadline_at - time.monotonic(),
                generated=[list(ids) for ids in attempt.generated] if attempt.num_resumed else [],
                cache_salt=attempt.job.tenant_id,
                streams=attempt.streaming is not None,
            )
        )

    def abort(self, attempt: Attempt) -> None:
        """Let the engine drop it between two steps; the attempt stays ours."""
        if attempt.phase is Phase.RUNNING:
            self._send(Abort(attempt.key))

    def finish(self, attempt: Attempt, outcome: Outcome) -> None:
        """Its end is decided and goes into SQL; tokens without a success are waste."""
        if outcome.code is not None and attempt.job.may_retry(outcome.code):
            logger.info(
                "job %s attempt %d failed, to be tried again: reason=%s",
                *(attempt.job.id, attempt.job.attempt, outcome.code),
            )
            self.hand_back(attempt, failed=outcome.code)
            return
        with self.lock:
            attempt.phase = Phase.ENDING
        wasted_tokens = attempt.num_left
        if outcome.state != JobState.SUCCEEDED:
            wasted_tokens += attempt.num_generated
            first = outcome.first_token_at
            outcome = replace(
                outcome,
                completion_tokens=0,
                first_token_at=attempt.first_token_at if first is None else first,
            )
        self._post(
            Finish(
                held=attempt.held,
                outcome=outcome,
                wasted_tokens=wasted_tokens,
                pieces=None if (pieces := attempt.unstored_pieces) is None else pieces.lines,
                answer=lambda accepted: self._finished(attempt, outcome, accepted),
            )
        )

    def _finished(self, attempt: Attempt, outcome: Outcome, accepted: bool) -> None:
        with self.lock:
            del self.attempts[attempt.key]
        job = attempt.job
        if not accepted:
            logger.warning("job %s attempt %d fenced out", job.id, job.attempt)
            self._waste(attempt)
            self.end(attempt.delivery, Ending.DROPPED)
            return
        logger.info(
            "job %s attempt %d %s: reason=%s prompt_tokens=%d completion_tokens=%d",
            *(job.id, job.attempt, outcome.state, outcome.code or outcome.finish_reason),
            *(outcome.prompt_tokens, outcome.completion_tokens),
            extra={"tenant": job.tenant_id},
        )
        if self._trace is not None:
            self._trace(attempt, outcome)
        succeeded = outcome.state == JobState.SUCCEEDED
        ending = Ending.SUCCEEDED if succeeded else Ending.FAILED
        self.end(attempt.delivery, ending, f"{outcome.code}: {outcome.message}")

    def hand_back(
        self, attempt: Attempt, *, crashed: bool = False, failed: ErrorCode | None = None
    ) -> None:
        """Ours no more: another attempt goes on from the tokens it has."""
        with self.lock:
            del self.attempts[attempt.key]
            if not crashed and failed is None:
                self.abort(attempt)
        self._post(
            HandBack(
                held=attempt.held,
                checkpoint=None if attempt.prompt is None else attempt.generated,
                num_tokens=attempt.num_in_all,
                pieces=None if (pieces := attempt.unstored_pieces) is None else pieces.lines,
                first_token_at=attempt.first_token_at,
                crashed=crashed,
                failed=failed,
                answer=lambda: self.end(attempt.delivery, Ending.HANDED_BACK),
            )
        )

    def drop(self, attempt: Attempt) -> None:
        """Its row is not ours any more; what it made was for nothing."""
        with self.lock:
            del self.attempts[attempt.key]
            self.abort(attempt)
            self._waste(attempt)

    def _waste(self, attempt: Attempt) -> None:
        if tokens := attempt.num_in_all:
            first = attempt.first_token_at
            self._post(Waste(held=attempt.held, tokens=tokens, whole=True, first_token_at=first))

    def end(self, delivery: Delivery, ending: Ending, message: str = "") -> None:
        """Tell Celery, unless it has been told."""
        with self.lock:
            if self.deliveries.pop(delivery, _NOTHING) is _NOTHING:
                return
        delivery.end(ending, message)
