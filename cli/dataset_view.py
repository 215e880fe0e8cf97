"""A dataset's progress on a terminal: samples and tokens done, pace, when it may end, failures."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from bulk.pace import Pace
from bulk.runner import Progress

SHOWN_KINDS = 4


class View:
    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("{task.fields[said]}"), console=console,
        )  # fmt: skip
        self._task = self._bars.add_task("reading", total=None, said="")
        self._pace = Pace()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        is_reading = progress.phase == "reading"
        if not is_reading:
            tokens = progress.prompt_tokens + progress.completion_tokens
            self._pace.mark(time.monotonic(), progress.done + progress.answered, tokens)
        self._bars.update(
            self._task, description=progress.phase, said=said(progress, self._pace),
            completed=progress.total if is_reading else progress.done + progress.answered,
            total=None if is_reading else progress.total,
        )  # fmt: skip


def said(progress: Progress, pace: Pace) -> str:
    parts = []
    if progress.completion_tokens:
        parts.append(f"{progress.completion_tokens:,} tokens out")
    if progress.saved_tokens:
        parts.append(f"{progress.saved_tokens:,} saved")
    if (tokens_per_s := pace.tokens_per_s()) is not None:
        parts.append(f"{tokens_per_s:,.0f} tokens/s")
    if (left_s := pace.left_s(progress.total - progress.done - progress.answered)) is not None:
        parts.append(f"{shown_s(left_s[0])} to {shown_s(left_s[1])} left")
    if progress.repaired:
        parts.append(f"{progress.repaired} asked again")
    parts += [f"{num} {kind}" for kind, num in progress.failed.most_common(SHOWN_KINDS)]
    return ", ".join(parts)


def shown_s(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary(manifest: dict[str, Any]) -> str:
    samples = manifest["samples"]
    text = f"{samples['delivered']} delivered"
    for kind, num in sorted(manifest["not_delivered"].items()):
        text += f", {num} not ({kind})"
    left = samples["planned"] + samples["asked"]
    if saved := manifest["tokens"]["saved"]:
        text += f", {saved:,} tokens saved"
    return text + (f", {left} not done" if left else "")
