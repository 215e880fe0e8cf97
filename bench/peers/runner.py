"""What the runners of other engines share: their options, the order of a run, the line they print.

A runner lives in its engine's environment, where there is no Tokenmill and perhaps no PyTorch. It
hands a system (see `bench/measure.py`) to `report`, and knows nothing of how it is timed.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from bench.measure import System, measure, salted

WORKLOAD = Path(__file__).resolve().parents[1] / "workload.json"


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every runner takes."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    parser.add_argument("--only", default="W1,W2", help="workloads by name, separated by commas")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def report(
    options: argparse.Namespace,
    system: System,
    *,
    peer: str,
    version: str,
    precision: str,
    process: int | None = None,
) -> None:
    """Measure the workloads and print one JSON object; `process` holds the engine, if not this."""
    workloads = json.loads(options.workload.read_text("utf-8"))
    names = options.only.split(",")
    warm_up = salted(workloads[names[0]]["requests"][:1], 90)[0]
    system([{**warm_up, "max_tokens": 8}], 1, 0.0)
    result: dict[str, Any] = {
        "peer": peer,
        "version": version,
        "precision": precision,
        "threads": options.threads,
    }
    for name in names:
        measured = measure(
            name,
            workloads[name],
            {peer: system},
            lambda _system: [process or os.getpid()],
            options.repeat,
        )
        result[name] = measured[peer].as_peer()
    print(json.dumps(result))
