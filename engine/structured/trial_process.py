"""The trial process, seen from the engine: started, asked, replaced when it does not answer."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import asdict
from multiprocessing.connection import Connection

from engine.structured.trial import TrialLimits, Verdict
from engine.structured_outputs import StructuredOutputs

START_LIMIT_S = 60.0  # of the process, with its vocabulary
ANSWER_GRACE_S = 2.0  # beyond a trial's own limit


class TrialProcess:
    """One trial process at a time; several threads may ask at once."""

    def __init__(self, vocabulary: bytes) -> None:
        """`vocabulary` is what load_vocabulary takes, as a JSON object."""
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # of what follows
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., TrialProcess] | None = None
        self._has_answered = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it if it is not there, without waiting for it.

        It has the priority of the thread that calls this. If it cannot be, asking says so.
        """
        with self._lock, contextlib.suppress(OSError):
            self._start()

    def verdict(self, form: StructuredOutputs, limits: TrialLimits) -> Verdict | None:
        """Blocks until the form was tried, for as long as the limits say; None: no answer."""
        process = None
        try:
            process, pipe = self._ask()
            with pipe:
                pipe.send_bytes(json.dumps([asdict(form), asdict(limits)]).encode())
                limit_s = limits.clock_s + ANSWER_GRACE_S
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
            try:
                self._start()
                assert self._control is not None
                assert self._process is not None
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            except OSError:
                pipe.close()
                self._kill()
                raise
            return self._process, pipe

    def _start(self) -> None:
        if self._control is not None:
            return
        ours, theirs = socket.socketpair()
        # a file, for nobody may have to wait until megabytes have gone through a pipe
        with theirs, tempfile.TemporaryFile() as vocabulary:
            vocabulary.write(self._vocabulary)
            vocabulary.seek(0)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "engine.structured.trial", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=vocabulary,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                    process_group=0,  # a Ctrl-C at the terminal is not for it
                )
            except OSError:
                ours.close()
                raise
        self._control = ours
        self._end = weakref.finalize(self, _end, self._process, ours)


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()
