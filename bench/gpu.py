"""Prove and measure the GPU path, in one command and under eight minutes.

    python -m bench.gpu [--budget 450] [--dry]

Sections come in the order of what they tell: what the device copies and multiplies, every kernel
against float64 on the device, the shapes that the aims name, whole engines on real shapes with
random weights beside transformers' own continuous batching, the kernels' other shapes. One begins
only if what it is expected to take is left of the budget, and says so where it is left out; what
does not come back is cut off. bench/results/ keeps each row as JSON as it comes; a table is printed
at the end. Needs PyTorch, Triton, transformers and safetensors; no network, model or service.
`--dry` goes the same way on a CPU with tiny shapes: its numbers mean nothing.
"""

import argparse
import gc
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.gpu_engine import (
    MODELS,
    NEW_TOKENS,
    PROMPT_TOKENS,
    TINY,
    Engine,
    offline,
    runner_of,
    same_texts,
    some_prompt,
    steady_decode,
    under_load,
)
from bench.gpu_kernels import (
    DRY,
    Row,
    Sizes,
    Timer,
    aimed_at,
    kernels_for,
    limits,
    proofs,
    timings,
)
from bench.gpu_report import Report

RESULTS = Path(__file__).parent / "results"
MOST_BUDGET_S = 460.0  # with what a section may be late, and the process's start, eight minutes
# in the order of what they tell: the first ones are there whatever the time
PLAN = (
    ("Llama-3.1-8B", "none"), ("Qwen3-0.6B", "none"), ("Llama-3.1-8B", "fp8"),
    ("Llama-3.1-8B", "int4"), ("Qwen3-8B", "none"), ("Qwen3-8B", "fp8"), ("Qwen3-8B", "int4"),
    ("Qwen3-0.6B", "fp8"), ("Qwen3-0.6B", "int4"),
)  # fmt: skip
# what sections are expected to take, for want of a measurement: kernels are compiled on the way
PROOFS_S, LIMITS_S, AIMED_S, TEXTS_S, KERNELS_S, ENGINE_S = 60.0, 5.0, 15.0, 30.0, 40.0, 60.0
# an engine's time, as parts of the first one's: loading, capturing and steps grow with weights
PARTS = {"Llama-3.1-8B": 1.0, "Qwen3-8B": 1.1, "Qwen3-0.6B": 0.6}
PACKING = {"none": 1.0, "fp8": 1.1, "int4": 1.3}


def section_name(name: str, kind: str) -> str:
    return f"{name} {kind if kind != 'none' else 'bf16'}"


def engine_s(report: Report, name: str, kind: str) -> float:
    """What an engine's section is expected to take, by the first one's."""
    first = report.seconds.get(section_name(*PLAN[0]), ENGINE_S)
    return first * PARTS[name] * PACKING[kind]


def measure_model(
    name: str, kind: str, device: torch.device, dry: bool, limit: dict[str, float]
) -> Iterator[Row]:
    config = TINY if dry else MODELS[name]
    vocab = int(config["vocab_size"])
    count = 4 if dry else 256
    settings: dict[str, Any] = {"max_num_seqs": count, "max_model_len": 64 if dry else 4096}
    if dry:
        settings |= {"num_blocks": 40, "kernels": "reference"}
    else:
        settings |= {"quantization": kind, "max_num_batched_tokens": 4096}
    runner, checkpoint = runner_of(config, device, **settings)
    engine = Engine(runner, count, 64 if dry else 4096)
    prompt, new = (9, 7) if dry else (PROMPT_TOKENS, NEW_TOKENS)
    for batch in (1, 2) if dry else (1, 256, 64):
        row = steady_decode(engine, batch, 4 if dry else 48, vocab)
        weights = checkpoint.num_bytes * {"none": 1.0, "fp8": 0.5, "int4": 0.27}[kind]
        if "copy_gb_s" in limit:
            row["weights_at_copy_rate_ms"] = weights / limit["copy_gb_s"] / 1e6
        yield row
    row = offline(engine, count, vocab, prompt, new)
    yield row
    rate = 0.5 * float(str(row["tokens_s"])) / new
    yield under_load(engine, rate, 0.2 if dry else 6.0, vocab, (prompt, new))


def generate_batch(device: torch.device, dry: bool) -> Row:
    """transformers' continuous batching on the same shape and load."""
    import random

    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = dict(TINY if dry else MODELS["Llama-3.1-8B"])
    count, prompt, new = (4, 9, 7) if dry else (256, PROMPT_TOKENS, NEW_TOKENS)
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        model.eval()
    draw = random.Random(1)
    prompts = [some_prompt(draw, made.vocab_size, prompt) for _ in range(count)]
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    given: dict[str, Any] = {"generation_config": settings, "progress_bar": False}
    if dry:  # else it fills half the memory with its cache
        from transformers import ContinuousBatchingConfig

        few = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
        given["continuous_batching_config"] = few
    model.generate_batch(inputs=prompts[:2], **given)
    started = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, **given)
    seconds = time.perf_counter() - started
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    return {"measured": "generate_batch", "requests": count, "tokens_s": tokens / seconds}


def machine(device: torch.device) -> dict[str, str]:
    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    found = {name: installed(name) for name in ("torch", "triton", "transformers")}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return found | {"gpu": gpu, "python": platform.python_version()}


def aims(found: dict[str, Any]) -> Iterator[Row]:
    """What was wanted, and what was found of it."""

    def rows(section: str) -> list[Row]:
        each = found.get(section)
        each = each if isinstance(each, list) else [each]
        return [row for row in each if isinstance(row, dict)]

    def number(section: str, key: str, **of: object) -> float | None:
        for row in rows(section):
            if key in row and all(row.get(name) == value for name, value in of.items()):
                return None if row[key] is None else float(str(row[key]))
        return None

    def aim(name: str, part: float | None, whole: float | None, wanted: float) -> Row:
        if part is None or not whole:
            return {"aim": name, "found": "unmeasured"}
        share = part / whole
        return {"aim": name, "found": share, "wanted": wanted, "met": share >= wanted}

    engine = section_name(*PLAN[0])
    decode = number("aimed at", "gb_s", kernel="decode attention")
    yield aim("decode attention / copy", decode, number("limits", "copy_gb_s"), 0.85)
    prefill = number("aimed at", "tflop_s", kernel="prefill attention")
    yield aim("prefill attention / matmul", prefill, number("limits", "bf16_tflop_s"), 0.60)
    floor = number(engine, "weights_at_copy_rate_ms", batch=1)
    yield aim("reading weights / decode step", floor, number(engine, "step_ms", batch=1), 0.75)
    rate = number(engine, "tokens_s", measured="offline")
    other = number("generate_batch", "tokens_s")
    yield aim("tokens/s / generate_batch's", rate, other, 2.0)
    busy = number(engine, "gpu_ms", batch=256)
    yield aim("GPU busy in steady decode", busy, number(engine, "step_ms", batch=256), 0.95)


def run(report: Report, device: torch.device, dry: bool) -> None:
    def needs(seconds: float) -> float:
        return 0.0 if dry else seconds

    sizes = DRY if dry else Sizes()
    report.section("machine", lambda: machine(device), needs_s=0)
    kernels = kernels_for(device)
    timer = Timer(device, 3 if dry else 10)
    settings: dict[str, Any] = {"num_blocks": 40, "max_num_seqs": 8, "max_model_len": 128}
    if dry:
        settings["kernels"] = "reference"
    given = kernels, timer, device, sizes
    with torch.inference_mode():
        limit = report.section("limits", lambda: limits(*given[1:]), needs_s=needs(LIMITS_S))
        report.section("proofs", lambda: proofs(kernels, device, sizes), needs_s=needs(PROOFS_S))
        report.section("aimed at", lambda: aimed_at(*given), needs_s=needs(AIMED_S))
    report.section(
        "same texts", lambda: same_texts(TINY, device, **settings), needs_s=needs(TEXTS_S)
    )
    for name, kind in PLAN[:1] if dry else PLAN:
        report.section(
            section_name(name, kind),
            lambda name=name, kind=kind: measure_model(name, kind, device, dry, limit or {}),  # type: ignore[misc]
            needs_s=needs(engine_s(report, name, kind)),
        )
        free_memory(device)
        if (name, kind) == PLAN[0]:
            report.section(
                "generate_batch", lambda: generate_batch(device, dry), needs_s=needs(ENGINE_S)
            )
            free_memory(device)
            with torch.inference_mode():
                report.section("kernels", lambda: timings(*given), needs_s=needs(KERNELS_S))
            free_memory(device)
    report.section("aims", lambda: list(aims(report.found)), needs_s=float("-inf"))


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
    proven = [report.found[name] for name in ("proofs", "same texts")]
    rows = [row for each in proven for row in (each if isinstance(each, list) else [each])]
    wrong = [row for row in rows if not row.get("ok")]
    if wrong:
        raise SystemExit(f"{len(wrong)} proofs failed or were left out")


if __name__ == "__main__":
    main()
