"""Every token the engine makes is in a row: in its output, its waste or its checkpoint.

A worker's own dispatcher, ledger and lease on real databases, whose connection breaks now and then,
with an engine that draws how many tokens it makes and hears of an abort a step late. Jobs end in
all ways there are. The seed of a failure stands in its name.
"""

import random
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import select

from engine.tokenizer import Tokenizer
from jobs import claims, store, sweep
from jobs.database import Database
from jobs.lifecycle import JobState
from jobs.models import jobs
from jobs.records import NewJob, WorkerInfo
from jobs.tenants import DEFAULT_TENANT
from tests.worker.test_ledger import FragileDatabase
from worker.attempt import Phase
from worker.delivery import CeleryCallbacks, Delivery
from worker.dispatcher import Dispatcher
from worker.entries import Flush
from worker.lease import LeaseKeeper
from worker.ledger import Ledger
from worker.messages import Abort, Add, Command, Delta, Ended, Ready, Sample, Stepped

TIMEOUT_S = 30.0
WORKER = "w1"
INFO = WorkerInfo(
    id=WORKER, hostname="here", pid=7, model="tiny", max_num_seqs=8, kv_tokens=4096,
    max_model_len=512,
)  # fmt: skip
MAX_TOKENS = 60


class Engine:
    """What is sent comes in the midst of a step, whose tokens are made all the same."""

    pid, num_restarts, num_steps, failing = 7, 0, 0, False

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.inbox: list[Command] = []
        self.running: dict[str, int] = {}  # tokens of each, those of earlier attempts too
        self.num_generated: dict[str, int] = {}  # by job

    def step(self) -> Stepped:
        ended, deltas = [], []
        for key in list(self.running):
            made = min(self._draw.randrange(4), MAX_TOKENS - self.running[key])
            self.running[key] += made
            job_id = key.partition(":")[0]
            self.num_generated[job_id] = self.num_generated.get(job_id, 0) + made
            if made:
                deltas.append(Delta(key, 0, [5] * made))
            if self.running[key] == MAX_TOKENS:
                ended.append(self._ended(key, "length"))
        commands = self.inbox.copy()
        self.inbox.clear()
        for command in commands:
            if isinstance(command, Add):
                self.running[command.key] = sum(map(len, command.generated))
            elif isinstance(command, Abort) and command.key in self.running:
                ended.append(self._ended(command.key, "abort"))
        self.num_steps += 1
        return Stepped(
            num_steps=self.num_steps, num_waiting=0, free_tokens=4096, deltas=deltas, ended=ended,
            refused=[], stats={},
        )  # fmt: skip

    def _ended(self, key: str, finish_reason: str) -> Ended:
        sample = Sample(index=0, text="text", finish_reason=finish_reason, error=None)
        return Ended(key, [sample], 1, 0, self.running.pop(key), time.monotonic())


class World:
    """One worker, and what clients, Celery, the sweeper and the network do to it."""

    def __init__(self, url: str, tokenizer: Tokenizer, seed: int) -> None:
        self.draw = random.Random(seed)
        self.database, self.others = FragileDatabase(url), Database(url)
        self.engine = Engine(self.draw)
        self.ledger = Ledger(
            self.database, worker_id=WORKER, window_s=0.0, max_rows=256, max_crashes=100,
            announce=lambda ids: None,
        )  # fmt: skip
        self.dispatcher = Dispatcher(
            model="tiny", tokenizer=tokenizer, post=self.ledger.post,
            send=self.engine.inbox.append, wake=lambda: None, tell=lambda runs: None, max_jobs=100,
            max_crashes=100,
        )  # fmt: skip
        hints: Any = None
        engine: Any = self.engine
        self.keeper = LeaseKeeper(
            self.database, info=INFO, dispatcher=self.dispatcher, engine=engine, cancelled=hints,
            beat_s=5, lease_s=3600, stalled=lambda: False,
        )  # fmt: skip
        self.ids: list[str] = []
        self.deliveries: list[Delivery] = []
        self.keeper._register()
        self.load_engine()
        self.ledger.start()
        self.dispatcher.start()

    def close(self) -> None:
        self.ledger.stop()
        self.database.dispose()
        self.others.dispose()

    def load_engine(self) -> None:
        self.dispatcher.engine_ready(
            Ready(pid=1, max_num_seqs=8, kv_tokens=4096, max_model_len=512, load_s=0.0)
        )

    def flush(self) -> None:
        assert self.ledger.flush().wait(TIMEOUT_S)
        self.database.breaks = ""

    # -- what may happen

    def step(self) -> None:
        for _ in range(self.draw.randrange(1, 6)):
            self.dispatcher.engine_stepped(self.engine.step())

    def submit(self) -> None:
        body = {"model": "tiny", "prompt": "x", "max_tokens": MAX_TOKENS}
        new_job = NewJob(url="/v1/completions", model="tiny", body=body, max_attempts=100)
        with self.others.begin() as connection:
            store.submit(
                connection, [new_job], tenant=DEFAULT_TENANT, now=self.others.clock(connection)
            )
        self.ids.append(new_job.id)
        self.deliver(new_job.id)

    def deliver(self, job_id: str) -> None:
        callbacks = CeleryCallbacks(
            accept=lambda *_: None, end=lambda _: None, time_out=lambda *_: None
        )
        delivery = Delivery(
            job_id, callbacks, soft_limit_s=None, hard_limit_s=None, in_hub=lambda call: call(),
            on_terminate=lambda delivery: self.dispatcher.terminate(delivery, revoked=True),
        )  # fmt: skip
        self.deliveries.append(delivery)
        self.dispatcher.receive_id(delivery)

    def deliver_again(self) -> None:
        if queued := [row.id for row in self.rows() if row.state == JobState.QUEUED]:
            self.deliver(self.draw.choice(queued))

    def beat(self) -> None:
        self.keeper._try(self.keeper._beat)

    def beat_in_doubt(self) -> None:
        self.flush()
        self.database.breaks = self.draw.choice(["a", "b"])
        self.beat()
        self.cancel()
        self.beat()

    def beat_that_crosses(self) -> None:
        """What it tells is out of date when it is in, and the worker's writes come behind it."""
        gate = threading.Event()
        self.ledger.post(Flush(answer=lambda: gate.wait() and None))
        holding = self.dispatcher.holding
        move = self.draw.choice([self.hand_back, self.revoke, self.limit, self.crash])
        with patch.object(self.dispatcher, "holding", lambda: (holding(), move())[0]):
            self.beat()
        if self.draw.randrange(2):
            self.cancel()
        gate.set()

    def cancel(self) -> None:
        with self.others.begin() as connection:
            now = self.others.clock(connection)
            store.cancel(connection, self.draw.choice(self.ids), tenant=DEFAULT_TENANT, now=now)

    def cancel_beside_a_beat(self) -> None:
        """It has written the row, and commits after the beat."""
        if self.others.sqlite:  # writers take turns
            return
        with self.others.begin() as connection:
            now = self.others.clock(connection)
            store.cancel(connection, self.draw.choice(self.ids), tenant=DEFAULT_TENANT, now=now)
            self.step()
            self.beat()

    def revoke(self) -> None:
        self.draw.choice(self.deliveries).terminate()

    def limit(self) -> None:
        running = self.dispatcher._book.open_in(Phase.RUNNING)
        if not running:
            return
        delivery = self.draw.choice(running).delivery
        if self.draw.randrange(2):
            delivery.hard_limit_s = 0.0
        else:
            delivery.soft_limit_s = 0.0
        self.dispatcher.check_time()
        self.step()  # most likely before the row says so

    def hand_back(self) -> None:
        self.dispatcher.hand_back_all()
        self.dispatcher._book.draining = False

    def crash(self) -> None:
        self.dispatcher.engine_died("SIGKILL")
        self.engine.inbox.clear()
        self.engine.running.clear()
        self.load_engine()

    def lapse(self) -> None:
        with self.others.begin() as connection:
            now = self.others.clock(connection)
            claims.unregister_worker(connection, WORKER, now=now)
            sweep.reap(connection, now)

    def break_commits(self) -> None:
        self.database.breaks = "".join(self.draw.choices("ab-", k=3))
        self.flush()

    # -- and the accounts

    def rows(self) -> list[Any]:
        with self.others.read() as connection:
            return list(connection.execute(select(jobs)))

    def settle(self) -> None:
        """Until nothing is held and nothing is under way."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.dispatcher.num_in_hands or self.dispatcher.holding().held or self.engine.running:
            assert time.monotonic() < deadline
            self.step()
            self.flush()
            self.beat()
        self.step()
        self.flush()


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir):
    return Tokenizer.load(tiny_llama_dir)


@pytest.mark.parametrize("seed", range(12))
def test_what_the_engine_generated_is_what_the_rows_say(database_url, tokenizer, seed):
    world = World(database_url, tokenizer, seed)
    usual = [world.step, world.step, world.step, world.beat, world.submit, world.deliver_again]
    faults = [
        world.beat_in_doubt, world.beat_that_crosses, world.cancel, world.cancel_beside_a_beat,
        world.revoke, world.limit, world.hand_back, world.crash, world.lapse, world.break_commits,
    ]  # fmt: skip
    for _ in range(4):
        world.submit()
    for _ in range(100):
        world.draw.choice(faults if world.draw.random() < 0.2 else usual)()
    world.settle()
    accounts = {row.id: row for row in world.rows()}
    for job_id, generated in world.engine.num_generated.items():
        row = accounts[job_id]
        told = row.completion_tokens + row.wasted_tokens
        if row.finished_at is None:
            told += row.checkpoint_tokens
        assert told == generated, (told - generated, row)
    assert sum(world.engine.num_generated.values()) > 0
    world.close()
