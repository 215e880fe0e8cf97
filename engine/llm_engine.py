"""The engine's face: requests in, text out, one step at a time.

Owns the requests: which samples belong together, their text, their times. Who is computed when is
the Scheduler's, the computing is the ModelRunner's. Not for several threads: one owns the engine.

An error in a step is not caught, but for a lack of device memory: after it the device's state is
unknown, so the process should end and a new one take over from the last checkpoint.
"""

import dataclasses
import functools
import math
import random
import time
from collections import abc
from typing import Any

from engine.bounds import check_int
from engine.config import EngineConfig
from engine.detokenizer import Detokenizer
from engine.model_runner import ModelRunner, Runner
from engine.outputs import Delta, EngineStats, RequestOutput, RequestUpdate
from engine.repetition import LoopDetector
from engine.requests import Request, Sample, check_types
from engine.sampler import NumericalError
from engine.sampling_params import ParameterError, SamplingParams, check_generated, check_prompt
from engine.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence, SequenceState, TokenFilter
from engine.speculation.setup import draft_runner, speculator_of
from engine.step_memory import max_num_scored_tokens
from engine.step_plan import StepPlan
from engine.step_result import StepResult
from engine.stepper import Stepper
from engine.structured.compiler import GrammarCompiler
from engine.structured.waiting import WaitingForForms
from engine.token_rules import token_rules
from engine.tokenizer import Tokenizer
from engine.totals import Totals
from engine.weights import resolve_folder

COMPILE_WAIT_S = 0.01  # a step's, when there is nothing to do but to wait for a form


class LLMEngine:
    """A model that generates for many requests at once, in one continuously changing batch.

    Add requests at any time, call `step` while `has_unfinished`; each step returns what it brought.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: abc.Callable[[], float] = time.monotonic,
        tokenizer: Tokenizer | None = None,
        runner: Runner | None = None,
        on_compile: abc.Callable[[], None] = lambda: None,
    ) -> None:
        """Load the model, or share a tokenizer and a runner that are loaded already.

        `on_compile` is called if CPU kernels are not on disk yet, before they are compiled.
        Raises CheckpointError, TokenizerError or ValueError when the model cannot be set up.
        """
        if tokenizer is None:
            tokenizer = Tokenizer.load(resolve_folder(config.model))
        self.tokenizer = tokenizer
        # first: the model's blocks take what is left
        draft = draft_runner(config, tokenizer, on_compile)
        if runner is None:
            eos_token_ids = tokenizer.eos_token_ids
            runner = ModelRunner(
                config, eos_token_ids=eos_token_ids, on_compile=on_compile, beside=draft
            )
        self._runner: Runner = runner
        num_tokens = config.max_num_batched_tokens or runner.max_num_batched_tokens
        self.config = dataclasses.replace(config, max_num_batched_tokens=num_tokens)
        self.max_model_len = self._runner.max_model_len
        self.vocab_size = self._runner.vocab_size
        eos_token_ids = runner.eos_token_ids | tokenizer.eos_token_ids
        self._scheduler = Scheduler(
            num_blocks=self._runner.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=num_tokens,
            max_model_len=self.max_model_len,
            max_num_scored_tokens=max_num_scored_tokens(self.vocab_size),
            eos_token_ids=eos_token_ids,
            enable_prefix_caching=config.enable_prefix_caching,
            model_id=self._runner.model_id,
        )
        self._waiting_for_forms = WaitingForForms(
            GrammarCompiler(tokenizer.to_json(), self.vocab_size, eos_token_ids)
        )
        self._clock = clock
        self._seeds = random.Random(config.seed)
        self._requests: dict[str, Request] = {}
        self._owners: dict[int, tuple[Request, Sample]] = {}  # by seq_id
        self._ended_early: list[Sequence] = []  # by their checkpoint, told in the next step
        self._totals = Totals()
        self._stepper = Stepper(
            self._runner,
            self._scheduler,
            self._totals,
            clock,
            speculator=speculator_of(config, clock, runner, draft),
            has_waiting=self._has_waiting,
            on_start=self._mark_started,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests or self._waiting_for_forms)

    def add_request(
        self,
        request_id: str,
        prompt: str | abc.Sequence[int] | None = None,
        params: SamplingParams = SamplingParams(max_tokens=16),  # noqa: B008 (frozen)
        *,
        messages: list[dict[str, Any]] | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        generated: abc.Sequence[abc.Sequence[int]] = (),
        cache_salt: bytes = b"",
    ) -> None:
        """Take in a prompt (text or ids) or a chat's messages, to be scheduled from the next step.

        One with a form is scheduled once that is compiled; if that fails, a step's update says so.
        `deadline_s` counts from now. `generated` is an earlier attempt's `checkpoint`: generation
        goes on behind it. Requests with different salts share no prefix. Raises ParameterError;
        then nothing has changed.
        """
        check_types(params, priority, cache_salt)
        check_int("n", params.n, 1, self.config.max_n)
        now = self._clock()
        prompt_ids = self.tokenizer.encode_input(prompt=prompt, messages=messages)
        check_prompt(
            prompt_ids, params, vocab_size=self.vocab_size, max_model_len=self.max_model_len
        )
        check_generated(generated, vocab_size=self.vocab_size)
        rules = token_rules(params, self.tokenizer)
        seconds_left = min(_seconds(deadline_s), _seconds(params.timeout_s))
        if request_id in self._waiting_for_forms:
            raise ParameterError("request_id", f"request {request_id!r} is already here")
        self._scheduler.check_request(request_id, len(prompt_ids), params, generated)
        add = functools.partial(
            self._scheduler.add,
            request_id,
            prompt_ids,
            params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            priority=priority,
            deadline=now + seconds_left if seconds_left < math.inf else None,
            generated=generated,
            cache_salt=cache_salt,
            token_rules=rules,
        )
        has_timeout = params.timeout_s is not None and params.timeout_s == seconds_left
        admit = functools.partial(self._admit, add, now, has_timeout)
        if params.structured_outputs is None:
            admit(())
            return
        self._waiting_for_forms.put(
            request_id, params.structured_outputs, params.n, generated, admit
        )

    def _admit(
        self,
        add: abc.Callable[[], list[Sequence]],
        arrived_at: float,
        has_timeout: bool,
        token_filters: abc.Sequence[TokenFilter],
    ) -> None:
        """Give a request to the scheduler; its samples have these filters, or none."""
        sequences = add()
        for sequence, token_filter in zip(sequences, token_filters, strict=False):
            sequence.token_filter = token_filter
        samples = [self._sample(sequence) for sequence in sequences]
        request_id = sequences[0].request_id
        request = Request(request_id, samples, arrived_at=arrived_at, has_timeout=has_timeout)
        self._requests[request_id] = request
        self._totals.prompt_tokens += sequences[0].num_prompt_tokens
        for sample in samples:
            self._owners[sample.sequence.seq_id] = (request, sample)
            self._take_in_tokens(sample)
            if sample.sequence.finish_reason is not None:
                self._ended_early.append(sample.sequence)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free its blocks at once. None when there is no such request."""
        admit = self._waiting_for_forms.drop(request_id)
        if admit is not None:
            admit(())
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._scheduler.abort(request_id)
        for sample in request.samples:
            self._take_in_tokens(sample)
        return self._end(request, self._clock())

    def step(self) -> list[RequestUpdate]:
        """Compute one step; return what it brought, by request in order of the batch."""
        idle = not self._requests
        refused = self._waiting_for_forms.settle(wait_s=COMPILE_WAIT_S if idle else 0.0)
        started, num_before = self._clock(), self._totals.num_steps
        updates: list[RequestUpdate] = []
        self._stepper.step(started, lambda *ran: updates.extend(self._taken_in(*ran)))
        if not self._requests:
            assert self._scheduler.num_free_blocks == self._scheduler.num_blocks, "leaked blocks"
        num_steps = self._totals.num_steps - num_before
        self._totals.took(self._clock() - started, num_steps=num_steps)
        return refused + updates

    def _taken_in(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """What a step has brought, by request."""
        for index, scores in result.scores.items():
            _, sample = self._owners[plan.scheduled[index].sequence.seq_id]
            sample.scores += scores
        changed = self._fail_rows(plan, result.tokens)
        tokens = [None if isinstance(token, NumericalError) else token for token in result.tokens]
        now = self._clock()
        changed += self._scheduler.update(plan, tokens, now)
        changed += self._ended_early + self._stepper.failed
        self._ended_early, self._stepper.failed = [], []
        return self._updates(changed, now)

    def _has_waiting(self, sequence: Sequence) -> bool:
        """Whether samples of a sequence's request wait."""
        request, _ = self._owners[sequence.seq_id]
        return any(s.sequence.state is SequenceState.WAITING for s in request.samples)

    def _mark_started(self, plan: StepPlan, now: float) -> None:
        for row in plan.scheduled:
            request, _ = self._owners[row.sequence.seq_id]
            if request.first_scheduled_at is None:
                request.first_scheduled_at = now

    def generate(
        self,
        prompts: abc.Sequence[str | abc.Sequence[int]],
        params: SamplingParams | abc.Sequence[SamplingParams],
    ) -> list[RequestOutput]:
        """Complete prompts, all together; outputs in the order of the prompts.

        Raises ParameterError when a prompt cannot be taken; then none is computed.
        """
        if isinstance(prompts, str):  # else each of its letters would be a prompt
            raise ParameterError("prompts", "prompts must be a list of prompts, got a text")
        if self.has_unfinished:
            raise RuntimeError("generate() found other requests in the engine")
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        outputs: dict[str, RequestOutput] = {}
        try:
            for index, (prompt, options) in enumerate(zip(prompts, params, strict=True)):
                self.add_request(str(index), prompt, options)
            while self._waiting_for_forms:
                for update in self._waiting_for_forms.settle(wait_s=1.0):
                    assert update.refusal is not None
                    raise update.refusal
        except ValueError:
            for index in range(len(prompts)):
                self.abort(str(index))
            raise
        while self.has_unfinished:
            for update in self.step():
                if update.output is not None:
                    outputs[update.request_id] = update.output
        return [outputs[str(index)] for index in range(len(prompts))]

    def checkpoint(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """The tokens each sample of an unfinished request has: enough to go on from elsewhere."""
        if request_id in self._waiting_for_forms:
            return self._waiting_for_forms.generated(request_id)
        return self._requests[request_id].checkpoint

    def stats(self) -> EngineStats:
        return self._totals.stats(self._scheduler, self.config, len(self._waiting_for_forms))

    def close(self) -> None:
        """End the other processes of its model, where there are any. No step can follow."""
        self._runner.close()

    def check(self) -> None:
        """Assert that the books balance."""
        self._scheduler.check()
        samples = [s for request in self._requests.values() for s in request.samples]
        assert sorted(s.sequence.seq_id for s in samples) == sorted(self._owners)
        for request in self._requests.values():
            assert any(
                s.sequence.finish_reason is None or s.sequence in self._ended_early
                for s in request.samples
            ), f"{request.request_id} has ended untold"

    def _sample(self, sequence: Sequence) -> Sample:
        params = sequence.params
        detokenizer = Detokenizer(
            self.tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            in_form=params.structured_outputs is not None,
        )
        detection = params.repetition_detection
        return Sample(sequence, detokenizer, None if detection is None else LoopDetector(detection))

    def _fail_rows(self, plan: StepPlan, results: abc.Sequence[object]) -> list[Sequence]:
        """End the sequences whose logits were not numbers; their neighbours go on."""
        failed = []
        for row, result in zip(plan.scheduled, results, strict=True):
            if isinstance(result, NumericalError):
                error = f"{result.code}: {result}"
                self._scheduler.finish(row.sequence, FinishReason.ERROR, error=error)
                failed.append(row.sequence)
        return failed

    def _updates(self, changed: list[Sequence], now: float) -> list[RequestUpdate]:
        deltas: dict[str, list[Delta]] = {}
        for sequence in changed:
            owner = self._owners.get(sequence.seq_id)
            if owner is None:  # aborted since
                continue
            request, sample = owner
            deltas.setdefault(request.request_id, [])
            delta = self._take_in_tokens(sample)
            if delta.token_ids:
                self._totals.generated_tokens += len(delta.token_ids)
                if request.first_token_at is None:
                    request.first_token_at = now
            if delta.token_ids or delta.text:
                deltas[request.request_id].append(delta)
        updates = []
        for request_id, pieces in deltas.items():
            request = self._requests[request_id]
            output = self._end(request, now) if request.ended else None
            updates.append(
                RequestUpdate(request_id=request_id, deltas=tuple(pieces), output=output)
            )
        return updates

    def _take_in_tokens(self, sample: Sample) -> Delta:
        delta, reason = sample.take_in_tokens()
        if reason is not None:
            self._scheduler.finish(sample.sequence, reason)
        return delta

    def _end(self, request: Request, now: float) -> RequestOutput:
        del self._requests[request.request_id]
        for sample in request.samples:
            del self._owners[sample.sequence.seq_id]
        output = request.output(now)
        self._totals.cached_tokens += output.stats.cached_tokens
        return output


def _seconds(deadline_s: float | None) -> float:
    if deadline_s is None:
        return math.inf
    if type(deadline_s) not in (int, float) or not abs(deadline_s) < 1e18:
        raise ParameterError("deadline_s", "deadline_s must be a finite number of seconds")
    return deadline_s
