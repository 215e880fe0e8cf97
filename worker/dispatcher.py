"""What happens to the jobs a worker holds: from the message, through claim and engine, to the row.

Every event (a message, a claim that committed, a step, a death, a lost lease, a limit) comes in
here, from whichever thread it happens on, under one lock; what follows from it goes out to the
ledger, the engine or Celery as a message that never blocks. An attempt is the worker's from the
commit of its claim until the commit of its end, or until it is dropped because it is ours no more.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from engine.tokenizer import Tokenizer
from jobs.claims import Checkpoint, ClaimedJob, Held
from jobs.lifecycle import ErrorCode, JobState
from worker.admission import UNKNOWN_LOAD, EngineRoom, LengthGuess, free_places, may_join
from worker.attempt import Attempt, Holding, Phase
from worker.delivery import Delivery, Ending
from worker.generation import Limits, Outcome, Prompt, Refusal, outcome_of, prepare
from worker.guard import start_thread
from worker.ledger import Cancel, Claim, Entry, Finish, HandBack, Insert, Waste
from worker.messages import Abort, Add, Command, Ended, Ready, Refused, Stepped
from worker.sent_job import SentJob

logger = logging.getLogger(__name__)


class Dispatcher:
    """Owns every attempt of this worker."""

    def __init__(
        self,
        *,
        model: str,
        tokenizer: Tokenizer,
        post: Callable[[Entry], None],  # to the ledger
        send: Callable[[Command], None],  # to the engine
        wake: Callable[[], None],  # the event loop: there may be room for another message
        max_jobs: int,
        max_crashes: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._post = post
        self._send = send
        self._wake = wake
        self._max_jobs = max_jobs
        self._max_crashes = max_crashes
        # reentrant: a signal handler may run in the middle of a call on the main thread
        self._lock = threading.RLock()
        self._deliveries: dict[Delivery, Attempt | None] = {}
        self._revoked: set[Delivery] = set()  # before their claim committed
        self._attempts: dict[str, Attempt] = {}  # by key, in the order claimed
        self._to_prepare: queue.SimpleQueue[Attempt] = queue.SimpleQueue()
        self._limits: Limits | None = None
        self._room: EngineRoom | None = None  # None: there is no engine to run anything
        self._guess = LengthGuess()
        self._blocked = False  # a suspect waits for the engine to empty
        self._draining = False
        self.engine_stats: Mapping[str, int | float] = {}

    def start(self) -> None:
        start_thread("prepare", self._prepare)

    # -- messages, on the event loop's thread

    def receive_id(self, delivery: Delivery) -> None:
        """A message that carries a job's id."""
        with self._lock:
            self._deliveries[delivery] = None
        self._post(
            Claim(
                job_id=delivery.job_id,
                answer=lambda job, now: self._claimed(delivery, job, now),
            )
        )

    def receive_job(self, delivery: Delivery, sent: SentJob) -> None:
        """A message that carries the whole job; a fault in it is told by the row."""
        new_job = sent.new_job
        with self._lock:
            self._deliveries[delivery] = None
        if sent.refusal is None and new_job.model != self._model:
            self._post(Insert(new_job=new_job, answer=lambda: self._end(delivery, Ending.DROPPED)))
            return
        self._post(
            Claim(
                job_id=new_job.id,
                new_job=new_job,
                answer=lambda job, now: self._claimed(delivery, job, now, sent.refusal),
            )
        )

    def places(self) -> int:
        """How many more messages may be taken from Redis now."""
        with self._lock:
            if self._room is None or self._draining or self._blocked:
                return 0
            loads = [
                UNKNOWN_LOAD if attempt is None else attempt.load
                for attempt in self._deliveries.values()
                if attempt is None or attempt.phase is not Phase.ENDING
            ]
            return free_places(self._room, loads, self._guess, max_jobs=self._max_jobs)

    @property
    def num_in_hands(self) -> int:
        """Messages whose end Celery does not know yet."""
        with self._lock:
            return len(self._deliveries)

    def terminate(self, delivery: Delivery, *, revoked: bool) -> None:
        """A revoke cancels the job; a cold stop hands it back."""
        with self._lock:
            attempt = self._deliveries.get(delivery)
            if delivery not in self._deliveries or delivery in self._revoked:
                return
            if attempt is not None and not self._is_open(attempt):
                return  # its end is on the way
            if not revoked:
                self._draining = True  # what is being claimed goes back when the claim is in
                if attempt is not None:
                    self._hand_back(attempt, crashed=False)
                return
            self._revoked.add(delivery)
            if attempt is not None:
                self._drop(attempt)
        # posted behind a claim that is on its way, the cancel finds the row either way
        self._post(
            Cancel(job_id=delivery.job_id, answer=lambda: self._end(delivery, Ending.DROPPED))
        )

    def cancel(self, job_id: str) -> None:
        """A message revoked before it was taken: its job must not run by another one."""
        self._post(Cancel(job_id=job_id, answer=lambda: None))

    def check_limits(self) -> None:
        """End what runs longer than Celery's time limits allow."""
        now = time.monotonic()
        with self._lock:
            for delivery, attempt in list(self._deliveries.items()):
                if attempt is None or delivery.accepted_at is None:
                    continue
                ran_s = now - delivery.accepted_at
                if delivery.hard_limit_s is not None and ran_s > delivery.hard_limit_s:
                    self._hard_limit(attempt)
                elif delivery.soft_limit_s is not None and ran_s > delivery.soft_limit_s:
                    self._soft_limit(attempt)

    def begin_drain(self) -> None:
        """Take nothing more, and give back what the engine has not begun."""
        with self._lock:
            self._draining = True
            for attempt in self._in(Phase.CLAIMED, Phase.WAITING):
                self._hand_back(attempt, crashed=False)

    def hand_back_all(self) -> None:
        with self._lock:
            self._draining = True
            for attempt in self._in(Phase.CLAIMED, Phase.WAITING, Phase.RUNNING):
                self._hand_back(attempt, crashed=False)

    # -- the lease, on its thread

    def holding(self) -> Holding:
        """What is held, and the tokens made since the last call for jobs that had some by then."""
        with self._lock:
            checkpoints: dict[str, Checkpoint] = {}
            for attempt in self._in(Phase.RUNNING):
                num_generated = attempt.num_generated
                # a job shorter than a beat never costs a checkpoint
                if 0 < attempt.num_saved < num_generated:
                    checkpoints[attempt.job.id] = [list(ids) for ids in attempt.generated]
                attempt.num_saved = num_generated
            return Holding(
                held=[attempt.held for attempt in self._attempts.values()], checkpoints=checkpoints
            )

    @property
    def engine_busy(self) -> bool:
        """There is something the engine should be stepping for."""
        with self._lock:
            return any(attempt.phase is Phase.RUNNING for attempt in self._attempts.values())

    def stats(self) -> dict[str, int | float]:
        """For monitors: the engine's own numbers, and how many jobs are at which phase here."""
        with self._lock:
            phases = [attempt.phase for attempt in self._attempts.values()]
            return {
                **self.engine_stats,
                "jobs_in_hands": len(self._deliveries),
                **{f"jobs_{phase.name.lower()}": phases.count(phase) for phase in Phase},
            }

    def holds(self, job_ids: Iterable[str]) -> bool:
        with self._lock:
            mine = {attempt.job.id for attempt in self._attempts.values()}
        return not mine.isdisjoint(job_ids)

    def lose(self, lost: Iterable[Held]) -> None:
        """These are ours no more: cancelled, or another attempt's."""
        with self._lock:
            for held in lost:
                attempt = self._attempts.get(f"{held.id}:{held.fence}")
                # of one whose result is on its way, the fence decides
                if attempt is not None and attempt.phase is not Phase.ENDING:
                    logger.info("job %s attempt %d dropped: not ours", held.id, attempt.job.attempt)
                    self._drop(attempt)
                    self._end(attempt.delivery, Ending.DROPPED)

    # -- the engine, on its keeper's thread

    def engine_ready(self, ready: Ready) -> None:
        with self._lock:
            self._limits = Limits(max_model_len=ready.max_model_len, kv_tokens=ready.kv_tokens)
            self._room = EngineRoom(
                max_num_seqs=ready.max_num_seqs,
                free_tokens=ready.kv_tokens,
                num_waiting=0,
            )
            self._admit()
        self._wake()

    def engine_stepped(self, stepped: Stepped) -> None:
        with self._lock:
            assert self._room is not None
            self._room = replace(
                self._room, free_tokens=stepped.free_tokens, num_waiting=stepped.num_waiting
            )
            self.engine_stats = stepped.stats or self.engine_stats
            for delta in stepped.deltas:
                if (attempt := self._attempts.get(delta.key)) is not None:
                    attempt.generated[delta.sample_index] += delta.token_ids
            for refused in stepped.refused:
                self._engine_refused(refused)
            for ended in stepped.ended:
                self._engine_ended(ended)
            if stepped.ended or stepped.refused:
                self._admit()
        if stepped.ended or stepped.refused:
            self._wake()

    def engine_died(self, how: str) -> None:
        """What it ran are suspects; what waited here is not, and goes to the next process."""
        with self._lock:
            self._room = None
            suspects = self._in(Phase.RUNNING)
            logger.warning("engine died with %d jobs: %s", len(suspects), how)
            for attempt in suspects:
                self._hand_back(attempt, crashed=True)

    # -- the ledger's answers, on its thread

    def _claimed(
        self,
        delivery: Delivery,
        job: ClaimedJob | None,
        now: float,  # the database's clock
        refusal: Refusal | None = None,
    ) -> None:
        if job is None:
            self._end(delivery, Ending.DROPPED)
            return
        attempt = Attempt(
            job=job,
            delivery=delivery,
            deadline_at=None
            if job.deadline_at is None
            else time.monotonic() + job.deadline_at - now,
            refusal=refusal,
        )
        delivery.accept()
        with self._lock:
            if delivery in self._revoked:
                return  # the cancel is on its way
            if attempt.key in self._attempts:
                # a second message of a job held already, read back after a commit in doubt
                self._end(delivery, Ending.DROPPED)
                return
            self._attempts[attempt.key] = attempt
            self._deliveries[delivery] = attempt
            if self._draining:
                self._hand_back(attempt, crashed=False)
                return
        self._to_prepare.put(attempt)

    def _finished(self, attempt: Attempt, outcome: Outcome, accepted: bool) -> None:
        with self._lock:
            del self._attempts[attempt.key]
        job = attempt.job
        if not accepted:
            logger.warning("job %s attempt %d fenced out", job.id, job.attempt)
            self._waste(attempt)
            self._end(attempt.delivery, Ending.DROPPED)
            return
        logger.info(
            "job %s attempt %d %s: reason=%s prompt_tokens=%d completion_tokens=%d",
            *(job.id, job.attempt, outcome.state, outcome.code or outcome.finish_reason),
            *(outcome.prompt_tokens, outcome.completion_tokens),
        )
        succeeded = outcome.state == JobState.SUCCEEDED
        ending = Ending.SUCCEEDED if succeeded else Ending.FAILED
        self._end(attempt.delivery, ending, f"{outcome.code}: {outcome.message}")

    # -- preparing, on its thread

    def _prepare(self) -> None:
        while True:
            attempt = self._to_prepare.get()
            try:
                prompt = self._prompt(attempt)
            except Refusal as refusal:
                with self._lock:
                    if self._is_open(attempt):
                        self._finish(attempt, _refused(refusal))
                continue
            with self._lock:
                if not self._is_open(attempt):
                    continue  # dropped, or at its time limit, meanwhile
                attempt.resume(prompt)
                attempt.phase = Phase.WAITING
                self._admit()

    def _prompt(self, attempt: Attempt) -> Prompt:
        if attempt.refusal is not None:
            raise attempt.refusal
        assert self._limits is not None, "a job was taken before there was an engine"
        job = attempt.job
        return prepare(job.id, job.url, job.body, self._tokenizer, self._limits)

    # -- the rest expects the lock to be held

    def _in(self, *phases: Phase) -> list[Attempt]:
        return [attempt for attempt in self._attempts.values() if attempt.phase in phases]

    def _is_open(self, attempt: Attempt) -> bool:
        """Still ours, and its end not decided."""
        return attempt.key in self._attempts and attempt.phase is not Phase.ENDING

    def _admit(self) -> None:
        """Give waiting attempts to the engine, in order, as far as they may run together."""
        if self._room is None:
            return
        self._blocked = False
        running = [attempt.job.crash_count for attempt in self._in(Phase.RUNNING)]
        for attempt in self._in(Phase.WAITING):
            if not may_join(
                attempt.job.crash_count,
                running,
                max_crashes=self._max_crashes,
                max_num_seqs=self._room.max_num_seqs,
            ):
                self._blocked = True  # with all that came later: they might keep it out for ever
                return
            running.append(attempt.job.crash_count)
            self._run(attempt)

    def _run(self, attempt: Attempt) -> None:
        assert attempt.prompt is not None
        attempt.phase = Phase.RUNNING
        deadline_at = attempt.deadline_at
        self._send(
            Add(
                key=attempt.key,
                prompt_ids=attempt.prompt.token_ids,
                params=attempt.prompt.params,
                priority=attempt.job.priority,
                deadline_s=None if deadline_at is None else deadline_at - time.monotonic(),
                generated=[list(ids) for ids in attempt.generated] if attempt.num_resumed else [],
            )
        )

    def _engine_ended(self, ended: Ended) -> None:
        attempt = self._attempts.get(ended.key)
        if attempt is None or attempt.phase is not Phase.RUNNING:
            return  # we sent an abort, and what it meant is settled
        job = attempt.job
        if attempt.limit is not None:
            outcome = _limited(attempt)
        else:
            outcome = outcome_of(
                ended, job_id=job.id, url=job.url, model=job.model, created=job.created_at
            )
        self._guess.learn(ended.prompt_tokens, ended.completion_tokens // len(ended.samples))
        self._finish(attempt, outcome)

    def _engine_refused(self, refused: Refused) -> None:
        attempt = self._attempts.get(refused.key)
        if attempt is None or attempt.phase is not Phase.RUNNING:
            return
        code = ErrorCode.EXCEEDS_CAPACITY if refused.capacity else ErrorCode.INVALID_REQUEST
        self._finish(attempt, _refused(Refusal(code, refused.message, param=refused.param)))

    def _soft_limit(self, attempt: Attempt) -> None:
        """The engine ends it in its own time, and its result says why."""
        if attempt.limit is not None or not self._is_open(attempt):
            return
        attempt.delivery.time_out(soft=True)
        attempt.limit = f"soft time limit ({attempt.delivery.soft_limit_s:g} s) exceeded"
        if attempt.phase is Phase.RUNNING:
            self._send(Abort(attempt.key))
        else:
            self._finish(attempt, _limited(attempt))

    def _hard_limit(self, attempt: Attempt) -> None:
        """It ends now, whether the engine answers or not."""
        if not self._is_open(attempt):
            return
        attempt.delivery.time_out(soft=False)
        attempt.limit = f"hard time limit ({attempt.delivery.hard_limit_s:g} s) exceeded"
        if attempt.phase is Phase.RUNNING:
            self._send(Abort(attempt.key))
        self._finish(attempt, _limited(attempt))

    def _finish(self, attempt: Attempt, outcome: Outcome) -> None:
        attempt.phase = Phase.ENDING
        wasted_tokens = 0
        if outcome.state != JobState.SUCCEEDED:
            wasted_tokens = attempt.num_generated
            outcome = replace(outcome, completion_tokens=0)
        self._post(
            Finish(
                held=attempt.held,
                outcome=outcome,
                wasted_tokens=wasted_tokens,
                answer=lambda accepted: self._finished(attempt, outcome, accepted),
            )
        )

    def _hand_back(self, attempt: Attempt, *, crashed: bool) -> None:
        del self._attempts[attempt.key]
        if attempt.phase is Phase.RUNNING and not crashed:
            self._send(Abort(attempt.key))
        self._post(
            HandBack(
                held=attempt.held,
                checkpoint=attempt.generated,
                crashed=crashed,
                answer=lambda: self._end(attempt.delivery, Ending.HANDED_BACK),
            )
        )

    def _drop(self, attempt: Attempt) -> None:
        """Forget an attempt whose row is not ours any more; what it made was for nothing."""
        del self._attempts[attempt.key]
        if attempt.phase is Phase.RUNNING:
            self._send(Abort(attempt.key))
        self._waste(attempt)

    def _waste(self, attempt: Attempt) -> None:
        if tokens := attempt.num_generated - attempt.num_resumed:
            self._post(Waste(job_id=attempt.job.id, tokens=tokens))

    def _end(self, delivery: Delivery, ending: Ending, message: str = "") -> None:
        with self._lock:
            self._revoked.discard(delivery)
            if self._deliveries.pop(delivery, _NOTHING) is _NOTHING:
                return
        delivery.end(ending, message)


_NOTHING = object()


def _refused(refusal: Refusal) -> Outcome:
    return Outcome(
        state=JobState.FAILED,
        code=refusal.code,
        message=str(refusal),
        param=refusal.param,
        finish_reason="error",
    )


def _limited(attempt: Attempt) -> Outcome:
    assert attempt.limit is not None
    return Outcome(
        state=JobState.FAILED,
        code=ErrorCode.TIME_LIMIT,
        message=attempt.limit,
        finish_reason="abort",
        prompt_tokens=0 if attempt.prompt is None else len(attempt.prompt.token_ids),
    )
