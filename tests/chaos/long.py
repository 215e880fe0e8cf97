"""`make chaos`: the long forms of all scenarios, the control run, and what the issue's bars ask.

    python -m tests.chaos.long [--scale 1.0] [--only NAME …] [--smollm2 FOLDER] [--report]

Prints a line of JSON for each scenario and a table. At scale 1 these are 10,000 jobs and more, and
200 kills and stops; --report writes both to bench/results/. Exit status 1 if a promise was broken,
or if the control run, whose results name no fence, was found to be in order.
"""

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.chaos import more_scenarios as more
from tests.chaos import scenarios
from tests.chaos.cluster import Cluster
from tests.chaos.oracle import Oracle
from tests.chaos.run import Result, Size, Storm, percentile, run
from tests.conftest import REPOSITORY
from tests.tiny_llama import write_tiny_llama

RESULTS = REPOSITORY / "bench" / "results"
TMPFS_BYTES = 24 << 20
Faults = Callable[[Storm], None]

# of scale 1; jobs are asked for no faster than the faults come, so that each meets some
POSTGRES: list[tuple[Faults, Size]] = [
    (scenarios.kill_workers, Size(num_jobs=2000, num_faults=40, pause_s=0.6)),
    (scenarios.kill_engines, Size(num_jobs=1200, num_faults=24, pause_s=0.6)),
    (scenarios.kill_api, Size(num_jobs=1000, num_faults=21)),
    (scenarios.kill_redis, Size(num_jobs=1500, num_faults=30, pause_s=0.5)),
    (scenarios.kill_postgres, Size(num_jobs=1200, num_faults=24, pause_s=0.5)),
    (scenarios.freeze_workers, Size(num_jobs=1200, num_faults=20, pause_s=0.8)),
    (scenarios.break_the_network, Size(num_jobs=800, num_faults=16, pause_s=0.8)),
    (scenarios.half_open_redis, Size(num_jobs=200, num_faults=1, pause_s=0.8)),
    (scenarios.wrong_clocks, Size(num_jobs=300, num_faults=1)),
    (more.starve_of_memory, Size(num_jobs=200, num_faults=3, pause_s=0.6)),
    (more.drain, Size(num_jobs=1200, num_faults=20, pause_s=0.8)),
    (more.poison, Size(num_jobs=300, num_faults=7, pause_s=1.0)),
    (more.odd_messages, Size(num_jobs=100, num_faults=1, pause_s=1.0)),
    (scenarios.swizzle, Size(num_jobs=800, num_faults=12, pause_s=0.8)),
]
SQLITE: list[tuple[Faults, Size]] = [
    (scenarios.kill_workers, Size(num_jobs=300, num_faults=6)),
    (more.fill_the_disk, Size(num_jobs=200, num_faults=2, pause_s=0.6)),
]
WASTE = (more.kill_now_and_then, Size(num_jobs=300, num_faults=30, tokens=(200, 400), per_call=20))
REAL = (scenarios.kill_workers, Size(num_jobs=40, num_faults=2, tokens=(20, 80), per_call=5))
CONTROL = (more.without_a_fence, Size(num_jobs=300, num_faults=4))


def scaled(size: Size, scale: float) -> Size:
    return replace(
        size,
        num_jobs=max(20, round(size.num_jobs * scale)),
        num_faults=max(1, round(size.num_faults * scale)),
    )


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A tmpfs; None, with a word, where one cannot be mounted."""
    folder.mkdir()
    options = f"size={TMPFS_BYTES}"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"fill_the_disk skipped: no tmpfs here ({error})", file=sys.stderr)  # noqa: T201
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Campaign:
    """All scenarios, one cluster after another."""

    def __init__(self, folder: Path, *, scale: float, only: list[str], slack_s: float) -> None:
        self._folder, self._scale, self._only, self._slack_s = folder, scale, only, slack_s
        self.results: list[Result] = []
        self.model_dir = write_tiny_llama(folder / "model")

    def play(
        self, cluster: Cluster, oracle: Oracle, faults: Faults, size: Size, **kw: float
    ) -> None:
        """One scenario; its line of JSON at once."""
        result, _ = run(
            cluster, oracle, faults, scaled(size, self._scale), slack_s=self._slack_s, **kw
        )
        self.results.append(result)
        print(json.dumps(result.as_json()), flush=True)  # noqa: T201

    def wanted(self, faults: Faults) -> bool:
        return not self._only or faults.__name__ in self._only

    def all(self, smollm2: Path | None) -> None:
        oracle = Oracle(self.model_dir, most_tokens=60)
        chosen = [each for each in POSTGRES if self.wanted(each[0])]
        if chosen:
            with Cluster(self._folder / "postgres", self.model_dir) as cluster:
                for faults, size in chosen:
                    self.play(cluster, oracle, faults, size)
        if self.wanted(CONTROL[0]):
            unsafe = {"CHAOS_NO_FENCE": "1"}
            with Cluster(self._folder / "control", self.model_dir, env=unsafe) as cluster:
                self.play(cluster, oracle, *CONTROL)
        self._on_sqlite(oracle)
        if self.wanted(WASTE[0]):
            slow = {"CHAOS_STEP_S": "0.05"}
            long = Oracle(self.model_dir, most_tokens=400)
            with Cluster(self._folder / "waste", self.model_dir, env=slow) as cluster:
                self.play(cluster, long, *WASTE, cancels=0.0)
        if smollm2 is not None and (not self._only or "real" in self._only):
            real = Oracle(smollm2, most_tokens=80, kernels="auto", num_drawn=16)
            env = {"TOKENMILL_KERNELS": "auto", "CHAOS_STEP_S": "0"}
            with Cluster(self._folder / "real", smollm2, env=env, num_workers=1) as cluster:
                self.play(cluster, real, *REAL)
                self.results[-1].scenario = "kill_workers of SmolLM2-135M"

    def _on_sqlite(self, oracle: Oracle) -> None:
        chosen = [each for each in SQLITE if self.wanted(each[0])]
        if not chosen:
            return
        with small_disk(self._folder / "disk") as disk, Cluster(
            self._folder / "sqlite", self.model_dir, postgres=False, database_folder=disk
        ) as cluster:  # fmt: skip
            for faults, size in chosen:
                if disk is not None or faults is not more.fill_the_disk:
                    self.play(cluster, oracle, faults, size)
                    self.results[-1].scenario += " (SQLite)"


def broken(results: list[Result]) -> list[str]:
    """What does not hold: violations, but of the control run, which has to have some."""
    found = []
    for result in results:
        control = result.scenario == CONTROL[0].__name__
        if control and not any(text.startswith("I2") for text in result.violations):
            found.append("the checker was content with a run without a fence")
        if not control:
            found += [f"{result.scenario}: {text}" for text in result.violations]
    return found


def table(results: list[Result]) -> str:
    """As Markdown: one line a scenario, and the totals of those with a fence."""
    head = (
        *("scenario", "jobs", "kills and stops", "lost", "duplicates", "stale refused"),
        *("stale accepted", "false 202s", "wrong texts", "blocks leaked", "wasted"),
        "p95 of recovery",
    )
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    fenced = [each for each in results if each.scenario != CONTROL[0].__name__]
    for each in results:
        lines.append(_line(each.scenario, [each]))
    lines.append(_line("**all with a fence**", fenced))
    return "\n".join(lines)


def _line(name: str, results: list[Result]) -> str:
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


def report(results: list[Result], command: str) -> None:
    """Write JSON and table into bench/results/."""
    stem = RESULTS / f"{datetime.date.today()}-chaos-cpu{os.cpu_count()}"
    told = {"command": command, "scenarios": [each.as_json() for each in results]}
    stem.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    text = f"# Chaos\n\n`{command}`\n\n{table(results)}\n\n"
    for each in results:
        if each.figures:
            shown = ", ".join(f"{name} {value}" for name, value in each.figures.items())
            text += f"- {each.scenario}: {shown}\n"
    stem.with_suffix(".md").write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.long")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--slack", type=float, default=0.0, help="seconds on every bound of time")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenmill-chaos-") as folder:
        Path(folder).chmod(0o755)
        campaign = Campaign(
            Path(folder), scale=options.scale, only=options.only, slack_s=options.slack
        )
        try:
            campaign.all(options.smollm2)
        finally:
            print(table(campaign.results))  # noqa: T201
            if options.report:
                command = f"python -m tests.chaos.long {' '.join(sys.argv[1:])}"
                report(campaign.results, command)
    for text in (found := broken(campaign.results)):
        print(f"BROKEN {text}", file=sys.stderr)  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
