"""From a form to its grammar, beside the engine's steps.

A form is tried in the trial process, under limits, and built here if that went well, which costs
the same again and releases the interpreter's lock meanwhile. (A compiled grammar cannot be sent
from process to process.) The first trial is short, though long enough for all but huge forms; what
was not done in it is tried again in a queue for such, and once more in a last one. So a form that
takes long waits for its like, and one that takes a little longer than usual does not wait for those
that never end. In each queue the shortest and the oldest take turns, so that a crowd of forms that
take long holds up no cheap one (engine.structured.turns).

Whatever the crowd, a form is answered within a time from when it was asked for: a queue that is too
long for it is no reason to let a request wait without a word.

What was built is kept, and what was refused is remembered, up to a number of entries and an
estimate of their bytes.

    ParameterError
    └── CompilerBusyError
"""

import functools
import json
import math
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from llguidance import LLTokenizer

from engine.parameter_error import ParameterError
from engine.structured.grammar import Grammar, GrammarError, GrammarState, load_vocabulary
from engine.structured.trial import TrialLimits, Verdict, lower_priority
from engine.structured.trial_process import TrialProcess
from engine.structured.turns import Clock, Turns
from engine.structured_outputs import StructuredOutputs

# from the first request on, or from when the trial process was there: that is loading for seconds
ANSWER_LIMIT_S = 4.7
STARTING_S = 0.5  # how often to look whether it is
# of a form's trials, one after another; the engine's own niceness is 0
LIMITS = (
    TrialLimits(cpu_s=0.1, clock_s=10.0, niceness=10),  # 0.02 s are usual, most of it the forks'
    TrialLimits(cpu_s=0.5, clock_s=10.0, niceness=15),
    TrialLimits(cpu_s=1.4, clock_s=10.0, niceness=19),
)
NUM_THREADS = (2, 1, 1)  # for each of these trials
LIMIT_CPU_S = sum(each.cpu_s for each in LIMITS)
BUILDING_NICENESS = 10  # of the threads
MAX_CACHED = 256
MAX_CACHED_BYTES = 256 << 20
ENTRY_BYTES = 64 << 10  # of a grammar's own, beside what the trial measured

Key = tuple[str, str, str]
Made = Grammar | str  # or why there is none


class CompilerBusyError(ParameterError):
    """Nothing is known against the form; there was no time for it. It may be asked again."""

    code = "compiler_busy"


@dataclass(frozen=True, slots=True)
class _Waiter:
    future: "Future[list[GrammarState]]"
    form: StructuredOutputs
    generated: Sequence[Sequence[int]]
    n: int


@dataclass(slots=True, eq=False)
class _Compiling:
    """A form on its way to a grammar, and the requests that have it."""

    form: StructuredOutputs
    waiters: list[_Waiter] = field(default_factory=list)
    asked_at: float = field(default_factory=time.monotonic)


class GrammarCompiler:
    """Grammars of one tokenizer. `open` and `close` are for one thread, the engine's."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Loads the vocabulary; one that llguidance cannot use makes every form an error."""
        self._vocabulary: LLTokenizer | GrammarError
        try:
            self._vocabulary = load_vocabulary(tokenizer_json, vocab_size, eos_token_ids)
        except GrammarError as error:
            self._vocabulary = error
        parts = {
            "tokenizer_json": tokenizer_json,
            "vocab_size": vocab_size,
            "eos_token_ids": sorted(eos_token_ids),
        }
        self._trials = TrialProcess(json.dumps(parts).encode())
        self._pools = [_pool(f"grammar-trial-{i}", num) for i, num in enumerate(NUM_THREADS)]
        self._turns: list[Turns[_Compiling]] = [Turns() for _ in NUM_THREADS]
        self._resuming = _pool("grammar-resume", 1)
        self._clock = Clock("form-clock")  # of our own priority: its answers have to be in time
        self._ready_at = math.inf  # when the trial process had answered once
        self._lock = threading.Lock()  # of all that follows
        self._compiling: dict[Key, _Compiling] = {}
        self._cache: OrderedDict[Key, tuple[Made, int]] = OrderedDict()

    @property
    def trial_pid(self) -> int | None:
        """Of the trial process; None before the first form, or after it died."""
        return self._trials.pid

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    @property
    def cached_bytes(self) -> int:
        """An estimate."""
        with self._lock:
            return self._sum_bytes()

    def open(
        self, form: StructuredOutputs, generated: Sequence[Sequence[int]], n: int
    ) -> "Future[list[GrammarState]]":
        """A state for each of `n` samples, advanced by what each has generated already.

        Done at once if the grammar is here and nothing was generated. The future's error is a
        ParameterError. A form whose futures are all cancelled is not compiled.
        """
        waiter = _Waiter(Future(), form, generated, n)
        with self._lock:
            known = self._known(_key(form))
            compiling = self._compiling.get(_key(form))
            if known is None and compiling is not None:
                compiling.waiters.append(waiter)
                return waiter.future
            if known is None:
                compiling = self._compiling[_key(form)] = _Compiling(form, [waiter])
        if known is not None:
            self._answer(waiter, known)
        elif compiling is not None:
            self._trials.start()  # here, for our threads would hand their low priority on to it
            self._submit(compiling, 0)
            self._give_up_in_time(compiling)
        return waiter.future

    def close(self) -> None:
        """End the trial process and the threads; forms not yet compiled stay so."""
        self._clock.end()
        for pool in (*self._pools, self._resuming):
            pool.shutdown(wait=False, cancel_futures=True)
        self._trials.kill()

    def _submit(self, compiling: _Compiling, index: int) -> None:
        self._turns[index].put(compiling, len(compiling.form.text))
        self._pools[index].submit(self._take_turn, index)

    def _take_turn(self, index: int) -> None:
        compiling = self._turns[index].take()
        try:
            self._try(compiling, index)
        except Exception as fault:  # noqa: BLE001  # ours, and who waits must hear of it
            for waiter in self._ended(compiling):
                if waiter.future.set_running_or_notify_cancel():
                    waiter.future.set_exception(fault)

    def _try(self, compiling: _Compiling, index: int) -> None:
        """One trial of the form, and what follows from it."""
        if self._is_over(compiling):
            return
        if isinstance(self._vocabulary, GrammarError):
            self._settle(compiling, str(self._vocabulary))
            return
        # a death may have been another's fault: the kernel's, short of memory
        verdict = self._verdict(compiling, index) or self._verdict(compiling, index)
        if verdict is None:
            self._settle(compiling, "could not be compiled: the compiler did not answer", None)
        elif not verdict.out_of:
            self._settle(compiling, self._built(verdict), verdict.num_bytes)
        elif index + 1 < len(LIMITS):
            self._submit(compiling, index + 1)
        elif verdict.out_of == "processor time":
            self._settle(compiling, f"takes more than {LIMIT_CPU_S:g} seconds to compile")
        else:
            self._settle(compiling, None)

    def _verdict(self, compiling: _Compiling, index: int) -> Verdict | None:
        left_s = max(0.0, self._give_up_at(compiling) - time.monotonic())
        limits = replace(LIMITS[index], clock_s=min(LIMITS[index].clock_s, left_s))
        verdict = self._trials.verdict(compiling.form, limits)
        if verdict is not None:
            self._ready_at = min(self._ready_at, time.monotonic())
        return verdict

    def _give_up_at(self, compiling: _Compiling) -> float:
        return max(compiling.asked_at, self._ready_at) + ANSWER_LIMIT_S

    def _give_up_in_time(self, compiling: _Compiling) -> None:
        give_up_at = self._give_up_at(compiling)
        now = time.monotonic()
        if give_up_at <= now:
            self._settle(compiling, None)
        elif self._is_over(compiling):
            return
        else:
            when = min(give_up_at, now + STARTING_S) if math.isinf(self._ready_at) else give_up_at
            self._clock.at(when, functools.partial(self._give_up_in_time, compiling))

    def _built(self, verdict: Verdict) -> Made:
        if verdict.error:
            return verdict.error
        assert isinstance(self._vocabulary, LLTokenizer)
        try:
            made = Grammar(self._vocabulary, verdict.source)
            made.state().mask(())  # its cost is paid here, not in a step
        except GrammarError as error:
            return str(error)
        return made

    def _is_over(self, compiling: _Compiling) -> bool:
        """Whether nobody waits for it any more; then it is forgotten."""
        key = _key(compiling.form)
        with self._lock:
            if self._compiling.get(key) is not compiling:
                return True
            if all(each.future.cancelled() for each in compiling.waiters):
                del self._compiling[key]
                return True
            return False

    def _settle(self, compiling: _Compiling, made: Made | None, num_bytes: int | None = 0) -> None:
        """Answer all who wait, once; None: there was no time. Kept, unless without a size."""
        if made is not None and num_bytes is not None:
            num_bytes += ENTRY_BYTES + len(compiling.form.text)
            with self._lock:
                self._keep(_key(compiling.form), made, num_bytes)
        for waiter in self._ended(compiling):
            self._answer(waiter, made)

    def _ended(self, compiling: _Compiling) -> list[_Waiter]:
        """Forget it; returns who still has to be answered: nobody, if it had ended before."""
        key = _key(compiling.form)
        with self._lock:
            if self._compiling.get(key) is not compiling:
                return []
            del self._compiling[key]
            return compiling.waiters

    def _answer(self, waiter: _Waiter, made: Made | None) -> None:
        if not waiter.future.set_running_or_notify_cancel():
            return
        if not isinstance(made, Grammar):
            waiter.future.set_exception(_refusal(waiter.form, made))
        elif waiter.generated:
            self._resuming.submit(_states, made, waiter).add_done_callback(
                functools.partial(_hand_over, waiter.future)
            )
        else:
            waiter.future.set_result(_states(made, waiter))

    def _known(self, key: Key) -> Made | None:
        if key not in self._cache:
            return None
        self._cache.move_to_end(key)
        return self._cache[key][0]

    def _keep(self, key: Key, made: Made, num_bytes: int) -> None:
        self._cache[key] = made, num_bytes
        while len(self._cache) > MAX_CACHED or self._sum_bytes() > MAX_CACHED_BYTES:
            self._cache.popitem(last=False)

    def _sum_bytes(self) -> int:
        """Of what was measured when each was made, and what its lexer has learnt since."""
        return sum(
            num_bytes + (made.learnt_bytes if isinstance(made, Grammar) else 0)
            for made, num_bytes in self._cache.values()
        )


def _pool(name: str, num_threads: int) -> ThreadPoolExecutor:
    if sys.platform != "linux":  # elsewhere it would be the engine's own priority
        return ThreadPoolExecutor(num_threads, name)
    return ThreadPoolExecutor(num_threads, name, lower_priority, (BUILDING_NICENESS,))


def _states(grammar: Grammar, waiter: _Waiter) -> list[GrammarState]:
    states = [grammar.state() for _ in range(waiter.n)]
    for state, token_ids in zip(states, waiter.generated, strict=False):
        state.catch_up(token_ids)
    return states


def _hand_over(to: "Future[list[GrammarState]]", done: "Future[list[GrammarState]]") -> None:
    if done.cancelled():
        return
    if (fault := done.exception()) is not None:
        to.set_exception(fault)
    else:
        to.set_result(done.result())


def _key(form: StructuredOutputs) -> Key:
    return form.kind, form.text, form.whitespace


def _refusal(form: StructuredOutputs, made: str | None) -> ParameterError:
    if made is not None:
        return ParameterError(form.param, f"{form.param}: {made}")
    return CompilerBusyError(
        form.param,
        f"{form.param}: takes long to compile, and there was no time for it within "
        f"{ANSWER_LIMIT_S:g} seconds, for there is much else to do; try again later",
    )
