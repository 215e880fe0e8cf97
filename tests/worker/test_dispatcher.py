"""What follows from each event in a worker's life: entries to the ledger, commands to the engine.

The ledger and the engine are lists here, and the test answers for them; both keep the contract of
the real ones, which are tested with them in test_ledger.py, test_engine_process.py, test_pool.py.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from billiard.einfo import ExceptionInfo
from celery.exceptions import Ignore, Retry

from engine.capacity import CapacityError
from engine.dialect import NoToolFormatError
from engine.parameter_error import ParameterError
from engine.structured.compiler import CompilerBusyError
from engine.tokenizer import Tokenizer
from jobs.accounting import Counted
from jobs.claims import ClaimedJob, Held
from jobs.lifecycle import ErrorCode, JobState, error_object
from jobs.streams import Run
from worker.attempt import Holding
from worker.delivery import CeleryCallbacks, Delivery
from worker.dispatcher import Dispatcher
from worker.engine_process import refused
from worker.entries import (
    Cancel,
    Claim,
    Count,
    Died,
    Entry,
    Finish,
    HandBack,
    Insert,
    PutBack,
    Waste,
)
from worker.messages import Abort, Add, Command, Delta, Ended, Ready, Sample, Stepped
from worker.sent_job import read_sent_job

E = TypeVar("E")
SERVED = ("tiny", "other")
NOW = 1_790_000_000.0  # the database's clock


@dataclass
class World:
    """A dispatcher, and all that goes out of it."""

    tokenizer: Tokenizer
    max_crashes: int = 3
    entries: list[Entry] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    celery: list[tuple[str, Any]] = field(default_factory=list)
    runs: list[list[Run]] = field(default_factory=list)
    num_wakes: int = 0

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(
            model="tiny",
            tokenizer=self.tokenizer,
            post=self.entries.append,
            send=self.commands.append,
            wake=self.wake,
            tell=self.runs.append,
            max_jobs=100,
            max_crashes=self.max_crashes,
        )
        self.dispatcher.start()
        self.ready()

    def ready(self) -> None:
        ready = Ready(pid=1, max_num_seqs=8, kv_tokens=4096, max_model_len=512, load_s=0.0)
        self.dispatcher.engine_ready(ready)

    def wake(self) -> None:
        self.num_wakes += 1

    def deliver(self, job_id: str = "job_1", background: bool = False, **limits) -> Delivery:
        callbacks = CeleryCallbacks(
            accept=lambda pid, at: self.celery.append(("accept", job_id)),
            end=lambda result: self.celery.append(("end", result)),
            time_out=lambda soft, s: self.celery.append(("time_out", (soft, s))),
        )
        return Delivery(
            job_id,
            callbacks,
            soft_limit_s=limits.get("soft"),
            hard_limit_s=limits.get("hard"),
            in_hub=lambda call: call(),
            on_terminate=lambda delivery: self.dispatcher.terminate(delivery, revoked=True),
            background=background,
        )

    def receive(self, job_id: str = "job_1", **limits) -> Delivery:
        delivery = self.deliver(job_id, **limits)
        self.dispatcher.receive_id(delivery)
        return delivery

    def take(self, kind: type[E]) -> E:
        """The oldest entry of a kind, waited for: preparing is another thread's work."""
        wait_for(lambda: any(isinstance(entry, kind) for entry in [*self.entries, *self.commands]))
        for outbox in (self.entries, self.commands):
            for index, entry in enumerate(outbox):
                if isinstance(entry, kind):
                    del outbox[index]
                    return entry
        raise AssertionError

    def has(self, kind: type[E]) -> bool:
        return any(isinstance(entry, kind) for entry in [*self.entries, *self.commands])

    def run(self, job_id: str = "job_1", limits=None, **values) -> Add:
        """Bring a job into the engine."""
        self.receive(job_id, **limits or {})
        self.take(Claim).answer(job(job_id, **values), NOW)
        return self.take(Add)

    def lose(self, job_id: str, fence: int) -> None:
        holding = Holding(held=[Held(job_id, fence)], checkpoints={})
        self.dispatcher.beaten(holding, lost={Held(job_id, fence)}, stored=())

    def step(self, *deltas: Delta, ended=(), refused=(), free_tokens=4096) -> None:
        self.dispatcher.engine_stepped(
            Stepped(
                num_steps=1,
                num_waiting=0,
                free_tokens=free_tokens,
                deltas=list(deltas),
                ended=list(ended),
                refused=list(refused),
                stats={},
            )
        )


def job(job_id: str = "job_1", **values) -> ClaimedJob:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 20} | values.pop("body", {})
    usual = {"id": job_id, "fence": 1, "attempt": 1, "url": "/v1/completions", "model": "tiny"}
    usual |= {"body": body, "priority": 0, "deadline_at": None, "checkpoint": None}
    usual |= {"crash_count": 0, "created_at": NOW, "prompt_tokens": 5, "tenant_id": "default"}
    return ClaimedJob(**usual | values)


def ended(key: str, finish_reason: str = "length", text: str = "text", error=None) -> Ended:
    sample = Sample(index=0, text=text, finish_reason=finish_reason, error=error)
    return Ended(
        key=key,
        samples=[sample],
        prompt_tokens=5,
        cached_tokens=0,
        completion_tokens=3,
        first_token_at=time.monotonic(),
    )


def exception_of(info: ExceptionInfo) -> type[BaseException]:
    return type(info.exception.exc)


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.001)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir):
    return Tokenizer.load(tiny_llama_dir)


@pytest.fixture
def world(tokenizer):
    return World(tokenizer)


def test_a_message_is_acknowledged_when_its_claim_has_committed(world):
    world.receive()
    assert world.celery == []
    world.take(Claim).answer(job(), NOW)
    assert world.celery == [("accept", "job_1")]


def test_a_row_already_taken_drops_the_message(world):
    world.receive()
    world.take(Claim).answer(None, NOW)
    [(what, (failed, info, _))] = world.celery
    assert (what, failed, exception_of(info)) == ("end", True, Ignore)
    assert world.dispatcher.num_in_hands == 0
    assert not world.has(Add)


def test_a_claimed_job_runs_and_its_result_is_written_before_celery_hears_of_it(world):
    add = world.run()
    assert add.key == "job_1:1"
    assert add.params.max_tokens == 20
    world.step(Delta(add.key, 0, [7, 8, 9]), ended=[ended(add.key)])
    finish = world.take(Finish)
    assert finish.held == Held("job_1", 1)
    assert finish.outcome.state == JobState.SUCCEEDED
    assert finish.outcome.output["choices"][0]["text"] == "text"
    assert finish.wasted_tokens == 0
    assert world.celery == [("accept", "job_1")]
    finish.answer(True)
    assert world.celery[1][1][:2] == (False, None)
    assert world.dispatcher.num_in_hands == 0


def test_a_result_that_was_fenced_out_is_counted_as_waste(world):
    add = world.run()
    world.step(Delta(add.key, 0, [7, 8, 9]), ended=[ended(add.key)])
    world.take(Finish).answer(False)
    assert world.take(Waste).tokens == 3
    assert exception_of(world.celery[1][1][1]) is Ignore


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"temperature": -1}, ErrorCode.INVALID_REQUEST, "temperature"),
        ({"max_tokens": 600}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_tokens"),
        ({"prompt": [1, 384]}, ErrorCode.INVALID_REQUEST, "prompt"),
        ({"nonsense": 1}, ErrorCode.INVALID_REQUEST, "nonsense"),
    ],
)
def test_a_job_that_fails_the_door_check_ends_failed_and_never_reaches_the_engine(
    world, body, code, param
):
    world.receive()
    world.take(Claim).answer(job(body=body), NOW)
    outcome = world.take(Finish).outcome
    assert (outcome.state, outcome.code, outcome.param) == (JobState.FAILED, code, param)
    assert not world.has(Add)


def test_a_job_the_kv_cache_can_never_hold_fails_with_both_numbers(world):
    ready = Ready(pid=1, max_num_seqs=8, kv_tokens=16, max_model_len=512, load_s=0.0)
    world.dispatcher.engine_ready(ready)
    world.receive()
    world.take(Claim).answer(job(), NOW)
    outcome = world.take(Finish).outcome
    assert outcome.code == ErrorCode.EXCEEDS_CAPACITY
    assert "20" in outcome.message
    assert "16" in outcome.message


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (CapacityError("n", "model takes", 9, 8), "exceeds_capacity", "invalid_request_error"),
        (CompilerBusyError("n", "later"), "compiler_busy", "server_error"),
        (NoToolFormatError("n", "tools"), "invalid_request", "invalid_request_error"),
        (ParameterError("n", "too many"), "invalid_request", "invalid_request_error"),
    ],
)
def test_a_job_the_engine_refuses_fails_with_the_engines_words(world, error, code, kind):
    add = world.run()
    world.step(refused=[refused(add.key, error)])
    outcome = world.take(Finish).outcome
    assert (outcome.code, outcome.message, outcome.param) == (code, str(error), "n")
    assert error_object(outcome.code, outcome.message)["type"] == kind


def test_a_chat_the_engine_refuses_is_told_its_own_field(world):
    world.receive()
    url, hello = "/v1/chat/completions", [{"role": "user", "content": "hello"}]
    body = {"model": "tiny", "messages": hello, "max_completion_tokens": 9}
    world.take(Claim).answer(replace(job(url=url), body=body), NOW)
    add = world.take(Add)
    error = CapacityError("max_tokens", "model takes", 9, 8)
    world.step(refused=[refused(add.key, error)])
    assert world.take(Finish).outcome.param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("finish_reason", "error", "state", "code"),
    [
        ("error", "numerical_error: nan", JobState.FAILED, ErrorCode.NUMERICAL_ERROR),
        ("error", "resource_exhausted: x", JobState.FAILED, ErrorCode.RESOURCE_EXHAUSTED),
        ("deadline", None, JobState.EXPIRED, ErrorCode.DEADLINE_EXCEEDED),
    ],
)
def test_what_ends_badly_in_the_engine_says_why(world, finish_reason, error, state, code):
    add = world.run()
    world.step(Delta(add.key, 0, [7]), ended=[ended(add.key, finish_reason, error=error)])
    finish = world.take(Finish)
    assert (finish.outcome.state, finish.outcome.code) == (state, code)
    assert finish.outcome.output is None
    assert (finish.outcome.completion_tokens, finish.wasted_tokens) == (0, 1)


def test_what_fails_and_may_be_tried_again_is_handed_back_with_its_tokens(world):
    add = world.run(max_attempts=2, retry_on="engine_crash resource_exhausted")
    error = "resource_exhausted: x"
    world.step(Delta(add.key, 0, [7]), ended=[ended(add.key, "error", error=error)])
    back = world.take(HandBack)
    assert (back.failed, back.crashed) == (ErrorCode.RESOURCE_EXHAUSTED, False)
    assert (back.checkpoint, back.num_tokens) == ([[7]], 1)
    back.answer()
    assert world.celery[-1][0] == "end"
    assert not world.has(Finish)
    assert not world.has(Abort)  # the engine has ended it


@pytest.mark.parametrize(("attempt", "retry_on"), [(2, "numerical_error"), (1, "engine_crash")])
def test_at_its_last_attempt_or_outside_its_policy_a_failure_is_the_end(world, attempt, retry_on):
    add = world.run(attempt=attempt, max_attempts=2, retry_on=retry_on)
    world.step(ended=[ended(add.key, "error", error="numerical_error: nan")])
    assert world.take(Finish).outcome.code == ErrorCode.NUMERICAL_ERROR


def test_a_lost_job_is_aborted_and_shows_no_output_afterwards(world):
    add = world.run()
    before = time.monotonic()
    world.step(Delta(add.key, 0, [7, 8]))
    world.lose("job_1", fence=1)
    assert world.take(Abort) == Abort(add.key)
    waste = world.take(Waste)
    assert (waste.held.id, waste.tokens) == ("job_1", 2)
    assert before <= waste.first_token_at <= time.monotonic()
    world.step(Delta(add.key, 0, [9]), ended=[ended(add.key, "abort")])
    world.step(ended=[ended(add.key)])
    assert not world.has(Finish)
    assert world.dispatcher.num_in_hands == 0


def test_tokens_that_come_after_the_loss_of_a_job_are_waste_too(world):
    add = world.run()
    world.step(Delta(add.key, 0, [7, 8]))
    world.lose("job_1", fence=1)
    first = world.take(Waste)
    assert (first.held.id, first.tokens) == ("job_1", 2)
    world.step(Delta(add.key, 0, [9, 10, 11]))
    late = world.take(Waste)
    assert (late.held.id, late.tokens) == ("job_1", 3)
    assert first.first_token_at < late.first_token_at


def test_a_job_lost_under_an_older_fence_leaves_the_newer_attempt_alone(world):
    world.run(fence=2)
    world.lose("job_1", fence=1)
    assert not world.has(Abort)


def test_a_result_on_its_way_is_not_lost_but_fenced(world):
    add = world.run()
    world.step(ended=[ended(add.key)])
    world.lose("job_1", fence=1)
    assert not world.has(Waste)
    world.take(Finish).answer(True)


def test_a_revoked_job_is_aborted_and_its_row_cancelled(world):
    delivery = world.receive()
    world.take(Claim).answer(job(), NOW)
    add = world.take(Add)
    delivery.terminate()
    assert world.take(Abort) == Abort(add.key)
    cancel = world.take(Cancel)
    assert cancel.job_id == "job_1"
    cancel.answer()
    assert world.dispatcher.num_in_hands == 0


def test_a_revoke_before_the_claim_cancels_the_row_and_nothing_runs(world):
    delivery = world.receive()
    delivery.terminate()
    delivery.terminate()  # Celery calls again when the message is accepted
    claim, cancel = world.entries
    assert isinstance(claim, Claim)
    assert isinstance(cancel, Cancel)
    claim.answer(job(), NOW)
    cancel.answer()
    assert world.dispatcher.num_in_hands == 0
    assert world.dispatcher.holding().held == []
    assert [what for what, _ in world.celery] == ["accept", "end"]


def test_a_cold_stop_hands_back_with_the_tokens_made_so_far(world):
    delivery = world.receive()
    world.take(Claim).answer(job(), NOW)
    add = world.take(Add)
    world.step(Delta(add.key, 0, [7, 8]))
    world.dispatcher.terminate(delivery, revoked=False)
    handed_back = world.take(HandBack)
    assert handed_back.held == Held("job_1", 1)
    assert handed_back.checkpoint == [[7, 8]]
    assert not handed_back.crashed
    handed_back.answer()
    assert exception_of(world.celery[-1][1][1]) is Retry


def test_a_claim_that_commits_during_a_drain_goes_straight_back(world):
    world.receive()
    world.dispatcher.begin_drain()
    world.take(Claim).answer(job(), NOW)
    assert world.take(HandBack).held == Held("job_1", 1)
    assert world.dispatcher.places() == 0


def test_a_drain_gives_back_what_waits_and_lets_the_rest_run(world):
    world.run("job_1", crash_count=2)
    world.receive("job_2")
    world.take(Claim).answer(job("job_2", crash_count=2), NOW)
    wait_for(lambda: world.dispatcher.stats()["jobs_waiting"] == 1)
    world.dispatcher.begin_drain()
    assert world.take(HandBack).held.id == "job_2"
    assert not world.has(HandBack)
    world.dispatcher.hand_back_all()
    assert world.take(HandBack).held.id == "job_1"


def test_an_engine_death_hands_back_what_ran_as_suspects_with_its_tokens(world):
    add = world.run()
    world.step(Delta(add.key, 0, [7]))
    world.dispatcher.engine_died("SIGKILL")
    died = world.take(Died)
    assert (died.ending, died.model, died.job_ids) == ("SIGKILL", "tiny", ["job_1"])
    handed_back = world.take(HandBack)
    assert handed_back.crashed
    assert handed_back.checkpoint == [[7]]
    assert not world.has(Abort)
    assert world.dispatcher.places() == 0


def test_nothing_is_told_of_a_dead_engines_blocks(world):
    world.run()
    stepped = Stepped(
        num_steps=1, num_waiting=0, free_tokens=0, deltas=[], ended=[], refused=[],
        stats={"num_blocks": 9, "num_free_blocks": 4},
    )  # fmt: skip
    world.dispatcher.engine_stepped(stepped)
    assert world.dispatcher.stats()["num_free_blocks"] == 4
    world.dispatcher.engine_died("SIGKILL")
    assert "num_free_blocks" not in world.dispatcher.stats()


def test_what_waited_when_the_engine_died_runs_in_the_next_one(world):
    world.dispatcher.engine_died("SIGKILL")
    world.receive()
    world.take(Claim).answer(job(), NOW)
    wait_for(lambda: world.dispatcher.stats()["jobs_waiting"] == 1)
    assert not world.has(Add)
    world.ready()
    assert world.take(Add).key == "job_1:1"


def test_what_waits_in_vain_for_a_new_engine_goes_to_other_workers(world, monkeypatch):
    world.dispatcher.engine_died("SIGKILL")
    world.receive()
    world.take(Claim).answer(job(), NOW)
    wait_for(lambda: world.dispatcher.stats()["jobs_waiting"] == 1)
    world.dispatcher.check_time()
    assert not world.has(HandBack)
    monkeypatch.setattr("worker.dispatcher.ENGINE_WAIT_S", 0.0)
    world.dispatcher.check_time()
    assert not world.take(HandBack).crashed


def test_a_job_goes_on_from_its_checkpoint(world):
    add = world.run(checkpoint=[[7, 8, 9]])
    assert add.generated == [[7, 8, 9]]
    world.step(Delta(add.key, 0, [10]))
    world.lose("job_1", fence=1)
    assert world.take(Waste).tokens == 4  # the ledger leaves out those of the row's checkpoint


@pytest.mark.parametrize("is_stored", [False, True])
def test_waste_says_all_that_the_attempt_had_whatever_is_known_to_be_stored(world, is_stored):
    add = world.run()
    for number in range(3):
        world.step(Delta(add.key, 0, [number]))
        holding = world.dispatcher.holding()
        world.dispatcher.beaten(holding, lost=(), stored=holding.checkpoints if is_stored else ())
    assert list(holding.checkpoints) == [Held("job_1", 1)]
    world.lose("job_1", fence=1)
    waste = world.take(Waste)
    assert (waste.tokens, waste.whole) == (3, True)


def test_a_revoke_is_written_before_the_waste_that_it_makes(world):
    delivery = world.receive()
    world.take(Claim).answer(job("job_1"), NOW)
    world.step(Delta(world.take(Add).key, 0, [7]))
    delivery.terminate()
    kinds = [type(entry) for entry in world.entries]
    assert kinds.index(Cancel) < kinds.index(Waste)


@pytest.mark.parametrize("draining", [False, True])
def test_a_checkpoint_nobody_has_gone_on_from_stays_in_its_row(world, draining):
    if draining:
        world.receive()
        world.dispatcher.begin_drain()
        world.take(Claim).answer(job(checkpoint=[[7, 8, 9]]), NOW)
        assert world.take(HandBack).checkpoint is None
    else:
        world.run(checkpoint=[[7, 8, 9]])
        world.dispatcher.hand_back_all()
        assert world.take(HandBack).checkpoint == [[7, 8, 9]]


def test_tokens_of_earlier_attempts_are_waste_where_this_one_is_refused(world):
    world.receive()
    world.take(Claim).answer(job(checkpoint=[[7, 8, 9]], body={"temperature": -1}), NOW)
    assert world.take(Finish).wasted_tokens == 3


@pytest.mark.parametrize("num_resumed", [0, 2])
def test_a_hand_back_says_all_that_the_attempt_has(world, num_resumed):
    add = world.run(checkpoint=[[7, 8]] if num_resumed else None)
    world.step(Delta(add.key, 0, [9, 10, 11]))
    world.dispatcher.hand_back_all()
    assert world.take(HandBack).num_tokens == num_resumed + 3


@pytest.mark.parametrize("checkpoint", [[[7], [8]], [[7] * 21], [[]]])
def test_a_checkpoint_that_does_not_fit_the_job_is_left(world, checkpoint):
    assert world.run(checkpoint=checkpoint).generated == []


def test_only_jobs_with_tokens_at_an_earlier_beat_are_checkpointed(world):
    add = world.run()
    world.step(Delta(add.key, 0, [7]))
    first_beat = world.dispatcher.holding()
    assert first_beat.checkpoints == {}
    assert list(first_beat.first_tokens) == [Held("job_1", 1)]
    nothing_new = world.dispatcher.holding()
    assert (nothing_new.checkpoints, nothing_new.first_tokens) == ({}, {})
    world.step(Delta(add.key, 0, [8]))
    holding = world.dispatcher.holding()
    assert holding.held == [Held("job_1", 1)]
    assert holding.first_tokens == first_beat.first_tokens
    assert holding.checkpoints == {Held("job_1", 1): [[7, 8]]}


def test_a_soft_limit_ends_the_job_when_the_engine_has_let_go(world):
    add = world.run(limits={"soft": 1e-9})
    world.dispatcher.check_time()
    assert world.take(Abort) == Abort(add.key)
    world.dispatcher.check_time()
    assert not world.has(Abort)
    world.step(Delta(add.key, 0, [7]), ended=[ended(add.key, "abort")])
    finish = world.take(Finish)
    assert finish.outcome.code == ErrorCode.TIME_LIMIT
    assert "soft" in finish.outcome.message
    assert finish.wasted_tokens == 1
    finish.answer(True)
    assert [what for what, _ in world.celery] == ["accept", "time_out", "end"]


def test_a_hard_limit_ends_the_job_at_once_and_celery_is_told_only_that(world):
    add = world.run(limits={"hard": 1e-9})
    before = time.monotonic()
    world.step(Delta(add.key, 0, [7]))
    world.dispatcher.check_time()
    assert world.take(Abort) == Abort(add.key)
    finish = world.take(Finish)
    assert before <= finish.outcome.first_token_at <= time.monotonic()
    assert (finish.outcome.state, finish.outcome.code) == (JobState.FAILED, ErrorCode.TIME_LIMIT)
    finish.answer(True)
    world.step(ended=[ended(add.key, "abort")])
    assert [what for what, _ in world.celery] == ["accept", "time_out"]
    assert world.dispatcher.num_in_hands == 0


def test_tokens_of_the_step_in_which_a_hard_limit_struck_are_waste(world):
    add = world.run(limits={"hard": 1e-9})
    world.step(Delta(add.key, 0, [7, 8]))
    world.dispatcher.check_time()
    finish = world.take(Finish)
    assert finish.wasted_tokens == 2
    world.step(Delta(add.key, 0, [9]))
    assert world.take(Waste).tokens == 1
    finish.answer(True)
    world.step(Delta(add.key, 0, [10, 11]), ended=[ended(add.key, "abort")])
    assert world.take(Waste).tokens == 2
    assert not world.has(Waste)


def test_what_a_hard_limit_ended_too_late_is_counted_once(world):
    add = world.run(limits={"hard": 1e-9})
    world.step(Delta(add.key, 0, [7, 8]))
    world.dispatcher.check_time()
    world.step(Delta(add.key, 0, [9]))
    assert world.take(Waste).tokens == 1
    world.take(Finish).answer(False)  # cancelled before
    assert world.take(Waste).tokens == 2
    assert not world.has(Waste)


def test_a_deadline_travels_as_seconds_from_now(world):
    add = world.run(deadline_at=NOW + 60)
    assert add.deadline_s == pytest.approx(60, abs=5)


def test_an_unseeded_job_draws_the_same_noise_in_every_attempt(world):
    first = world.run("job_1")
    world.lose("job_1", fence=1)
    assert world.run("job_1", fence=2).params.seed == first.params.seed
    assert world.run("job_2").params.seed != first.params.seed
    assert world.run("job_3", body={"seed": 5}).params.seed == 5


def test_a_last_chance_runs_alone_and_closes_the_door_until_then(world):
    add = world.run("job_1")
    world.receive("job_2")
    world.take(Claim).answer(job("job_2", crash_count=2), NOW)
    wait_for(lambda: world.dispatcher.stats()["jobs_waiting"] == 1)
    assert not world.has(Add)
    assert world.dispatcher.places() == 0
    world.step(ended=[ended(add.key)])
    assert world.take(Add).key == "job_2:1"


def test_news_of_free_places_wakes_the_event_loop(world):
    add = world.run()
    before = world.num_wakes
    world.step(Delta(add.key, 0, [7]))
    assert world.num_wakes == before
    world.step(ended=[ended(add.key)])
    assert world.num_wakes == before + 1


def test_a_second_message_of_a_job_in_hand_is_dropped_even_if_read_back_as_ours(world):
    world.run()
    world.receive()
    world.take(Claim).answer(job(), NOW)
    assert world.dispatcher.num_in_hands == 1
    assert not world.has(Add)


def test_a_whole_job_is_inserted_and_claimed_together(world):
    sent = {"url": "/v1/completions", "body": {"model": "tiny", "prompt": "hi"}, "custom_id": "c"}
    read = read_sent_job("job_1", sent, max_attempts=5, max_bytes=1000, served=SERVED)
    world.dispatcher.receive_job(world.deliver(), read)
    claim = world.take(Claim)
    assert claim.job_id == "job_1"
    assert claim.new_job.custom_id == "c"


def test_a_whole_job_for_another_model_is_only_stored(world):
    sent = {"url": "/v1/completions", "body": {"model": "other", "prompt": "hi"}}
    read = read_sent_job("job_1", sent, max_attempts=5, max_bytes=1000, served=SERVED)
    world.dispatcher.receive_job(world.deliver(), read)
    insert = world.take(Insert)
    assert insert.new_job.model == "other"
    insert.answer()
    assert world.dispatcher.num_in_hands == 0


def test_a_whole_job_that_is_not_one_becomes_a_failed_row(world):
    read = read_sent_job("job_1", {"url": 5}, max_attempts=5, max_bytes=1000, served=SERVED)
    world.dispatcher.receive_job(world.deliver(), read)
    claim = world.take(Claim)
    claim.answer(job(body=claim.new_job.body), NOW)
    outcome = world.take(Finish).outcome
    assert outcome.code == ErrorCode.INVALID_REQUEST
    assert "url" in outcome.message


def whole(world, **body):
    sent = {"url": "/v1/completions", "body": {"model": "tiny", "prompt": "hello"} | body}
    return read_sent_job("job_1", sent, max_attempts=5, max_bytes=1000, served=SERVED)


@pytest.mark.parametrize(
    ("body", "max_tokens"), [({"max_tokens": 20}, 20), ({"max_tokens": 600}, 0), ({"n": 199}, 0)]
)
def test_the_prompt_of_a_whole_job_is_counted_when_it_is_tokenized(world, body, max_tokens):
    """Also where the engine's limits or an option refuse the job."""
    sent = whole(world, **body)
    world.dispatcher.receive_job(world.deliver(), sent)
    claimed = job(body=sent.new_job.body, prompt_tokens=0)
    world.take(Claim).answer(claimed, NOW)
    num_tokens = len(world.tokenizer.encode_input(prompt="hello"))
    assert world.take(Count).counted == Counted("job_1", num_tokens, max_tokens)
    assert world.take(Finish if not max_tokens else Add)


def test_a_prompt_that_the_api_has_counted_is_not_counted_again(world):
    world.run(prompt_tokens=5)
    assert not world.has(Count)


@pytest.mark.parametrize("claimed", [None, job(prompt_tokens=0)])
def test_a_whole_job_revoked_before_its_claim_came_in_is_counted_all_the_same(world, claimed):
    delivery = world.deliver()
    world.dispatcher.receive_job(delivery, whole(world))
    delivery.terminate()
    world.take(Claim).answer(claimed, NOW)
    assert world.take(Count).counted.prompt_tokens > 0
    assert not world.has(Add)


def test_a_whole_job_revoked_as_a_message_is_counted_if_its_model_is_ours(world):
    world.dispatcher.cancel("job_1", whole(world, model="other"))
    world.dispatcher.cancel("job_2")
    world.dispatcher.cancel("job_1", whole(world))
    assert world.take(Count).counted.prompt_tokens > 0
    assert not world.has(Count)


def chunk(world, num_jobs: int) -> list[Delivery]:
    """The engine has 8 places."""
    return [world.receive(f"job_{i}", background=True) for i in range(num_jobs)]


def posted(world, kind: type[E]) -> list[str]:
    """The jobs of all entries of a kind, taken."""
    found = [entry.job_id for entry in world.entries if isinstance(entry, kind)]
    world.entries[:] = [entry for entry in world.entries if not isinstance(entry, kind)]
    return found


def test_of_a_chunk_as_many_are_claimed_as_the_engine_is_about_to_have_places_for(world):
    chunk(world, 32)
    assert posted(world, Claim) == [f"job_{i}" for i in range(12)]  # half as many wait as run
    waiting = [("accept", f"job_{i}") for i in range(12, 32)]
    assert world.celery == waiting, "its message is held, though nothing hangs on it"
    assert not world.dispatcher.takes_background()
    assert world.dispatcher.num_in_hands == 32
    assert world.dispatcher.places(), "who is waited for stands behind rows"


def test_what_waits_of_a_chunk_is_claimed_as_places_come_free(world):
    chunk(world, 14)
    claims = [world.take(Claim) for _ in range(12)]
    claims[0].answer(None, NOW)  # somebody else's
    assert posted(world, Claim) == ["job_12"]
    claims[1].answer(job("job_1"), NOW)
    add = world.take(Add)
    world.step(Delta(add.key, 0, [7]), ended=[ended(add.key)])
    assert posted(world, Claim) == ["job_13"]
    assert not world.dispatcher.takes_background()  # there is no room yet


def test_a_drain_puts_back_what_waits_of_a_chunk_and_what_comes_later(world):
    chunk(world, 13)
    posted(world, Claim)
    world.dispatcher.begin_drain()
    put_back = world.take(PutBack)
    assert put_back.job_id == "job_12"
    put_back.answer()
    assert world.celery[-1][0] == "end"
    world.receive("late", background=True)
    assert posted(world, PutBack) == ["late"]
    assert posted(world, Claim) == []


def test_what_waits_of_a_chunk_goes_to_others_while_there_is_no_engine(world, monkeypatch):
    chunk(world, 13)
    world.dispatcher.engine_died("SIGKILL")
    posted(world, Claim)
    world.dispatcher.check_time()
    assert posted(world, PutBack) == posted(world, Claim) == []
    monkeypatch.setattr("worker.dispatcher.ENGINE_WAIT_S", 0.0)
    world.dispatcher.check_time()
    assert posted(world, PutBack) == ["job_12"]


@pytest.mark.parametrize("revoked", [False, True])
def test_what_waits_of_a_chunk_is_ended_by_a_revoke_and_put_back_by_a_cold_stop(world, revoked):
    *_, last = chunk(world, 13)
    world.dispatcher.terminate(last, revoked=revoked)
    assert posted(world, Cancel if revoked else PutBack) == ["job_12"]
    world.dispatcher.check_time()
    assert "job_12" not in posted(world, Claim)


def test_an_id_that_waits_and_comes_again_runs_once(world):
    chunk(world, 13)
    world.receive("job_12", background=True)
    for claim in [world.take(Claim) for _ in range(12)]:
        claim.answer(None, NOW)
    first, second = world.take(Claim), world.take(Claim)
    assert first.job_id == second.job_id == "job_12"
    first.answer(job("job_12"), NOW)
    second.answer(None, NOW)
    assert world.take(Add).key == "job_12:1"
    assert not world.has(Add)
