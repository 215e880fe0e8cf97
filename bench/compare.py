"""Tokenmill and other engines on the same workloads, in turns, a process for each run.

    python bench/compare.py --only W1,W2 --rounds 3 --json out.json \\
        --system "tokenmill=python bench/throughput.py --json --repeat 1" \\
        --system "openvino=PEERS/bin/python run_openvino.py --model MODELS/ov-f32 --repeat 1"

A system is a command that takes `--workload FILE --only NAMES` and prints one JSON object as the
last line of its standard output: for each workload `out_tps`, for W2 `decode_tps` and `ttft_ms`
as well.
The first system named is the one that the others are compared with. Rounds go A B … A B …, because
a machine's speed may swing between them: the ratio is the median of the rounds' own ratios. Beside
each run stands what the machine gave just before it: the rate of a large float32 product and of
reading memory.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
FIGURES = ("out_tps", "decode_tps", "ttft_ms")
LIMITS = (
    "import json, sys; sys.path.insert(0, {repository!r}); from bench.limits import limits; "
    "print(json.dumps(limits()))"
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    systems = dict(system.split("=", 1) for system in options.system)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for round_no in range(options.rounds):
        for name, command in systems.items():
            limits = _last_json([sys.executable, "-c", LIMITS.format(repository=str(REPOSITORY))])
            result = _last_json(
                [
                    *shlex.split(command),
                    *("--workload", str(options.workload), "--only", options.only),
                ]
            )
            runs[name].append(result | {"limits": limits})
            _say(f"round {round_no + 1} {name}: {_figures(result, options.only)} {limits}")
    first, *others = systems
    summary = {
        "systems": systems,
        "runs": runs,
        "ratios": {other: _ratios(runs[first], runs[other], options.only) for other in others},
    }
    for name in systems:
        _say(f"{name}: {_figures(_medians(runs[name], options.only), options.only)} (medians)")
    for other, ratios in summary["ratios"].items():
        _say(f"{first} / {other}: {ratios}")
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")


def _last_json(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} ended with status {done.returncode}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


def _figures(result: dict[str, Any], only: str) -> dict[str, float]:
    return {
        f"{workload} {figure}": result[workload][figure]
        for workload in only.split(",")
        for figure in FIGURES
        if figure in result.get(workload, {})
    }


def _medians(runs: list[dict[str, Any]], only: str) -> dict[str, Any]:
    medians: dict[str, Any] = {}
    for workload in only.split(","):
        medians[workload] = {
            figure: statistics.median(run[workload][figure] for run in runs)
            for figure in FIGURES
            if all(figure in run.get(workload, {}) for run in runs)
        }
    return medians


def _ratios(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], only: str
) -> dict[str, float]:
    """Of each figure the median of the rounds' ratios, ours to theirs."""
    pairs = [(_figures(a, only), _figures(b, only)) for a, b in zip(ours, theirs, strict=True)]
    shared = set.intersection(*(set(a) & set(b) for a, b in pairs))
    return {
        figure: round(statistics.median(a[figure] / b[figure] for a, b in pairs), 3)
        for figure in sorted(shared)
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--workload", type=Path, default=REPOSITORY / "bench" / "workload.json")
    parser.add_argument("--only", default="W1,W2", help="workloads by name, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each system")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--system", action="append", required=True, metavar="NAME=COMMAND")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if bad := [system for system in options.system if "=" not in system]:
        parser.error(f"--system must be NAME=COMMAND, got {bad[0]!r}")
    return options


if __name__ == "__main__":
    main()
