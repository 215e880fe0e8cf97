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
from tests.simulation.servers import SimDatabase
from worker.attempt import Attempt, Holding, Phase, key_of
from worker.delivery import CeleryCallbacks, Delivery
from worker.dispatcher import Dispatcher
from worker.generation import Limits
from worker.lease import LeaseKeeper
from worker.ledger import Entry, Ledger
from worker.messages import Abort, Add, Command, Delta, Ended, Ready, Sample, Stepped
from worker.prompt import Prompt
from worker.watchdog import Watchdog

MODEL = "tiny"
LEASE_S, BEAT_S, STALL_S, GRACE_S = 3.0, 1.0, 1.5, 0.4
MAX_CRASHES = 3
MAX_NUM_SEQS = 4
KV_TOKENS = 64
RESTART_S = 0.3
BACKOFF = Backoff(base_s=0.2, most_s=2.0)
POISON = 10_000  # prompts from this token on end the engine


def token(prompt: int, sample: int, position: int) -> int:
    """What the engine generates there, in any attempt."""
    return hash((prompt, sample, position)) % 1000


def text(prompt: int, sample: int, num_tokens: int) -> str:
    return " ".join(str(token(prompt, sample, i)) for i in range(num_tokens))


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


@dataclass
class Request:
    prompt: int
    max_tokens: int
    generated: list[list[int]]


class FakeEngine:
    """An engine process and the pipe to it, as worker.engine_client shows them to a worker."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.commands: list[Command] = []
        self.requests: dict[str, Request] = {}
        self.pipe: deque[Stepped | None] = deque()  # None: its end
        self.running = False
        self.stuck = False
        self.restart_at = 0.0
        self.num_restarts = -1
        self.num_steps = 0  # as the worker knows it
        self._steps = 0
        self.failing = False

    @property
    def pid(self) -> int | None:
        return 1 if self.running else None

    def send(self, command: Command) -> None:
        if self.running:
            self.commands.append(command)

    def kill(self) -> None:
        if self.running:
            self.running = self.stuck = False
            self._world.unaccountable |= {key.rpartition(":")[0] for key in self.requests}
            self.commands, self.requests = [], {}
            self.pipe.append(None)

    def start(self) -> Ready:
        self.running = True
        self.num_restarts += 1
        self._steps = self.num_steps = 0
        return Ready(
            pid=1, max_num_seqs=MAX_NUM_SEQS, kv_tokens=KV_TOKENS, max_model_len=64, load_s=0.0
        )

    def step(self) -> None:
        ended = [end for command in self.commands if (end := self._take(command))]
        self.commands = []
        if any(request.prompt >= POISON for request in self.requests.values()):
            self._world.num_poisoned += 1
            self.kill()
            return
        deltas = []
        for key, request in list(self.requests.items()):
            for index, ids in enumerate(request.generated):
                if len(ids) < request.max_tokens:
                    ids.append(token(request.prompt, index, len(ids)))
                    deltas.append(Delta(key, index, ids[-1:]))
                    self._world.generated(key)
            if all(len(ids) == request.max_tokens for ids in request.generated):
                ended.append(self._end(key, "length"))
            elif self._world.chance(self._world.faults.engine / 2):
                self._world.num_failures += 1
                ended.append(self._end(key, "error", "numerical_error: no numbers"))
        self._steps += 1
        used = sum(1 + sum(map(len, request.generated)) for request in self.requests.values())
        self.pipe.append(
            Stepped(
                num_steps=self._steps,
                num_waiting=0,
                free_tokens=KV_TOKENS - used,
                deltas=deltas,
                ended=ended,
                refused=[],
                stats={},
            )
        )

    def _take(self, command: Command) -> Ended | None:
        match command:
            case Add():
                generated = [list(ids) for ids in command.generated]
                self.requests[command.key] = Request(
                    prompt=command.prompt_ids[0],
                    max_tokens=command.params.max_tokens,
                    generated=generated or [[] for _ in range(command.params.n)],
                )
            case Abort() if command.key in self.requests:
                return self._end(command.key, "abort")
        return None

    def _end(self, key: str, reason: str, error: str | None = None) -> Ended:
        request = self.requests.pop(key)
        return Ended(
            key=key,
            samples=[
                Sample(
                    index=index,
                    text=" ".join(map(str, ids)),
                    finish_reason=reason,
                    error=error,
                )
                for index, ids in enumerate(request.generated)
            ],
            prompt_tokens=1,
            cached_tokens=0,
            completion_tokens=sum(map(len, request.generated)),
            first_token_at=None,
        )


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
                kv_tokens=KV_TOKENS, max_model_len=64,
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
        return quiet and self.ledger._inbox.empty() and not self.book.deliveries

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
        elif self.world.messages.there() and self.dispatcher.places():
            found.append(("hub", self._take_message))
        return found

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
        message = self.world.messages.take()
        if message is None:
            return
        tag, job_id = message
        acknowledge = self.world.messages.acknowledge
        callbacks = CeleryCallbacks(
            accept=lambda pid, at: acknowledge(tag),
            end=lambda result: acknowledge(tag),
            time_out=lambda soft, seconds: None,
        )
        self.dispatcher.receive_id(
            Delivery(
                job_id,
                callbacks,
                soft_limit_s=None,
                hard_limit_s=None,
                in_hub=lambda call: call(),
                on_terminate=lambda delivery: None,
            )
        )

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
