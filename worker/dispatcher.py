"""What happens to a worker's jobs: from the message, through claim and engine, to the row.

Every event (a message, a claim that committed, a step, a death, a lost lease, a limit) comes in
here, from whichever thread it happens on, and makes a move in the book of jobs held; no move
blocks. An attempt is the worker's from the commit of its claim until the commit of its end, or
until it is dropped because the row is another's.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from engine.tokenizer import Tokenizer
from jobs import openai
from jobs.claims import ClaimedJob, Held
from jobs.lifecycle import ErrorCode
from jobs.streams import Run
from worker.admission import EngineRoom
from worker.attempt import Attempt, Holding, Phase, held_of, key_of
from worker.book import Book
from worker.delivery import Delivery, Ending
from worker.ends import when_limited, when_refused
from worker.entries import Cancel, Claim, Died, Entry, Insert, Waste
from worker.generation import Limits, Outcome, Refusal, outcome_of
from worker.messages import Command, Delta, Ended, Ready, Refused, Stat, Stepped
from worker.preparer import Preparer
from worker.prompt import Prompt
from worker.sent_job import SentJob
from worker.unclaimed import Unclaimed

ENGINE_WAIT_S = 15.0  # jobs wait this long for a new engine process, then for another worker
_ENGINES_CODES: dict[str | None, ErrorCode] = {str(code): code for code in ErrorCode}

logger = logging.getLogger(__name__)


class Dispatcher:
    """Decides what follows from each event. Thread-safe."""

    def __init__(
        self,
        *,
        model: str,
        tokenizer: Tokenizer,
        post: Callable[[Entry], None],  # to the ledger
        send: Callable[[Command], None],  # to the engine
        wake: Callable[[], None],  # the event loop: there may be room for another message
        tell: Callable[[list[Run]], None],  # whoever streams jobs
        max_jobs: int,
        max_crashes: int,
        trace: Callable[[Attempt, Outcome], None] | None = None,  # how each attempt went
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._post = post
        self._wake = wake
        self._tell = tell
        self._book = Book(post, send, max_jobs=max_jobs, max_crashes=max_crashes, trace=trace)
        self._lock = self._book.lock
        self._unclaimed = Unclaimed(self._book, post, self._claim)
        self._revoked: set[Delivery] = set()
        self._preparer = Preparer(tokenizer=tokenizer, post=post, prepared=self._prepared)
        self._died_at = math.inf  # the engine, while there is none
        self._engine_stats: Mapping[str, Stat] = {}

    def start(self) -> None:
        self._preparer.start()

    # -- what others ask

    def places(self) -> int:
        """How many more messages may be taken from Redis now."""
        return self._book.places()

    def takes_background(self) -> bool:
        """Whether those may be of jobs that nobody waits for."""
        return self._book.takes_background()

    @property
    def num_in_hands(self) -> int:
        """Messages whose end Celery does not know yet."""
        return len(self._book.deliveries)

    @property
    def engine_busy(self) -> bool:
        """There is something the engine should be stepping for."""
        return bool(self._book.open_in(Phase.RUNNING))

    def holding(self) -> Holding:
        """For the lease, once a beat."""
        return self._book.holding()

    def holds(self, job_ids: Iterable[str]) -> bool:
        with self._lock:
            mine = {attempt.job.id for attempt in self._book.attempts.values()}
        return not mine.isdisjoint(job_ids)

    def stats(self) -> dict[str, Stat]:
        """For monitors: the engine's own numbers, and how many jobs are how far."""
        return {**self._engine_stats, **self._book.stats()}

    # -- messages, on the event loop's thread

    def receive_id(self, delivery: Delivery) -> None:
        """A message that carries a job's id; one of a chunk is claimed when there is room."""
        with self._lock:
            self._book.deliveries[delivery] = None
            if delivery.background:
                self._unclaimed.add(delivery)
            else:
                self._claim(delivery)

    def _claim(self, delivery: Delivery) -> None:
        self._post(Claim(job_id=delivery.job_id, answer=partial(self._claimed, delivery)))

    def receive_job(self, delivery: Delivery, sent: SentJob) -> None:
        """A message that carries the whole job; a fault in it is told by the row."""
        new_job = sent.new_job
        with self._lock:
            self._book.deliveries[delivery] = None
        if sent.refusal is None and new_job.model != self._model:
            self._post(
                Insert(new_job=new_job, answer=lambda: self._book.end(delivery, Ending.DROPPED))
            )
            return
        answer = partial(self._claimed, delivery, sent=sent)
        self._post(Claim(job_id=new_job.id, new_job=new_job, answer=answer))

    def terminate(self, delivery: Delivery, *, revoked: bool) -> None:
        """A revoke cancels the job; a cold stop hands it back."""
        with self._lock:
            if delivery not in self._book.deliveries or delivery in self._revoked:
                return
            attempt = self._book.deliveries[delivery]
            if attempt is not None and not self._book.is_open(attempt):
                return  # its end is on the way
            if not revoked:
                self._book.draining = True  # what is being claimed goes back when the claim is in
                if attempt is not None:
                    self._book.hand_back(attempt)
                self._unclaimed.put_back(delivery)
                return
            self._revoked.add(delivery)
            self._book.unclaimed.pop(delivery, None)
            # behind a claim that is on its way, the cancel finds the row either way; before the
            # waste, it says what a beat under way has stored
            self._post(Cancel(job_id=delivery.job_id, answer=lambda: self._cancelled(delivery)))
            if attempt is not None:
                self._book.drop(attempt)

    def _cancelled(self, delivery: Delivery) -> None:
        self._revoked.discard(delivery)
        self._book.end(delivery, Ending.DROPPED)

    def cancel(self, job_id: str, sent: SentJob | None = None) -> None:
        """A message revoked before it was taken: its job must not run by another one.

        One that carried the whole job leaves a row, for whoever asks what became of it.
        """
        new_job = None if sent is None else sent.new_job
        self._post(Cancel(job_id=job_id, new_job=new_job, answer=lambda: None))
        self._count(sent)

    def _count(self, sent: SentJob | None) -> None:
        """The row of a whole job says how long its prompt is, even if nobody will run it."""
        if sent is not None and sent.refusal is None and sent.new_job.model == self._model:
            self._preparer.count(sent.new_job)

    def lease_stands(self, stands: bool) -> None:
        """Whether what is taken now could be claimed; while not, nothing is taken."""
        with self._lock:
            was_shut, self._book.shut = self._book.shut, not stands
        if was_shut and stands:
            self._wake()
        elif not was_shut and not stands:
            logger.warning("the lease has lapsed: no more messages are taken")

    def begin_drain(self) -> None:
        """Take nothing more, and give back what the engine has not begun."""
        self._hand_back_all(Phase.CLAIMED, Phase.WAITING)

    def hand_back_all(self) -> None:
        self._hand_back_all(Phase.CLAIMED, Phase.WAITING, Phase.RUNNING)

    def _hand_back_all(self, *phases: Phase) -> None:
        with self._lock:
            self._book.draining = True
            for attempt in self._book.open_in(*phases):
                self._book.hand_back(attempt)
            self._unclaimed.put_back_all()

    # -- the ledger's answer to a claim, on its thread

    def _claimed(
        self,
        delivery: Delivery,
        job: ClaimedJob | None,
        now: float,  # the database's clock
        sent: SentJob | None = None,
    ) -> None:
        if job is None:
            self._count(sent)
            self._book.end(delivery, Ending.DROPPED)
            self._unclaimed.claim()
            return
        left_s = None if job.deadline_at is None else job.deadline_at - now
        attempt = Attempt(
            job=job,
            delivery=delivery,
            deadline_at=None if left_s is None else time.monotonic() + left_s,
            refusal=None if sent is None else sent.refusal,
        )
        delivery.accept()
        with self._lock:
            if delivery in self._revoked:
                self._count(sent)
                return  # the cancel is on its way
            if attempt.key in self._book.attempts:
                # a second message of a job held already, read back after a commit in doubt
                self._book.end(delivery, Ending.DROPPED)
                return
            self._book.attempts[attempt.key] = attempt
            self._book.deliveries[delivery] = attempt
            if self._book.draining:
                self._book.hand_back(attempt)
                return
        self._preparer.prepare(attempt)

    # -- what the preparer has made of its body, on that thread

    def _prepared(self, attempt: Attempt, prompt: Prompt | Refusal) -> None:
        with self._lock:
            if not self._book.is_open(attempt):
                return  # dropped, or at its time limit, meanwhile
            if isinstance(prompt, Refusal):
                self._book.finish(attempt, when_refused(prompt))
                return
            attempt.resume(prompt, self._tokenizer)
            attempt.phase = Phase.WAITING
            self._book.admit()

    # -- the engine, on its keeper's thread

    def engine_ready(self, ready: Ready) -> None:
        with self._lock:
            self._preparer.limits = Limits(
                max_model_len=ready.max_model_len,
                kv_tokens=ready.kv_tokens,
                block_size=ready.block_size,
                max_n=ready.max_n,
            )
            self._book.room = EngineRoom(
                max_num_seqs=ready.max_num_seqs, free_tokens=ready.kv_tokens, num_waiting=0
            )
            self._book.admit()
            self._unclaimed.claim()
        self._wake()

    def engine_stepped(self, stepped: Stepped) -> None:
        with self._lock:
            assert self._book.room is not None
            free, waiting = stepped.free_tokens, stepped.num_waiting
            self._book.room = replace(self._book.room, free_tokens=free, num_waiting=waiting)
            self._engine_stats = stepped.stats or self._engine_stats
            self._take_tokens(stepped.deltas)
            if not stepped.ended and not stepped.refused:
                return
            for refused in stepped.refused:
                self._engine_refused(refused)
            for ended in stepped.ended:
                self._engine_ended(ended)
            self._book.admit()
            self._unclaimed.claim()
        self._wake()

    def _take_tokens(self, deltas: Iterable[Delta]) -> None:
        now = time.monotonic()
        runs = []
        for delta in deltas:
            if (attempt := self._running(delta.key)) is None:
                # made before the engine heard that the job is not ours, or has ended
                lost = len(delta.token_ids)
                self._post(Waste(held=held_of(delta.key), tokens=lost, first_token_at=now))
                continue
            attempt.generated[delta.sample_index] += delta.token_ids
            if attempt.first_token_at is None:
                attempt.first_token_at = now
            if attempt.streaming is not None:
                runs.append(attempt.streaming.add(delta))
        if runs:
            self._tell(runs)

    def engine_died(self, how: str) -> None:
        """What it ran are suspects; what waited here is not, and goes to the next process."""
        with self._lock:
            self._book.room = None
            self._died_at = time.monotonic()
            self._engine_stats = {}  # of what it held nothing is held
            suspects = self._book.open_in(Phase.RUNNING)
            logger.warning("engine died with %d jobs: %s", len(suspects), how)
            ids = [attempt.job.id for attempt in suspects]
            self._post(Died(id=secrets.token_hex(16), model=self._model, ending=how, job_ids=ids))
            for attempt in suspects:
                self._book.hand_back(attempt, crashed=True)

    def _running(self, key: str) -> Attempt | None:
        """None for what we have aborted: what that meant is settled."""
        attempt = self._book.attempts.get(key)
        return attempt if attempt is not None and attempt.phase is Phase.RUNNING else None

    def _engine_ended(self, ended: Ended) -> None:
        attempt = self._running(ended.key)
        if attempt is None:
            return
        assert attempt.prompt is not None
        self._book.guess.learn(ended.prompt_tokens, ended.completion_tokens // len(ended.samples))
        job = attempt.job
        self._book.finish(
            attempt,
            when_limited(attempt)
            if attempt.limit is not None
            else outcome_of(
                ended,
                attempt.prompt,
                self._tokenizer,
                job_id=job.id,
                url=job.url,
                model=job.model,
                created=job.created_at,
                body=job.body,
                generated=attempt.generated,
            ),
        )

    def _engine_refused(self, refused: Refused) -> None:
        attempt = self._running(refused.key)
        if attempt is not None:
            code = _ENGINES_CODES.get(refused.code, ErrorCode.INVALID_REQUEST)
            param = openai.field_of(attempt.job.url, attempt.job.body, refused.param)
            refusal = Refusal(code, refused.message, param=param)
            self._book.finish(attempt, when_refused(refusal))

    # -- the lease, on its thread

    def beaten(self, holding: Holding, lost: Collection[Held], stored: Collection[Held]) -> None:
        """SQL's answer to a beat: `lost` are ours no more, of `stored` the checkpoints are in."""
        with self._lock:
            for held in holding.held:
                attempt = self._book.attempts.get(key_of(held))
                if attempt is None:
                    continue
                if held in stored and attempt.streaming is not None and held in holding.pieces:
                    attempt.streaming.stored(holding.pieces[held].ends)
                if held not in lost:
                    continue
                # of one whose result is on its way, the fence decides
                if self._book.is_open(attempt):
                    logger.info("job %s attempt %d dropped: not ours", held.id, attempt.job.attempt)
                    self._book.drop(attempt)
                    self._book.end(attempt.delivery, Ending.DROPPED)

    def check_time(self) -> None:
        """End what runs longer than Celery's limits; give back what waits for no engine."""
        now = time.monotonic()
        with self._lock:
            for delivery, attempt in list(self._book.deliveries.items()):
                if attempt is None or not self._book.is_open(attempt):
                    continue
                ran_s = now - (delivery.accepted_at or now)
                if delivery.hard_limit_s is not None and ran_s > delivery.hard_limit_s:
                    self._hard_limit(attempt)
                elif delivery.soft_limit_s is not None and ran_s > delivery.soft_limit_s:
                    self._soft_limit(attempt)
            if self._book.room is None and now > self._died_at + ENGINE_WAIT_S:
                for attempt in self._book.open_in(Phase.CLAIMED, Phase.WAITING):
                    self._book.hand_back(attempt)
                self._unclaimed.put_back_all()
            self._unclaimed.claim()

    def _soft_limit(self, attempt: Attempt) -> None:
        """The engine ends it in its own time, and its result says why."""
        if attempt.limit is not None:
            return
        attempt.limit = f"soft time limit ({attempt.delivery.soft_limit_s:g} s) exceeded"
        attempt.delivery.time_out(soft=True)
        if attempt.phase is Phase.RUNNING:
            self._book.abort(attempt)
        else:
            self._book.finish(attempt, when_limited(attempt))

    def _hard_limit(self, attempt: Attempt) -> None:
        """It ends now, whether the engine answers or not."""
        attempt.limit = f"hard time limit ({attempt.delivery.hard_limit_s:g} s) exceeded"
        attempt.delivery.time_out(soft=False)
        self._book.abort(attempt)
        self._book.finish(attempt, when_limited(attempt))
