"""The worker's side of the engine process: starts it, talks to it, replaces it when it dies.

One thread, the keeper, owns the process: it starts it, reads its reports and, when the pipe ends,
starts another. A second one writes, so that nobody who sends a command waits for a step to end.
Knows nothing of jobs: what a death or a report means is told by callbacks, on the keeper's thread.

EngineError
└── EngineStartError
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from engine.config import EngineConfig
from worker.guard import start_thread
from worker.messages import (
    Command,
    Loading,
    Ready,
    Start,
    StartFailed,
    Stepped,
    Stop,
    decode_report,
    encode,
)

STOP_GRACE_S = 0.5  # for the process to end by itself after a Stop: it holds nothing any more
RESTART_WAITS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # from the first death in a row on
STEADY_AFTER_S = 60.0  # an engine that lived this long, or ended a request, was no failed start
PHASES = {
    "weights": "loading weights",
    "kernels": "compiling kernels for this CPU, once: about a minute",
}

logger = logging.getLogger(__name__)


class EngineError(Exception):
    """The engine process cannot serve."""


class EngineStartError(EngineError):
    """The engine cannot be built; the message is the engine's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvents:
    """Who hears what, on the keeper's thread. None of these may block for long."""

    on_ready: Callable[[Ready], None]
    on_stepped: Callable[[Stepped], None]
    on_died: Callable[[str], None]  # all it held is gone; the text says how it ended
    on_loading: Callable[[str], None] = lambda phase: None  # what is waited for, before on_ready


class EngineClient:
    """One engine process at a time, for the life of the worker."""

    def __init__(self, config: EngineConfig, *, log_level: str, log_format: str = "text") -> None:
        self._start = Start(config, log_level, log_format)
        self._events: EngineEvents | None = None
        self._outbox: queue.SimpleQueue[tuple[int, Command]] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._writing = threading.Lock()  # held while the pipe is written to, or closed
        self._generation = 0  # of the process; commands meant for a dead one are dropped
        self._stopping = threading.Event()
        self._settled = threading.Event()  # the first start worked, or did not
        self._start_error: str | None = None
        self._keeper: threading.Thread | None = None
        self.ready: Ready | None = None  # of the process now running; None while there is none
        self.num_steps = 0  # of the process now running, as it last said
        self.num_restarts = 0
        self._has_ended_some = False  # requests, the process now running
        self.failing = False  # the last process ended before its model was loaded

    @property
    def pid(self) -> int | None:
        """Of the process, while its model is loaded."""
        ready = self.ready
        return None if ready is None else ready.pid

    def start(self, events: EngineEvents, poll: Callable[[], None]) -> Ready:
        """Start the process and wait for its model; `poll` runs meanwhile and may raise.

        Raises EngineStartError with the engine's reason.
        """
        self._events = events
        start_thread("engine-writer", self._write)
        # PDEATHSIG is sent when the thread that forked ends, so it has to be one that stays
        self._keeper = start_thread("engine-keeper", self._keep)
        while not self._settled.wait(0.05):
            poll()
        if self.ready is None:
            raise EngineStartError(self._start_error or "the engine process ended while loading")
        return self.ready

    def send(self, command: Command) -> None:
        """Queue a command for the process now running; lost with it if it dies. Never blocks."""
        self._outbox.put((self._generation, command))

    def kill(self) -> None:
        """End the process now; the keeper starts another. For one that does not step any more."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """End the process for good and wait for it. What it holds is dropped."""
        self._stopping.set()
        self.send(Stop())
        if self._keeper is not None:
            self._keeper.join(STOP_GRACE_S)
            if self._keeper.is_alive():
                self.kill()
                self._keeper.join(STOP_GRACE_S)

    def _keep(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            ending = self._run_process()
            if self._stopping.is_set():
                return
            if not self._settled.is_set():
                self._settled.set()
                return
            steady = self._has_ended_some or time.monotonic() - began > STEADY_AFTER_S
            failures = 0 if steady else failures + 1
            wait_s = restart_wait_s(failures)
            logger.warning("engine process ended: %s; restart in %g s", ending, wait_s)
            self._stopping.wait(wait_s)
            self.num_restarts += 1

    def _run_process(self) -> str:
        """One process from start to end; says how it ended."""
        process, pipe = self._launch()
        with contextlib.suppress(EOFError, OSError):
            self._read(pipe)
        was_ready, self.ready = self.ready, None
        self.failing = was_ready is None
        process.kill()  # of no use without its pipe, if it still lives
        status = process.wait()
        ending = self._start_error or (
            f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        )
        if was_ready is not None and self._events is not None and not self._stopping.is_set():
            self._events.on_died(ending)
        # only now: whoever sent before hearing of the death meant the dead process
        self._generation += 1
        with self._writing:
            pipe.close()
        return ending

    def _launch(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "worker.engine_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={
                    # OpenMP's threads else spin while they wait: beside other processes on the
                    # same cores a step then takes ten times as long
                    "OMP_WAIT_POLICY": "passive",
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                },
                process_group=0,  # a Ctrl-C at the terminal is for the parent, which drains
            )
        pipe = self._pipe = Connection(ours.detach())
        self._start_error = None
        self.num_steps = 0
        self._has_ended_some = False
        with contextlib.suppress(OSError):  # it died at once; reading will say so
            pipe.send_bytes(encode(self._start))
        return self._process, pipe

    def _read(self, pipe: Connection) -> None:
        assert self._events is not None
        while True:
            match decode_report(pipe.recv_bytes()):
                case Stepped() as stepped:
                    self.num_steps = stepped.num_steps
                    self._has_ended_some |= bool(stepped.ended)
                    self._events.on_stepped(stepped)
                case Loading(phase):
                    logger.info("engine process: %s", PHASES[phase])
                    self._events.on_loading(PHASES[phase])
                case Ready() as ready:
                    self.ready, self.failing = ready, False
                    logger.info("engine process %d ready: load_s=%.2f", ready.pid, ready.load_s)
                    self._events.on_ready(ready)
                    self._settled.set()
                case StartFailed() as failed:
                    self._start_error = failed.message

    def _write(self) -> None:
        while True:
            window = [self._outbox.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    window.append(self._outbox.get_nowait())
            commands = [command for sent_to, command in window if sent_to == self._generation]
            with self._writing, contextlib.suppress(OSError):  # dead: the keeper hears and tells
                if commands and self._pipe is not None:
                    self._pipe.send_bytes(encode(commands))
            if self._stopping.is_set():
                return


def restart_wait_s(failures: int) -> float:
    """How long to wait after so many deaths in a row; 0: a steady engine died, just once."""
    return RESTART_WAITS_S[min(max(failures - 1, 0), len(RESTART_WAITS_S) - 1)]
