"""From a form to its grammar, beside the engine's steps.

A few threads take one form after another: each lets the trial process try it under limits, and
builds here what went well there, which costs the same again and releases the interpreter's lock
meanwhile. (A compiled grammar cannot be sent from process to process.) What was built is kept, and
what was refused is remembered, up to a number of entries and an estimate of their bytes.
"""

import contextlib
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

NUM_THREADS = 4  # forms compiled at once: one that takes its time holds up no others
MAX_CACHED = 256
MAX_CACHED_BYTES = 256 << 20
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
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar-compiler")
        self._lock = threading.Lock()  # of all that follows
        self._compiling: dict[Key, threading.Lock] = {}
        self._cache: OrderedDict[Key, tuple[Grammar | str, int]] = OrderedDict()

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
        ParameterError.
        """
        known = self._known(_key(form))
        if known is None or generated:
            return self._threads.submit(self._open, form, generated, n)
        future: Future[list[GrammarState]] = Future()
        if isinstance(known, Grammar):
            future.set_result([known.state() for _ in range(n)])
        else:
            future.set_exception(_refusal(form, known))
        return future

    def close(self) -> None:
        """End the trial process and the thread; forms not yet compiled are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._trials.kill()

    def _open(
        self, form: StructuredOutputs, generated: Sequence[Sequence[int]], n: int
    ) -> list[GrammarState]:
        known = self._known(_key(form)) or self._compile_once(form)
        if isinstance(known, str):
            raise _refusal(form, known)
        states = [known.state() for _ in range(n)]
        for state, token_ids in zip(states, generated, strict=False):
            state.catch_up(token_ids)
        return states

    def _compile_once(self, form: StructuredOutputs) -> Grammar | str:
        """Compile it, or wait for the thread that does: a batch's rows may all have one form."""
        key = _key(form)
        with self._lock:
            turn = self._compiling.setdefault(key, threading.Lock())
        with turn:
            made = self._known(key) or self._compile(form)
        with self._lock:
            self._compiling.pop(key, None)
        return made

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
            while len(self._cache) > MAX_CACHED or self._sum_bytes() > MAX_CACHED_BYTES:
                self._cache.popitem(last=False)

    def _sum_bytes(self) -> int:
        """Of what was measured when each was made, and what its lexer has learnt since."""
        return sum(
            num_bytes + (made.learnt_bytes if isinstance(made, Grammar) else 0)
            for made, num_bytes in self._cache.values()
        )


class TrialProcess:
    """One trial process at a time: started when first needed, replaced when it gives no answer.

    Several threads may ask at once.
    """

    def __init__(self, vocabulary: bytes) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # of what follows
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., TrialProcess] | None = None
        self._has_answered = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def verdict(self, form: StructuredOutputs) -> Verdict | None:
        """Blocks until the form was tried, for as long as the limits say; None: no answer."""
        process = None
        try:
            process, pipe = self._ask()
            with pipe:
                pipe.send_bytes(json.dumps(asdict(form)).encode())
                limit_s = TRIAL_LIMIT_S + ANSWER_GRACE_S
                if pipe.poll(limit_s if self._has_answered else START_LIMIT_S):
                    verdict = Verdict(**json.loads(pipe.recv_bytes()))
                    self._has_answered = True
                    return verdict
        except (EOFError, OSError):
            pass
        with self._lock:
            if self._process is process:
                self._kill()
        return None

    def kill(self) -> None:
        """The next form starts another."""
        with self._lock:
            self._kill()

    def _kill(self) -> None:
        if self._end is not None:
            self._end()
        self._control = self._process = self._end = None
        self._has_answered = False

    def _ask(self) -> "tuple[subprocess.Popen[bytes], Connection]":
        """A line to the process on which to send a form. Raises OSError."""
        ours, theirs = socket.socketpair()
        pipe = Connection(ours.detach())
        with theirs, self._lock:
            if self._control is None:
                self._start()
            assert self._control is not None
            assert self._process is not None
            try:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            except OSError:
                pipe.close()
                self._kill()
                raise
            return self._process, pipe

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
        self._control = ours
        self._end = weakref.finalize(self, _end, self._process, ours)
        pipe = Connection(os.dup(ours.fileno()))
        with pipe, contextlib.suppress(OSError):  # it died at once; asking will say so
            pipe.send_bytes(self._vocabulary)


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def _key(form: StructuredOutputs) -> Key:
    return form.kind, form.text, form.whitespace


def _refusal(form: StructuredOutputs, message: str) -> ParameterError:
    return ParameterError(form.param, f"{form.param}: {message}")
