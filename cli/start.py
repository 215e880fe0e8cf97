"""What a start waits for, as the workers tell it, and how that is shown: lines, some with seconds.

Lines and not a bar: the workers write their logs to the same terminal.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping

from rich.console import Console

from cli.supervisor import Child

Report = Callable[[str], None]
REPEAT_S = 10.0  # a phase that lasts is shown again, with its seconds so far


class WorkerChild(Child):
    """A worker that tells how its start goes (worker/progress.py)."""

    _ear: int | None = None  # the end of its pipe that is ours
    _heard = b""  # of a line that is not whole yet
    _phase = ""
    _failed: str | None = None

    def start(self) -> None:
        self._close()
        self._phase, self._failed, self._heard = "starting the engine", None, b""
        self._ear, mouth = os.pipe()
        os.set_blocking(self._ear, False)
        try:
            self._spawn("--progress-fd", str(mouth), keep_open=(mouth,))
        finally:
            os.close(mouth)

    def stop(self) -> None:
        super().stop()
        self._close()

    @property
    def phase(self) -> str:
        """What it last said that it waits for."""
        self._listen()
        return self._phase

    def ended(self) -> str | None:
        self._listen()  # each time: a pipe nobody reads from fills up
        return super().ended()

    def _reason(self) -> str | None:
        self._listen()
        return self._failed and f"could not start: {self._failed}"

    def _listen(self) -> None:
        if self._ear is None:
            return
        with contextlib.suppress(BlockingIOError):
            while heard := os.read(self._ear, 65_536):
                self._heard += heard
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            told = json.loads(line)
            self._phase = told.get("phase", self._phase)
            self._failed = told.get("failed", self._failed)

    def _close(self) -> None:
        if self._ear is not None:
            os.close(self._ear)
            self._ear = None


def reporter(console: Console) -> Report:
    """Shows each line dim, as it is, and whole however wide the console."""
    return lambda line: console.print(
        line, style="dim", markup=False, highlight=False, soft_wrap=True
    )


class StartLog:
    """Reports each part's phase when it changes, and every ten seconds how long it has lasted."""

    def __init__(self, report: Report, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._shown: dict[str, tuple[str, float, float]] = {}  # phase, when it began, when shown

    def show(self, phases: Mapping[str, str]) -> None:
        """To be called several times a second, with the parts that are still waited for."""
        now = self._clock()
        for part, phase in phases.items():
            last, began, shown = self._shown.get(part, ("", now, now))
            if phase != last:
                self._report(f"{part}: {phase}")
                self._shown[part] = (phase, now, now)
            elif now - shown >= REPEAT_S:
                self._report(f"{part}: {phase} ({now - began:.0f} s so far)")
                self._shown[part] = (phase, began, now)
