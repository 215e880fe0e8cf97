"""Prove and measure the GPU path, in one command and under eight minutes.

    python -m bench.gpu [--budget 450] [--dry]

Each section runs in a process of its own (`bench.gpu_section`), so that a kernel which breaks the
device takes none of the others' figures along; here rows are only collected. Sections come in the
order of what they tell: what the device copies and multiplies and the shapes that the aims name,
every kernel against float64 on the device, whole engines on real shapes with random weights beside
transformers' own continuous batching, the kernels' other shapes. One begins only if what it is
expected to take is left of the budget, and says so where it is left out; what does not come back is
cut off. bench/results/ keeps each row as JSON as it comes; a table is printed at the end. Needs
PyTorch, Triton, transformers and safetensors; no network, model or service. `--dry` goes the same
way on a CPU with tiny shapes: its numbers mean nothing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.gpu_kernels import Row
from bench.gpu_proofs import GROUPS
from bench.gpu_report import Report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
MOST_BUDGET_S = 460.0  # with what a section may be late, and the process's start, eight minutes
# in the order of what they tell: the first ones are there whatever the time
PLAN = (
    ("Llama-3.1-8B", "none"), ("Qwen3-0.6B", "none"), ("Llama-3.1-8B", "fp8"),
    ("Llama-3.1-8B", "int4"), ("Qwen3-8B", "none"), ("Qwen3-8B", "fp8"), ("Qwen3-8B", "int4"),
    ("Qwen3-0.6B", "fp8"), ("Qwen3-0.6B", "int4"),
)  # fmt: skip
# what sections are expected to take, for want of a measurement: kernels are compiled on the way
LIMITS_S, PROOFS_S, TEXTS_S, KERNELS_S, ENGINE_S = 25.0, 75.0, 35.0, 45.0, 65.0
# an engine's time, as parts of the first one's: loading, capturing and steps grow with weights
PARTS = {"Llama-3.1-8B": 1.0, "Qwen3-8B": 1.1, "Qwen3-0.6B": 0.6}
PACKING = {"none": 1.0, "fp8": 1.1, "int4": 1.3}


def section_name(name: str, kind: str) -> str:
    return f"{name} {kind if kind != 'none' else 'bf16'}"


def engine_s(report: Report, name: str, kind: str) -> float:
    """What an engine's section is expected to take, by the first one's."""
    first = report.seconds.get(section_name(*PLAN[0]), ENGINE_S)
    return first * PARTS[name] * PACKING[kind]


def elsewhere(
    section: str,
    device: str,
    given: dict[str, Any],
    most_s: float,
    program: str = "bench.gpu_section",
) -> Iterator[Row]:
    """A section's rows from a process of its own; the last one tells how it failed, if it did."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable, "-m", program, section, "--device", device,
            "--rows-to", str(writer), "--given", json.dumps(given),
        ],
        cwd=ROOT, pass_fds=[writer], stdout=sys.stderr,
    )  # fmt: skip
    os.close(writer)
    cut_off = threading.Event()

    def end() -> None:
        cut_off.set()
        process.kill()

    watch = threading.Timer(max(0.0, most_s), end)
    watch.daemon = True
    watch.start()
    failed = False
    try:
        with os.fdopen(reader) as lines:
            for line in lines:
                if line.endswith("\n"):  # else it was ended while it wrote
                    row = json.loads(line)
                    failed = failed or "failed" in row
                    yield row
        status = process.wait()
        if cut_off.is_set():
            yield {"cut_off": f"it had not come back in {most_s:.0f} s"}
        elif status and not failed:
            yield {"failed": f"its process ended with status {status}"}
    finally:
        watch.cancel()
        process.kill()
        process.wait()


def proofs_elsewhere(device: str, report: Report, **how: Any) -> Iterator[Row]:
    """Every group's proofs. What a group has broken the next ones do not see: they begin anew."""
    left, group = list(GROUPS), ""
    while left:
        begun, broke = len(left), False
        for row in elsewhere("proofs", device, {"groups": left}, report.left_s, **how):
            if "begins" in row:
                group = str(row["begins"])
                left.remove(group)
                continue
            broke = "kernel" not in row
            yield {"kernel": group, "ok": False} | row
        if broke and len(left) == begun:  # it did not even come to the first
            return
        if not broke:
            return


def machine(device: torch.device) -> dict[str, str]:
    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    found = {name: installed(name) for name in ("torch", "triton", "transformers")}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return found | {"gpu": gpu, "python": platform.python_version()}


def rows_in(found: dict[str, Any], section: str) -> list[Row]:
    each = found.get(section)
    each = each if isinstance(each, list) else [each]
    return [row for row in each if isinstance(row, dict)]


def why_not(found: dict[str, Any], section: str) -> str:
    """Why a section has no such figure."""
    if section not in found:
        return f"{section}: not begun"
    for row in rows_in(found, section):
        for reason in ("left_out", "cut_off", "failed"):
            if reason in row:
                return f"{section}: {reason.replace('_', ' ')}: {row[reason]}"
    return f"{section}: not measured on this machine"


def aims(found: dict[str, Any]) -> Iterator[Row]:
    """What was wanted, and what was found of it; or why nothing was."""

    def number(section: str, key: str, **of: object) -> float | None:
        for row in rows_in(found, section):
            if key in row and all(row.get(name) == value for name, value in of.items()):
                return None if row[key] is None else float(str(row[key]))
        return None

    def aim(name: str, wanted: float, *parts: tuple[str, float | None]) -> Row:
        for section, figure in parts:
            if not figure:
                why = why_not(found, section)
                return {"aim": name, "wanted": wanted, "found": "unmeasured", "why": why}
        share = (parts[0][1] or 0.0) / (parts[1][1] or 1.0)
        return {"aim": name, "wanted": wanted, "found": share, "met": share >= wanted}

    def of_limits(key: str, **of: object) -> tuple[str, float | None]:
        return "limits", number("limits", key, **of)

    engine = section_name(*PLAN[0])

    def of_engine(key: str, **of: object) -> tuple[str, float | None]:
        return engine, number(engine, key, **of)

    yield aim(
        "decode attention / copy", 0.85,
        of_limits("gb_s", kernel="decode attention"), of_limits("copy_gb_s"),
    )  # fmt: skip
    yield aim(
        "prefill attention / matmul", 0.60,
        of_limits("tflop_s", kernel="prefill attention"), of_limits("bf16_tflop_s"),
    )  # fmt: skip
    yield aim(
        "reading weights / decode step", 0.75,
        of_engine("weights_at_copy_rate_ms", batch=1), of_engine("step_ms", batch=1),
    )  # fmt: skip
    yield aim(
        "tokens/s / generate_batch's", 2.0,
        of_engine("tokens_s", measured="offline"),
        ("generate_batch", number("generate_batch", "tokens_s")),
    )  # fmt: skip
    yield aim(
        "GPU busy in steady decode", 0.95,
        of_engine("gpu_ms", batch=256), of_engine("step_ms", batch=256),
    )  # fmt: skip


def run(report: Report, device: torch.device, dry: bool) -> None:
    def needs(seconds: float) -> float:
        return 0.0 if dry else seconds

    def section(name: str, seconds: float, module: str = "", **given: Any) -> None:
        def rows() -> Iterator[Row]:
            return elsewhere(module or name, device.type, given, report.left_s)

        report.section(name, rows, needs_s=needs(seconds))

    report.section("machine", lambda: machine(device), needs_s=0)
    section("limits", LIMITS_S)
    limit = (rows_in(report.found, "limits") or [{}])[0]
    report.section("proofs", lambda: proofs_elsewhere(device.type, report), needs_s=needs(PROOFS_S))
    section("same texts", TEXTS_S)
    for name, kind in PLAN[:1] if dry else PLAN:
        seconds = engine_s(report, name, kind)
        section(section_name(name, kind), seconds, "engine", model=name, kind=kind, limits=limit)
        if (name, kind) == PLAN[0]:
            section("generate_batch", ENGINE_S)
            section("kernels", KERNELS_S)
    report.section("aims", lambda: list(aims(report.found)), needs_s=float("-inf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--budget", type=float, default=450.0, help=f"seconds, at most {MOST_BUDGET_S:g}"
    )
    parser.add_argument("--dry", action="store_true", help="the same way on a CPU, in no time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    if not 0 < args.budget <= MOST_BUDGET_S:
        raise SystemExit(f"--budget must be in (0, {MOST_BUDGET_S:g}], got {args.budget:g}")
    if not args.dry and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --dry goes the same way on a CPU")
    device = torch.device("cpu" if args.dry else "cuda")
    stamp = datetime.now(UTC).strftime("%Y-%m-%d-%H%M")
    report = Report(args.budget, args.out / f"{stamp}-gpu{'-dry' if args.dry else ''}.json")
    report.keep_time()
    run(report, device, args.dry)
    print("\n".join(report.table()))
    print(report.path)
    rows = [row for name in ("proofs", "same texts") for row in rows_in(report.found, name)]
    wrong = [row for row in rows if not row.get("ok")]
    if wrong:
        raise SystemExit(f"{len(wrong)} proofs failed or were left out")


if __name__ == "__main__":
    main()
