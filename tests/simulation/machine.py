"""Random requests against the scheduler, its block manager and a fake runner; every rule checked.

After every step: the books balance, nobody reads another's K and V, every running sequence moves,
whoever is let in goes in turn, and nobody has waited longer than all work ahead of it could take.
At the end everything drains, in a bounded number of steps, to what each sequence would have
generated alone.
"""

import operator
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.capacity import CapacityError
from engine.sampling_params import ParameterError, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence, SequenceState
from engine.step_plan import StepPlan
from tests.simulation.world import EOS, VOCAB_SIZE, FakeRunner, expected_outcomes

MAX_MODEL_LEN = 40
KINDS = ("abort", "abort in a step", "stop", "error", "half a step")
DOCUMENTS = ([1, 2, 3, 1, 2, 3, 3, 2, 1, 2, 1, 1], [1, 2, 3, 1, 1, 1, 1, 1, 1, 1], [2, 2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    prompt: list[int]
    max_tokens: int
    cut_to_fit: bool  # else it may be more than the pool can ever hold
    options: dict[str, Any]
    priority: int
    patience: int | None  # steps to its deadline
    salt: bytes
    num_resumed: int  # generated tokens it has from an earlier attempt


sampling = st.fixed_dictionaries(
    {
        "n": st.sampled_from([1, 1, 2, 3]),
        "logprobs": st.sampled_from([None, None, 0]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
    }
)
beams = st.builds(
    lambda shape, **options: (
        options
        | dict(zip(("num_beams", "num_beam_groups"), shape, strict=True))
        | {"n": min(options["n"], shape[0]), "diversity_penalty": 2.0 if shape[1] > 1 else 0.0}
    ),
    st.sampled_from([(2, 1), (3, 1), (4, 1), (4, 2), (3, 3)]),
    n=st.integers(1, 4),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
requests = st.builds(
    Request,
    prompt=st.builds(
        lambda document, cut, tail: (document[:cut] + tail) or [1],
        st.sampled_from(DOCUMENTS),
        st.integers(0, 12),
        st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
    ),
    max_tokens=st.integers(1, 24),
    cut_to_fit=st.sampled_from([True, True, True, False]),
    options=st.builds(
        operator.or_,
        sampling | sampling | beams,
        st.fixed_dictionaries(
            {
                "min_tokens": st.sampled_from([0, 0, 0, 1]),
                "ignore_eos": st.booleans(),
                "stop_token_ids": st.sampled_from([(), (), (), (2,)]),
            }
        ),
    ),
    priority=st.sampled_from([0, 0, 1, 2]),
    patience=st.none() | st.none() | st.integers(0, 30),
    salt=st.sampled_from([b"", b"", b"other tenant"]),
    num_resumed=st.sampled_from([0, 0, 0, 2, 6]),
)


@dataclass(eq=False)
class Expectation:
    """What the machine knows of a sequence that the scheduler should get right."""

    sequence: Sequence
    generated: list[int]
    finish_reason: FinishReason
    deadline: float | None
    patience: int  # steps it may at most take from now on


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 16) | st.integers(1, 64),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 8),
        max_num_batched_tokens=st.integers(1, 6) | st.integers(1, 24),
        max_num_scored_tokens=st.sampled_from([1, 3, 2**31]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        requests=st.lists(requests, min_size=3, max_size=8),
    )
    def start(self, requests, **limits):
        self.scheduler = Scheduler(
            max_model_len=MAX_MODEL_LEN, eos_token_ids=frozenset({EOS}), model_id=b"m", **limits
        )
        self.limits = limits
        self.runner = FakeRunner(limits["num_blocks"], limits["block_size"])
        self.live: dict[Sequence, Expectation] = {}
        self.now = 0
        self.num_requests = 0
        self.arrive(requests)

    @rule(requests=st.lists(requests, min_size=1, max_size=4))
    def arrive(self, requests):
        for request in requests:
            self._arrive(request)
        self.scheduler.check()

    @precondition(lambda self: self.live)
    @rule(num_steps=st.sampled_from([1, 1, 2, 8]))
    def steps(self, num_steps):
        for _ in range(num_steps):
            self._step()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), kind=st.sampled_from(KINDS))
    def disturb(self, data, kind):
        chosen = data.draw(st.sampled_from(list(self.live)))
        if kind == "abort":
            self._abort(chosen.request_id)
        elif kind == "abort in a step":
            self._step(meanwhile=lambda plan, sampled: self._abort(chosen.request_id))
        elif kind == "stop":
            self._finish(chosen, FinishReason.STOP)
        elif kind == "half a step":
            self._step(num_rows=1)
        else:
            self._step(meanwhile=self._fail_last_row)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2 * _work(self.live) + 1):
            if not self.scheduler.unfinished:
                break
            self._step()
        assert not self.scheduler.unfinished, f"{list(self.live)} did not finish"
        assert not self.live
        assert self.scheduler.num_free_blocks == self.scheduler.num_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.promised_tokens == 0

    def _arrive(self, request: Request):
        prompt = request.prompt
        max_tokens = request.max_tokens
        num_beams = request.options.get("num_beams", 1)
        limits = self.limits
        capacity = min(MAX_MODEL_LEN, limits["num_blocks"] // num_beams * limits["block_size"])
        if request.cut_to_fit:
            prompt = prompt[: max(0, capacity - 1)] or prompt
            max_tokens = max(1, min(max_tokens, capacity - len(prompt)))
        params = SamplingParams(max_tokens=max_tokens, **request.options)
        seed = self.num_requests % 3  # requests that differ in nothing else generate the same
        outcomes = expected_outcomes(prompt, params, seed, request.salt)
        deadline = None if request.patience is None else self.now + request.patience
        num_resumed = request.num_resumed if num_beams == 1 else 0
        resumed = [ids[:num_resumed] for ids, _ in outcomes]
        self.num_requests += 1

        def add():
            return self.scheduler.add(
                f"request {self.num_requests}",
                prompt,
                params,
                seed=seed,
                priority=request.priority,
                deadline=deadline,
                generated=resumed if num_resumed else (),
                cache_salt=request.salt,
            )

        if num_beams > min(limits["max_num_seqs"], limits["max_num_batched_tokens"]):
            with pytest.raises(ParameterError, match=r"^num_beams must be at most"):
                add()
            return
        needed = len(prompt) + max_tokens
        if needed <= capacity:
            self._expect(add(), outcomes, deadline)
            return
        with pytest.raises(CapacityError) as refused:
            add()
        assert refused.value.needed == needed
        assert refused.value.needed > refused.value.available >= capacity

    def _expect(self, sequences, outcomes, deadline):
        """Whoever arrives can be held up by what is there, and by a later arrival ahead of it."""
        work = _work(sequences)
        priority = sequences[0].priority
        for other in self.live.values():
            if other.sequence.priority < priority:
                other.patience += 2 * work
        work += _work(self.live)
        for sequence, (generated, finish_reason) in zip(sequences, outcomes, strict=True):
            self.live[sequence] = Expectation(
                sequence, generated, finish_reason, deadline, patience=2 * work + 1
            )

    def _step(self, meanwhile=None, num_rows=None):
        """One step; `num_rows` of it, if the device had no memory for more."""
        waited = {s for s in self.live if s.state is SequenceState.WAITING}
        ran = {s: s.num_preemptions for s in self.live if s.state is SequenceState.RUNNING}
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check()
        self._check_plan(plan)
        self._check_turns(waited, ran)
        plan = StepPlan(plan.scheduled[:num_rows], plan.block_copies)
        sampled = self.runner.run(plan)
        if meanwhile is not None:
            meanwhile(plan, sampled)
        changed = self.scheduler.update(plan, sampled, self.now)
        self.scheduler.check()
        self._check_changed(changed)
        self.now += 1
        for expectation in self.live.values():
            expectation.patience -= 1
            assert expectation.patience >= 0, f"{expectation.sequence} starves"

    def _check_plan(self, plan: StepPlan):
        assert plan.num_tokens <= self.limits["max_num_batched_tokens"]
        assert len(plan.scheduled) <= self.limits["max_num_seqs"]
        planned = [row.sequence for row in plan.scheduled]
        running = {s for s in self.live if s.state is SequenceState.RUNNING}
        assert set(planned) == running, "a running sequence stands still"
        assert len(planned) == len(running)
        assert all(row.num_scheduled_tokens > 0 for row in plan.scheduled)
        waits = any(s.state is SequenceState.WAITING for s in self.live)
        assert planned or not waits, "nothing runs though something waits"

    def _check_turns(self, waited: set[Sequence], ran: dict[Sequence, int]):
        """Who was let in left no better one waiting; who was preempted, no worse one running.

        A short one may pass a long one that was preempted, and is let in behind it: be it one that
        waited, or one that was preempted in the same step. `ran` has how often each had been.
        """
        waiting = {s for s in self.live if s.state is SequenceState.WAITING}
        running = {s for s in self.live if s.state is SequenceState.RUNNING}
        for sequence in waited & running:
            assert sequence.num_cached_tokens <= sequence.num_prompt_tokens
            ahead = [s for s in waiting if _goes_before(s, sequence) and not _is_stalled(s, ran)]
            passed = [
                s for s in ahead if not self._is_held(s, waited) and not self._may_pass(sequence, s)
            ]
            assert not passed, f"{sequence} was let in ahead of {passed}"
        for sequence in ran.keys() & waiting:
            if _is_stalled(sequence, ran):
                continue
            spared = [
                s
                for s in running
                if _goes_before(sequence, s)
                and not (s.num_preemptions != ran.get(s) and self._may_pass(s, sequence))
            ]
            assert not spared, f"{sequence} was preempted, not {spared}"

    def _may_pass(self, sequence: Sequence, long: Sequence) -> bool:
        """A short prompt may pass one that has more to compute than half a step."""
        half = self.limits["max_num_batched_tokens"] // 2
        return sequence.num_tokens <= half < long.num_tokens

    def _is_held(self, sequence: Sequence, waited: set[Sequence]) -> bool:
        """It may be waiting for an earlier sample of its request to compute their prompt.

        Of a search, it may be a place without a beam.
        """
        if sequence.params.num_beams > 1:
            return sequence in self.scheduler._held[sequence.request_id]
        return any(
            s.request_id == sequence.request_id
            and s.sample_index < sequence.sample_index
            and (s in waited or s.num_computed_tokens < s.num_prompt_tokens)
            for s in self.live
        )

    def _check_changed(self, changed: list[Sequence]):
        assert len(set(changed)) == len(changed)
        for sequence in changed:
            expectation = self.live[sequence]
            generated = sequence.generated_ids
            cut_search = (
                sequence.params.num_beams > 1 and sequence.finish_reason is FinishReason.DEADLINE
            )
            assert cut_search or generated == expectation.generated[: len(generated)]
            if sequence.state is not SequenceState.FINISHED:
                continue
            if sequence.finish_reason is FinishReason.DEADLINE:
                assert expectation.deadline is not None
                assert expectation.deadline <= self.now
            else:
                assert sequence.finish_reason is expectation.finish_reason
                assert generated == expectation.generated
                self._check_scored(sequence)
            del self.live[sequence]
        for sequence, expectation in self.live.items():
            assert sequence.state is not SequenceState.FINISHED, f"{sequence} ended unheard"
            assert expectation.deadline is None or expectation.deadline > self.now, "overdue"

    def _check_scored(self, sequence: Sequence):
        """Each log-probability asked for was there to be read once, in order."""
        prompt = range(1, sequence.num_prompt_tokens) if _scores_prompt(sequence) else ()
        output = range(sequence.num_prompt_tokens, sequence.num_tokens)
        asked = [*prompt, *(output if sequence.params.logprobs is not None else ())]
        assert self.runner.scored.pop(sequence, []) == asked

    def _abort(self, request_id: str):
        ended = self.scheduler.abort(request_id)
        for sequence in ended:
            assert sequence.finish_reason is FinishReason.ABORT
            del self.live[sequence]
        # what ended by itself a moment ago will be told by the next update
        left = [s for s in self.live if s.request_id == request_id]
        assert all(s.state is SequenceState.FINISHED for s in left)
        self.scheduler.check()

    def _fail_last_row(self, plan: StepPlan, sampled: list[int | None]):
        for index, row in enumerate(plan.scheduled):
            if row.samples and index == len(plan.scheduled) - 1:
                sampled[index] = None
                self._finish(row.sequence, FinishReason.ERROR)

    def _finish(self, sequence: Sequence, reason: FinishReason):
        if sequence.state is SequenceState.FINISHED:
            return
        is_beam = sequence.params.num_beams > 1
        if reason is FinishReason.STOP and (sequence.num_unscored_tokens or is_beam):
            return  # would end only once these are scored; and no text stops a beam
        self.scheduler.finish(sequence, reason)
        ended = [s for s in self.live if s.request_id == sequence.request_id]
        for each in ended if is_beam else [sequence]:
            assert each.finish_reason is reason
            assert not each.block_table
            del self.live[each]
        self.scheduler.check()


def _scores_prompt(sequence: Sequence) -> bool:
    return sequence.params.prompt_logprobs is not None and sequence.sample_index == 0


def _work(sequences: Iterable[Sequence]) -> int:
    return sum(s.num_prompt_tokens + s.params.max_tokens for s in sequences)


def _is_stalled(sequence: Sequence, ran: Container[Sequence]) -> bool:
    """A beam that ran and waited for others of its search: it makes room out of turn."""
    return sequence.params.num_beams > 1 and sequence in ran


def _goes_before(one: Sequence, other: Sequence) -> bool:
    return (-one.priority, one.arrival, one.sample_index) < (
        -other.priority,
        other.arrival,
        other.sample_index,
    )
