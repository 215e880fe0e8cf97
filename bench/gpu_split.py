"""What a step's time is made of: the processor's parts by its clock, the device's by its own.

A device's part lasts from an event before its launches to one behind them, so it has in it what the
device waits for launches in between. What it waits between parts is idle, and so are, to be on the
safe side, the copies of a step's inputs.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from engine import step_result
from engine.cuda_graphs import StepGraphs
from engine.model_runner import ModelRunner
from engine.scheduler import Scheduler
from engine.step_draws import StepDraws
from engine.step_result import OnDevice


class Split:
    """Seconds of each part, summed over the steps; on a CPU all are by the processor's clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_processor: dict[str, float] = {}
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            seconds = time.perf_counter() - started
            self.on_processor[part] = self.on_processor.get(part, 0.0) + seconds
            return result

        return run

    def marked(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Of parts within each other the inner one ends the outer one."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._mark(part)
            result = call(*args, **kwargs)
            self._mark("")
            return result

        return run

    def _mark(self, part: str) -> None:
        if not self._on_gpu:
            self._marks.append((part, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((part, event))

    def on_device(self) -> dict[str, float]:
        """Waits until the device has done what was launched."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for (part, begin), (_, end) in pairwise(self._marks):
            if part:
                seconds = begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
                found[part] = found.get(part, 0.0) + seconds
        return found


@contextmanager
def splitting(runner: ModelRunner, scheduler: Scheduler) -> Iterator[Split]:
    """Inside it the parts of steps are timed."""
    split = Split(runner.device)
    calls: tuple[tuple[Any, str, str], ...] = (
        (scheduler, "schedule", "schedule"),
        (scheduler, "update", "update"),
        (runner, "launch", "launch"),
        (OnDevice, "wait", "wait"),
    )
    launches: tuple[tuple[Any, str, str], ...] = (
        (StepGraphs, "replay", "model"),
        (ModelRunner, "_forward", "model"),
        (StepDraws, "begun", "sample"),
        (step_result._Arriving, "__init__", "copy"),
    )
    with ExitStack() as patches:
        for owner, name, part in calls:
            timed = split.timed(part, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, timed))
        for owner, name, part in launches:
            marked = split.marked(part, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, marked))
        yield split
