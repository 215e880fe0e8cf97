"""Keeps the parts of a one-machine service running: Valkey, API, workers, sweeper.

A part that ends is started again, with growing pauses while it keeps ending. Children are tethered:
they end with this process, `kill -9` included. The order at the end: the API and the workers are
told together, workers hand back what they cannot finish, then the sweeper, then Valkey.

"""

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from cli import tether
from cli.servers import Server

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5  # before a part that ended is started again; doubles while it keeps ending
LONGEST_PAUSE_S = 30.0
HEALTHY_AFTER_S = 60.0  # a part that ran this long begins anew with the shortest pause
STOP_MARGIN_S = 10.0  # beyond its drain, for a worker to write its last rows and end


class Part(Protocol):
    """Something that must stay up."""

    name: str

    def start(self) -> None: ...

    def ended(self) -> str | None:
        """How it ended; None while it runs."""

    def ask_to_stop(self) -> None: ...

    def stop(self) -> None:
        """Wait for the end of what was asked to stop, or force it."""


class Child:
    """A tethered process of this program: `tokenmill <arguments>`."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        *,
        grace_s: float,
        log_folder: Path | None,
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._env = env
        self._grace_s = grace_s
        self._log_file = log_folder / f"{name.replace('/', '-')}.log" if log_folder else None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        self._spawn()

    def _spawn(self, *arguments: str, keep_open: Sequence[int] = ()) -> None:
        # -P: a folder called jobs or api in the working directory is not ours
        command = [sys.executable, "-P", "-m", "cli.main", *self._arguments, *arguments]
        if self._log_file is None:
            self._process = tether.spawn(command, env=self._env, keep_open=keep_open)
            return
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as log:
            self._process = tether.spawn(command, env=self._env, output=log, keep_open=keep_open)

    def ended(self) -> str | None:
        if self._process is None or self._process.poll() is None:
            return None
        status = self._process.returncode
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return (self._reason() or f"ended {how}") + (
            f", see {self._log_file}" if self._log_file else ""
        )

    def _reason(self) -> str | None:
        """Why it ended, where it is known."""
        return None

    def ask_to_stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._grace_s)
            if self._process.poll() is None:
                logger.warning("%s did not end within %g s: killed", self.name, self._grace_s)
                self._process.kill()
                self._process.wait()


class Embedded:
    """A database or broker server of ours."""

    def __init__(self, server: Server) -> None:
        self.name = server.name
        self._server = server

    def start(self) -> None:
        if self._server.pid is None:
            self._server.start()

    def ended(self) -> str | None:
        return None if self._server.pid is not None else "ended"

    def ask_to_stop(self) -> None:
        """Last of all, in stop: the others still use it."""

    def stop(self) -> None:
        self._server.stop()


class Loop:
    """A thread that runs `body(stop)` until `stop` is set."""

    def __init__(self, name: str, body: Callable[[threading.Event], None]) -> None:
        self.name = name
        self._body = body
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        # a daemon: a loop stuck in a database call must not keep the process from ending
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def ended(self) -> str | None:
        return None if self._thread is None or self._thread.is_alive() else "ended"

    def ask_to_stop(self) -> None:
        self._stop.set()

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.join(STOP_MARGIN_S)

    def _run(self) -> None:
        try:
            self._body(self._stop)
        except Exception:  # the edge of this thread: recorded, and started again
            logger.exception("%s failed", self.name)


@dataclass(slots=True)
class _Watched:
    part: Part
    started_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    restart_at: float | None = None


class Supervisor:
    """Starts parts in order, watches them, ends them in the opposite order.

    `stop` may be called again from a signal handler to hurry: workers then hand back at once.
    """

    def __init__(
        self, parts: Sequence[Part], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._watched = [_Watched(part) for part in parts]
        self._clock = clock

    def start(self) -> None:
        """Start every part. What was started is stopped again if one fails."""
        for index, watched in enumerate(self._watched):
            try:
                watched.part.start()
            except BaseException:
                self._end(self._watched[:index])
                raise
            watched.started_at = self._clock()

    def watch(self) -> list[str]:
        """Look after every part once, and start again what ended. Returns what was noticed."""
        notices = []
        now = self._clock()
        for watched in self._watched:
            if watched.restart_at is not None:
                if now >= watched.restart_at:
                    self._restart(watched, now)
                continue
            how = watched.part.ended()
            if how is None:
                continue
            if now - watched.started_at > HEALTHY_AFTER_S:
                watched.pause_s = FIRST_PAUSE_S
            watched.restart_at = now + watched.pause_s
            notices.append(f"{watched.part.name} {how}; starting it again in {watched.pause_s:g} s")
            watched.pause_s = min(LONGEST_PAUSE_S, watched.pause_s * 2)
        for notice in notices:
            logger.warning("%s", notice)
        return notices

    def hurry(self) -> None:
        """Tell the parts once more to stop: workers then hand back what they have at once."""
        for watched in self._watched:
            watched.part.ask_to_stop()

    def stop(self) -> None:
        """End every part; returns when all have ended."""
        self._end(self._watched)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _restart(self, watched: _Watched, now: float) -> None:
        watched.restart_at = None
        watched.started_at = now
        try:
            watched.part.start()
        except Exception as error:  # noqa: BLE001  whatever it was, it is tried again
            watched.restart_at = now + watched.pause_s
            watched.pause_s = min(LONGEST_PAUSE_S, watched.pause_s * 2)
            logger.warning("%s could not be started again: %s", watched.part.name, error)

    @staticmethod
    def _end(watched: Sequence[_Watched]) -> None:
        for each in reversed(watched):
            each.part.ask_to_stop()
        for each in reversed(watched):
            each.part.stop()
