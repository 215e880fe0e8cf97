"""From a form to its grammar, beside the engine's steps.

One thread takes one form after another: it lets the trial process try it under limits, and builds
here what went well there, which costs the same again and releases the interpreter's lock meanwhile.
(A compiled grammar cannot be sent from process to process.) What was built is kept, and what was
refused is remembered, up to a number of entries and an estimate of their bytes.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.connection import Connection

from llguidance import LLTokenizer

from engine.parameter_error import ParameterError
from engine.structured.grammar import Grammar, GrammarError, GrammarState, load_vocabulary
from engine.structured.trial import TRIAL_LIMIT_S, Verdict
from engine.structured_outputs import StructuredOutputs

MAX_CACHED = 256
MAX_CACHED_BYTES = 64 << 20
ENTRY_BYTES = 64 << 10  # of a grammar's own, beside what the trial measured
START_LIMIT_S = 60.0  # of the trial process, with its vocabulary
ANSWER_GRACE_S = 2.0  # beyond a trial's own limit

Key = tuple[str, str, str]


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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._lock = threading.Lock()  # of the cache
        self._cache: OrderedDict[Key, tuple[Grammar | str, int]] = OrderedDict()
        self._num_bytes = 0

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
        return self._num_bytes

    def open(
        self, form: StructuredOutputs, generated: Sequence[Sequence[int]], n: int
    ) -> "Future[list[GrammarState]]":
        """A state for each of `n` samples, advanced by what each has generated already.

        Done at once if the grammar is here and nothing was generated. The future's error is a
        ParameterError.
        """
        known = self._known(_key(form))
        if known is None or generated:
            return self._thread.submit(self._open, form, generated, n)
        future: Future[list[GrammarState]] = Future()
        if isinstance(known, Grammar):
            future.set_result([known.state() for _ in range(n)])
        else:
            future.set_exception(_refusal(form, known))
        return future

    def close(self) -> None:
        """End the trial process and the thread; forms not yet compiled are cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._trials.kill()

    def _open(
        self, form: StructuredOutputs, generated: Sequence[Sequence[int]], n: int
    ) -> list[GrammarState]:
        known = self._known(_key(form)) or self._compile(form)
        if isinstance(known, str):
            raise _refusal(form, known)
        states = [known.state() for _ in range(n)]
        for state, token_ids in zip(states, generated, strict=False):
            state.catch_up(token_ids)
        return states

    def _compile(self, form: StructuredOutputs) -> Grammar | str:
        if isinstance(self._vocabulary, GrammarError):
            return str(self._vocabulary)
        # a death may have been another's fault: the kernel's, short of memory
        verdict = self._trials.verdict(form) or self._trials.verdict(form)
        if verdict is None:
            return "could not be compiled: the compiler did not answer"
        made: Grammar | str = verdict.error
        if not verdict.error:
            try:
                made = Grammar(self._vocabulary, verdict.source)
                made.state().mask(())  # its cost is paid here, not in a step
            except GrammarError as error:
                made = str(error)
        self._keep(_key(form), made, ENTRY_BYTES + verdict.num_bytes + len(form.text))
        return made

    def _known(self, key: Key) -> Grammar | str | None:
        with self._lock:
            if key not in self._cache:
                return None
            self._cache.move_to_end(key)
            return self._cache[key][0]

    def _keep(self, key: Key, made: Grammar | str, num_bytes: int) -> None:
        with self._lock:
            self._cache[key] = made, num_bytes
            self._num_bytes += num_bytes
            while len(self._cache) > MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES:
                _, (_, freed) = self._cache.popitem(last=False)
                self._num_bytes -= freed


class TrialProcess:
    """One trial process at a time: started when first needed, replaced when it gives no answer."""

    def __init__(self, vocabulary: bytes) -> None:
        self._vocabulary = vocabulary
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes], Connection], TrialProcess] | None
        self._end = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def verdict(self, form: StructuredOutputs) -> Verdict | None:
        """Blocks until the form was tried, for as long as the limits say; None: no answer."""
        limit_s = TRIAL_LIMIT_S + ANSWER_GRACE_S
        try:
            if self._pipe is None:
                self._start()
                limit_s += START_LIMIT_S
            assert self._pipe is not None
            self._pipe.send_bytes(json.dumps(asdict(form)).encode())
            if self._pipe.poll(limit_s):
                return Verdict(**json.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            pass
        self.kill()
        return None

    def kill(self) -> None:
        """The next form starts another."""
        if self._end is not None:
            self._end()
        self._pipe = self._process = self._end = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.structured.trial", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                process_group=0,  # a Ctrl-C at the terminal is not for it
            )
        self._pipe = Connection(ours.detach())
        self._end = weakref.finalize(self, _end, self._process, self._pipe)
        self._pipe.send_bytes(self._vocabulary)


def _end(process: "subprocess.Popen[bytes]", pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.wait()


def _key(form: StructuredOutputs) -> Key:
    return form.kind, form.text, form.whitespace


def _refusal(form: StructuredOutputs, message: str) -> ParameterError:
    return ParameterError(form.param, f"{form.param}: {message}")
