"""What a chaos run shows beside what it has to show, from one run or put together from several.

Each scenario's result is written as soon as there is one, in place of an older one of its name: a
scenario that fails is run again alone.
"""

import datetime
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.run import Result, percentile
from tests.conftest import REPOSITORY

RESULTS = REPOSITORY / "bench" / "results"
CONTROL = "without_a_fence"
WASTE = "kill_now_and_then"

# what all scenarios together have to come to
JOBS, KILLS_AND_STOPS, ROUNDS = 10_000, 200, 20
MOST_WASTED = 0.03
NONE_OF = ("lost", "duplicates", "stale_accepted", "false_202s", "wrong_texts", "blocks_leaked")


@dataclass(frozen=True, slots=True)
class Bar:
    """`holds` None: no scenario that shows it was run."""

    what: str
    bound: str
    shown: str
    holds: bool | None


def bars(results: Sequence[Result]) -> list[Bar]:
    """What the long forms have to show, in its order; sums are of the runs with a fence."""
    fenced = [each for each in results if each.scenario != CONTROL]
    num_faults = sum(each.kills + each.stops for each in fenced)
    return [
        _at_least("jobs", sum(each.jobs for each in fenced), JOBS),
        _at_least("kills and stops", num_faults, KILLS_AND_STOPS),
        *(_none(name, sum(getattr(each, name) for each in fenced)) for name in NONE_OF),
        _neighbours(results),
        _control(results),
        *(_recovery(kind, fenced) for kind in sorted({k for r in fenced for k in r.recoveries})),
        _submits(results),
        _waste(results),
        *_drains(results),
    ]  # fmt: skip


def _at_least(what: str, shown: int, bound: int) -> Bar:
    return Bar(what, f"at least {bound:,}", f"{shown:,}", shown >= bound)


def _none(name: str, shown: int) -> Bar:
    return Bar(name.replace("_", " "), "0", str(shown), shown == 0)


def _neighbours(results: Sequence[Result]) -> Bar:
    num, equal = (_total(results, name) for name in ("neighbours", "neighbours_byte_equal"))
    shown = "" if num is None else f"{equal or 0:.0f} of {num:.0f}"
    return Bar("neighbours of poison byte-equal", "all", shown, None if not num else equal == num)


def _control(results: Sequence[Result]) -> Bar:
    found = [
        sum(text.startswith("I2") for text in each.violations)
        for each in results
        if each.scenario == CONTROL
    ]
    what = "violations the checker finds without a fence (control run)"
    return Bar(what, "some", str(sum(found)) if found else "", sum(found) > 0 if found else None)


def _recovery(kind: str, results: Sequence[Result]) -> Bar:
    """Each time beside its own run's bound: the load of a model is not the same in all."""
    told = [
        (seconds, each.bounds.get(kind, math.inf))
        for each in results
        for seconds in each.recoveries.get(kind, ())
    ]
    seconds = [s for s, _ in told]
    late = sum(s > bound for s, bound in told)
    p50, p95 = (percentile(seconds, share) for share in (0.5, 0.95))
    bounds = sorted({bound for _, bound in told})
    text = f"{bounds[0]:.1f} s" if len(bounds) == 1 else f"{bounds[0]:.1f} to {bounds[-1]:.1f} s"
    shown = f"p50 {p50:.1f}, p95 {p95:.1f}, most {max(seconds):.1f} s of {len(told)}"
    return Bar(f"recovery from {kind}, p95", text, shown, late <= len(told) // 20)


def _submits(results: Sequence[Result]) -> Bar:
    num, answered = (_total(results, f"submits{end}") for end in _SUBMITS)
    shown = "" if num is None else f"{answered or 0:.0f} of {num:.0f}"
    return Bar(
        "submits answered with Redis down", "all", shown, None if not num else num == answered
    )


_SUBMITS = ("_without_redis", "_answered_without_redis")


def _waste(results: Sequence[Result]) -> Bar:
    what, bound = "tokens wasted, a kill each 20 s", f"less than {MOST_WASTED:.0%}"
    found = [each for each in results if each.scenario == WASTE]
    if not found:
        return Bar(what, bound, "", None)
    figures = found[-1].figures
    share = figures["wasted_share"] or 0.0
    kept, made, again = (
        int(figures[f"tokens_{name}"] or 0) for name in ("kept", "made", "computed_again")
    )
    shown = f"{share:.2%}: kept {kept:,}, wasted {made - kept:,}, computed again {again:,}"
    return Bar(what, bound, shown, share < MOST_WASTED)


def _drains(results: Sequence[Result]) -> list[Bar]:
    found = [each.figures for each in results if "drains" in each.figures]
    if not found:
        return [Bar("drains under load", f"at least {ROUNDS}", "", None)]
    num = int(sum(each["drains"] or 0 for each in found))
    slowest = max(each["drain_exit_s_max"] or 0 for each in found)
    bound = max(each["drain_bound_s"] or 0 for each in found)
    return [
        _at_least("drains under load", num, ROUNDS),
        Bar("slowest drain", f"{bound:g} s", f"{slowest:.2f} s", slowest <= bound),
    ]


def _total(results: Iterable[Result], name: str) -> float | None:
    values = [v for each in results if (v := each.figures.get(name)) is not None]
    return sum(values) if values else None


def broken(results: Sequence[Result], *, whole: bool) -> list[str]:
    """What does not hold. `whole`: all scenarios were run, in full; else sums are not asked for."""
    found = [
        f"{each.scenario}: {text}"
        for each in results
        if each.scenario != CONTROL
        for text in each.violations
    ]
    for bar in bars(results):
        missing = bar.holds is None or bar.bound.startswith("at least")
        if not bar.holds and (whole or not missing):
            found.append(f"{bar.what}: {bar.shown or 'not run'}, not {bar.bound}")
    return found


def table(results: Sequence[Result]) -> str:
    """As Markdown: one line a scenario, and the totals of those with a fence."""
    head = (
        *("scenario", "jobs", "kills and stops", "lost", "duplicates", "stale refused"),
        *("stale accepted", "false 202s", "wrong texts", "blocks leaked", "wasted"),
        "p95 of recovery",
    )
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [_line(each.scenario, [each]) for each in results]
    fenced = [each for each in results if each.scenario != CONTROL]
    return "\n".join([*lines, _line("**all with a fence**", fenced)])


def _line(name: str, results: Sequence[Result]) -> str:
    def total(field: str) -> int:
        return sum(getattr(each, field) for each in results)

    recoveries = [s for each in results for times in each.recoveries.values() for s in times]
    p95 = percentile(recoveries, 0.95)
    wasted = total("tokens_wasted") / max(1, total("tokens_kept") + total("tokens_wasted"))
    cells = [
        name, total("jobs"), total("kills") + total("stops"), total("lost"), total("duplicates"),
        total("stale_refused"), total("stale_accepted"), total("false_202s"), total("wrong_texts"),
        total("blocks_leaked"), f"{wasted:.1%}", "" if p95 is None else f"{p95:.1f} s",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


class Report:
    """Results in bench/results, as JSON and as a page; a later one takes an older one's place."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self._stem = folder / f"{datetime.date.today()}-chaos-cpu{os.cpu_count()}"
        file = self._stem.with_suffix(".json")
        self._told: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def add(self, result: Result, how: Mapping[str, object]) -> None:
        """With how it came about: the command, the load of the machine before it."""
        self._told[result.scenario] = {**how, **result.as_json()}
        self._stem.with_suffix(".json").write_text(json.dumps(self._told, indent=1) + "\n")
        self._stem.with_suffix(".md").write_text(self.page())

    def results(self) -> list[Result]:
        names = Result.__dataclass_fields__
        return [
            Result(**{name: value for name, value in told.items() if name in names})
            for told in self._told.values()
        ]

    def page(self) -> str:
        results = self.results()
        lines = ["# Chaos", "", "| what | asked for | shown | holds |", "|---|---|---|---|"]
        for bar in bars(results):
            word = {True: "yes", False: "**no**", None: "not run"}[bar.holds]
            lines.append(f"| {bar.what} | {bar.bound} | {bar.shown} | {word} |")
        lines += ["", table(results), ""]
        for result in results:
            told = self._told[result.scenario]
            shown = ", ".join(f"{name} {value:g}" for name, value in result.figures.items()
                              if value is not None)  # fmt: skip
            lines.append(
                f"- {result.scenario}: {result.seconds:g} s, load before {told['load_before']}"
                f"{'; ' if shown else ''}{shown}. `{told['command']}`"
            )
            lines += [f"  - broken: {text}" for text in result.violations[:5]]
        return "\n".join(lines) + "\n"
