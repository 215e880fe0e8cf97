"""The processes of a simulated deployment: real code of worker/ and jobs/, without its threads.

What a thread of the product does between two waits is one action here, and the world decides whose
action is next. So an action may come between any two others: between a commit and its answers,
between a beat and what is made of it, between what an engine did and when its worker hears of it.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from engine.sampling_params import SamplingParams
from jobs.claims import Held
from jobs.records import WorkerInfo
from jobs.retries import Backoff
from tests.simulation.fake_engine import MAX_NUM_SEQS, FakeEngine
from tests.simulation.servers import SimDatabase
from worker.admission import LOOKAHEAD_OF_CHUNKS
from worker.attempt import Attempt, Holding, Phase, key_of
from worker.chunk import Chunk
from worker.delivery import CeleryCallbacks, Delivery
from worker.dispatcher import Dispatcher
from worker.generation import Limits
from worker.lease import LeaseKeeper
from worker.ledger import Entry, Ledger
from worker.prompt import Prompt
from worker.watchdog import Watchdog

MODEL = "tiny"
LEASE_S, BEAT_S, STALL_S, GRACE_S = 3.0, 1.0, 1.5, 0.4
MAX_CRASHES = 3
RESTART_S = 0.3
BACKOFF = Backoff(base_s=0.2, most_s=2.0)


@dataclass(eq=False)
class Process:
    """Whoever has actions; `kind` and `name` tell the audit who did what."""

    kind: str
    name: str
    skew_s: float = 0.0  # of its wall clock
    alive: bool = True
    paused_until: float = 0.0
    busy: set[str] = field(default_factory=set)  # threads in the midst of an action

    def actions(self) -> list[tuple[str, Callable[[], None]]]:
        """What its threads could do now: (thread, action)."""
        raise NotImplementedError


class Abandoned:
    """In place of the event a ledger waits on between two tries: meanwhile others act."""

    def __init__(self, worker: "WorkerProcess") -> None:
        self._worker = worker

    def is_set(self) -> bool:
        return not self._worker.alive

    def wait(self, timeout_s: float) -> bool:
        self._worker.world.others_act(timeout_s)
        return not self._worker.alive


class WorkerProcess(Process):
    """A worker: its dispatcher, ledger, lease and watchdog are the product's."""

    def __init__(self, world: Any, name: str, skew_s: float) -> None:
        super().__init__(kind="worker", name=name, skew_s=skew_s)
        self.world = world
        self.engine = FakeEngine(world)
        self.database = SimDatabase(world, self)
        self.ledger = Ledger(
            self.database,
            worker_id=name,
            window_s=0,
            max_rows=256,
            max_crashes=MAX_CRASHES,
            backoff=BACKOFF,
            announce=lambda ids: None,
        )
        self.ledger._abandoned = Abandoned(self)  # type: ignore[assignment]
        self.dispatcher = Dispatcher(
            model=MODEL,
            tokenizer=None,  # type: ignore[arg-type]
            post=self.ledger.post,
            send=self.engine.send,  # type: ignore[arg-type]
            wake=lambda: None,
            tell=lambda runs: None,
            max_jobs=2 * MAX_NUM_SEQS,
            max_crashes=MAX_CRASHES,
        )
        self.dispatcher._preparer = self  # type: ignore[assignment]
        self.lease = LeaseKeeper(
            self.database,
            info=WorkerInfo(
                id=name, hostname="here", pid=1, model=MODEL, max_num_seqs=MAX_NUM_SEQS,
                kv_tokens=world.kv_tokens, max_model_len=64,
            ),
            dispatcher=self,  # type: ignore[arg-type]
            engine=self.engine,  # type: ignore[arg-type]
            cancelled=None,  # type: ignore[arg-type]
            beat_s=BEAT_S,
            lease_s=LEASE_S,
            stalled=lambda: self.watchdog.stalled,
        )  # fmt: skip
        self.watchdog = Watchdog(
            dispatcher=self.dispatcher,
            engine=self.engine,
            stall_s=STALL_S,  # type: ignore[arg-type]
        )
        self.limits: Limits | None = None  # the preparer's, never looked at
        self.registered = False
        self.window: list[Entry] = []  # of the commit under way
        self.holding_told: Holding | None = None  # what the last beat said
        self.really_held: set[Held] = set()  # of that, by SQL at the beat's commit
        self._to_prepare: deque[Attempt] = deque()
        self._to_answer: deque[Callable[[], None]] = deque()
        self._to_tell: deque[Callable[[], None]] = deque()
        self._beat_due = 0.0
        self._watch_due = 0.0
        self._drained_at: float | None = None

    @property
    def book(self) -> Any:
        return self.dispatcher._book

    def stop(self) -> None:
        """SIGTERM."""
        self._drained_at = self.world.now + GRACE_S
        self.dispatcher.begin_drain()

    def at_rest(self) -> bool:
        """Nothing in its hands, and nothing on its way to anybody."""
        quiet = not (self._to_prepare or self._to_answer or self._to_tell or self.engine.pipe)
        written = self.ledger._inbox.empty() and "ledger" not in self.busy
        return quiet and written and not self.book.deliveries

    # -- what its threads do

    def actions(self) -> list[tuple[str, Callable[[], None]]]:
        now = self.world.now
        engine = self.engine
        found: list[tuple[str, Callable[[], None]]] = []
        if engine.pipe or (not engine.running and now >= engine.restart_at):
            found.append(("keeper", self._hear_engine))
        if (self.registered and now >= self._beat_due) or self._to_tell:
            found.append(("lease", self._lease_turn))
        if not self.registered and engine.running:
            found.append(("lease", self._register))
        if not self.registered:
            return found
        if self._to_answer or not self.ledger._inbox.empty():
            found.append(("ledger", self._ledger_turn))
        if self._to_prepare:
            found.append(("preparer", self._prepare_one))
        if now >= self._watch_due:
            found.append(("watchdog", self._watch))
        if self._drained_at is not None:
            found.append(("hub", self._drain))
        elif self.dispatcher.places() and self.world.messages.there(
            self.dispatcher.takes_background()
        ):
            found.append(("hub", self._take_message))
        return found

    def check(self) -> None:
        """Of chunks no more is claimed than there are places for, and a few: the rest is free."""
        book = self.book
        open_ = [
            delivery
            for delivery, attempt in book.deliveries.items()
            if attempt is None or attempt.phase is not Phase.ENDING
        ]
        num = sum(each.background and each not in book.unclaimed for each in open_)
        # in a drain those that are put back are no longer among the unclaimed
        assert book.draining or num <= MAX_NUM_SEQS + MAX_NUM_SEQS // LOOKAHEAD_OF_CHUNKS, (
            f"{self.name} hoards"
        )

    def engine_actions(self) -> list[tuple[str, Callable[[], None]]]:
        engine = self.engine
        if engine.running and not engine.stuck and (engine.requests or engine.commands):
            return [("engine", engine.step)]
        return []

    def _hear_engine(self) -> None:
        if not self.engine.pipe:
            self.dispatcher.engine_ready(self.engine.start())
            return
        report = self.engine.pipe.popleft()
        if report is None:
            self.engine.restart_at = self.world.now + RESTART_S
            self.dispatcher.engine_died("SIGKILL")
        else:
            self.engine.num_steps = report.num_steps
            self.dispatcher.engine_stepped(report)

    def _register(self) -> None:
        if self.lease._try(self.lease._register):
            self.registered = True

    def _lease_turn(self) -> None:
        if self._to_tell:
            self._to_tell.popleft()()
            return
        self._beat_due = self.world.now + BEAT_S
        if not self.watchdog.stalled:
            self.lease._try(self.lease._beat)

    def _ledger_turn(self) -> None:
        if not self._to_answer:
            self.window = []
            while not self.ledger._inbox.empty():
                self.window.append(self.ledger._inbox.get())
            written = self.ledger._commit(self.window)
            self._to_answer.extend([] if written is None else written.answers)
        else:
            while self._to_answer:
                self._to_answer.popleft()()

    def _prepare_one(self) -> None:
        attempt = self._to_prepare.popleft()
        body = attempt.job.body
        params = SamplingParams(n=body["n"], max_tokens=body["max_tokens"])
        self.dispatcher._prepared(attempt, Prompt(token_ids=body["prompt"], params=params))

    def _watch(self) -> None:
        self._watch_due = self.world.now + 0.2
        self.dispatcher.check_time()
        self.watchdog._look(self.world.now)

    def _take_message(self) -> None:
        message = self.world.messages.take(self.dispatcher.takes_background())
        if message is None:
            return
        tag, ids = message
        acknowledge = self.world.messages.acknowledge
        callbacks = CeleryCallbacks(
            accept=lambda pid, at: acknowledge(tag),
            end=lambda result: acknowledge(tag),
            time_out=lambda soft, seconds: None,
        )
        deliveries = [
            Delivery(
                ids[0],
                callbacks,
                soft_limit_s=None,
                hard_limit_s=None,
                in_hub=lambda call: call(),
                on_terminate=lambda delivery: None,
            )
        ]
        if len(ids) > 1:
            deliveries = Chunk(
                ids, callbacks, in_hub=lambda call: call(), on_terminate=lambda delivery: None
            ).deliveries
        for delivery in deliveries:
            self.dispatcher.receive_id(delivery)

    def _drain(self) -> None:
        assert self._drained_at is not None
        if self.dispatcher.num_in_hands and self.world.now < self._drained_at:
            return
        self.dispatcher.hand_back_all()
        if self.at_rest() and self.lease._try(self.lease._unregister):
            self.world.ended(self)

    # -- in place of its dispatcher, for the lease; and of its preparer

    def holding(self) -> Holding:
        self.holding_told = self.dispatcher.holding()
        return self.holding_told

    def stats(self) -> dict[str, int | float]:
        return self.dispatcher.stats()

    def beaten(self, holding: Holding, lost: Collection[Held], stored: Collection[Held]) -> None:
        really_held = self.really_held if holding is self.holding_told else set(holding.held)

        def tell() -> None:
            self.dispatcher.beaten(holding, lost, stored)
            for held in holding.held:
                attempt = self.book.attempts.get(key_of(held))
                gone = attempt is None or attempt.phase is Phase.ENDING
                assert gone or held in really_held, f"{self.name} goes on with {held}, not its own"

        self._to_tell.append(tell)

    def prepare(self, attempt: Attempt) -> None:
        self._to_prepare.append(attempt)

    def count(self, new_job: object) -> None:
        """Only of jobs that came whole in a message."""
