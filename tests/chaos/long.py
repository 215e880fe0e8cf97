"""`make chaos`: the long forms of all scenarios, the control run, and what they have to show.

    python -m tests.chaos.long [--scale 1.0] [--only NAME …] [--smollm2 FOLDER] [--report]

Each scenario has a deployment of its own, and a line of JSON. At scale 1 these are 10,000 jobs and
more, and 200 kills and stops; --report writes each result to bench/results/ as it comes, in place
of an older one of its name, so that one which failed is run again alone. Exit status 1 if a promise
was broken or a bar of `tests.chaos.report` not met.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.chaos import more_scenarios as more
from tests.chaos import scenarios
from tests.chaos.cluster import Cluster
from tests.chaos.oracle import Oracle
from tests.chaos.report import Report, bars, broken, table
from tests.chaos.run import Result, Size, Storm, run
from tests.tiny_llama import write_tiny_llama

TMPFS_BYTES = 24 << 20
Faults = Callable[[Storm], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A scenario's long form: its faults, its load, its deployment."""

    faults: Faults
    size: Size
    suffix: str = ""  # of its name, where the same faults come in several deployments
    env: Mapping[str, str] = field(default_factory=dict)
    postgres: bool = True
    small_disk: bool = False
    num_workers: int = 2
    most_tokens: int = 60
    cancels: float = 0.02
    smollm2: bool = False

    @property
    def name(self) -> str:
        return self.faults.__name__ + self.suffix


# of scale 1; jobs are asked for about as long as the faults go on, so that each meets some
PLANS = [
    Plan(faults=scenarios.kill_workers, size=Size(num_jobs=2000, num_faults=40, pause_s=2.0)),
    Plan(
        faults=scenarios.kill_engines,
        size=Size(num_jobs=1200, num_faults=24, per_call=5, pause_s=1.0),
    ),
    Plan(
        faults=scenarios.kill_api, size=Size(num_jobs=1000, num_faults=21, per_call=5, pause_s=0.6)
    ),
    Plan(
        faults=scenarios.kill_redis,
        size=Size(num_jobs=1500, num_faults=30, per_call=5, pause_s=0.9),
    ),
    Plan(faults=scenarios.redis_away, size=Size(num_jobs=400, num_faults=10, pause_s=40.0)),
    Plan(
        faults=scenarios.kill_postgres,
        size=Size(num_jobs=1200, num_faults=24, per_call=5, pause_s=0.8),
    ),
    Plan(
        faults=scenarios.freeze_workers,
        size=Size(num_jobs=1200, num_faults=20, per_call=5, pause_s=1.3),
    ),
    Plan(
        faults=scenarios.break_the_network,
        size=Size(num_jobs=800, num_faults=16, per_call=5, pause_s=1.3),
    ),
    Plan(faults=scenarios.half_open_redis, size=Size(num_jobs=200, num_faults=1, pause_s=0.8)),
    Plan(faults=scenarios.wrong_clocks, size=Size(num_jobs=300, num_faults=1)),
    Plan(faults=more.starve_of_memory, size=Size(num_jobs=200, num_faults=3, pause_s=1.5)),
    Plan(  # of jobs that mostly do not fit the grace; the other worker has room for them
        faults=more.drain,
        most_tokens=400,
        env={"TOKENMILL_MAX_NUM_SEQS": "48"},
        size=Size(num_jobs=800, num_faults=30, tokens=(20, 400), per_call=4, pause_s=7.0),
    ),
    Plan(faults=more.poison, size=Size(num_jobs=300, num_faults=7, per_call=4, pause_s=3.0)),
    Plan(faults=more.odd_messages, size=Size(num_jobs=100, num_faults=1, pause_s=1.0)),
    Plan(faults=scenarios.swizzle, size=Size(num_jobs=800, num_faults=12, per_call=5, pause_s=1.2)),
    Plan(
        faults=scenarios.kill_workers,
        suffix="_on_sqlite",
        postgres=False,
        size=Size(num_jobs=300, num_faults=6, pause_s=1.5),
    ),
    Plan(
        faults=more.fill_the_disk,
        suffix="_on_sqlite",
        postgres=False,
        small_disk=True,
        size=Size(num_jobs=200, num_faults=2, pause_s=0.6),
    ),
    Plan(
        faults=more.kill_now_and_then,
        # the engines that die are no job's fault, however often it was in one
        env={"CHAOS_STEP_S": "0.05", "TOKENMILL_MAX_CRASHES": "100"},
        most_tokens=400,
        cancels=0.0,
        size=Size(num_jobs=300, num_faults=30, tokens=(200, 400), per_call=20),
    ),
    Plan(
        faults=scenarios.kill_workers,
        suffix="_of_smollm2",
        smollm2=True,
        num_workers=1,
        env={"TOKENMILL_KERNELS": "auto", "CHAOS_STEP_S": "0"},
        most_tokens=80,
        size=Size(num_jobs=40, num_faults=2, tokens=(20, 80), per_call=5),
    ),
    Plan(
        faults=more.without_a_fence,
        size=Size(num_jobs=300, num_faults=4, pause_s=0.6),
    ),
]


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
    """One scenario after another."""

    def __init__(
        self, folder: Path, *, scale: float, seed: int, slack_s: float, smollm2: Path | None
    ) -> None:
        self._folder, self._scale, self._seed = folder, scale, seed
        self._slack_s, self._smollm2 = slack_s, smollm2
        self._model_dir = write_tiny_llama(folder / "model")
        self._oracles: dict[tuple[bool, int], Oracle] = {}

    def play(self, plan: Plan) -> Result | None:
        """None where this machine has no place for it. What a scenario raises breaks it."""
        if plan.smollm2 and self._smollm2 is None:
            return None
        folder = self._folder / plan.name
        with contextlib.ExitStack() as exits:
            disk = None
            if plan.small_disk:
                disk = exits.enter_context(small_disk(self._folder / f"{plan.name}-disk"))
                if disk is None:
                    return None
            model_dir = self._smollm2 if plan.smollm2 else self._model_dir
            assert model_dir is not None
            try:
                oracle = self._oracle(plan, model_dir)
                cluster = exits.enter_context(
                    Cluster(
                        folder,
                        model_dir,
                        postgres=plan.postgres,
                        num_workers=plan.num_workers,
                        env=dict(plan.env),
                        database_folder=disk,
                    )
                )
                result, _ = run(
                    cluster,
                    oracle,
                    plan.faults,
                    scaled(plan.size, self._scale),
                    seed=self._seed,
                    cancels=plan.cancels,
                    slack_s=self._slack_s,
                )
            except Exception as error:  # noqa: BLE001 (the others are run all the same
                traceback.print_exc()
                result = Result(scenario=plan.name, seed=self._seed)
                result.violations.append(f"it ended early: {error!r:.500}")
        result.scenario = plan.name
        return result

    def _oracle(self, plan: Plan, model_dir: Path) -> Oracle:
        kind = (plan.smollm2, plan.most_tokens)
        if kind not in self._oracles:
            self._oracles[kind] = (
                Oracle(model_dir, most_tokens=plan.most_tokens, kernels="auto", num_drawn=16)
                if plan.smollm2
                else Oracle(model_dir, most_tokens=plan.most_tokens)
            )
        return self._oracles[kind]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.long")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], choices=[plan.name for plan in PLANS])
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--slack", type=float, default=0.0, help="seconds on every bound of time")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--keep", type=Path, help="an empty folder: logs and databases stay in it")
    options = parser.parse_args()
    results = []
    report = Report() if options.report else None
    chosen = [plan for plan in PLANS if not options.only or plan.name in options.only]
    with _folder(options.keep) as folder:
        campaign = Campaign(
            folder, scale=options.scale, seed=options.seed, slack_s=options.slack,
            smollm2=options.smollm2,
        )  # fmt: skip
        for plan in chosen:
            load = round(os.getloadavg()[0], 1)
            result = campaign.play(plan)
            if result is None:
                continue
            results.append(result)
            print(json.dumps(result.as_json()), flush=True)  # noqa: T201
            if report is not None:
                report.add(result, {"command": _command(plan, options), "load_before": load})
    print(table(results))  # noqa: T201
    for bar in bars(results):
        print(f"{bar.what}: {bar.shown or 'not run'} ({bar.bound})")  # noqa: T201
    found = broken(results, whole=not options.only and options.scale >= 1)
    for text in found:
        print(f"BROKEN {text}", file=sys.stderr)  # noqa: T201
    return 1 if found else 0


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="tokenmill-chaos-") as text:
        Path(text).chmod(0o755)  # PostgreSQL runs as another user
        yield Path(text)


def _command(plan: Plan, options: argparse.Namespace) -> str:
    """With which this one is run again, alone."""
    words = ["python -m tests.chaos.long", f"--only {plan.name}"]
    words += ["--smollm2 MODEL"] if plan.smollm2 else []
    words += [f"--scale {options.scale:g}"] if options.scale != 1 else []
    words += [f"--seed {options.seed}"] if options.seed else []
    words += [f"--slack {options.slack:g}"] if options.slack else []
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
