"""Prove and measure the GPU path, in one command and under eight minutes.

    python -m bench.gpu [--seconds 440] [--dry]

First every kernel against float64 on the device, then the kernels' rates beside what the device
copies and multiplies, then whole engines on real shapes with random weights, beside transformers'
own continuous batching. Prints a table; bench/results/ keeps all of it as JSON. Needs PyTorch,
Triton, transformers and safetensors; no network, model or service. What there is no time for is
named as left out. `--dry` goes the same way on a CPU with tiny shapes: its numbers mean nothing.
"""

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable
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
from bench.gpu_kernels import DRY, Row, Sizes, Timer, kernels_for, limits, proofs, timings

RESULTS = Path(__file__).parent / "results"
# in the order of what they tell: the first ones are there whatever the time
PLAN = (
    ("Llama-3.1-8B", "none"), ("Qwen3-0.6B", "none"), ("Llama-3.1-8B", "fp8"),
    ("Llama-3.1-8B", "int4"), ("Qwen3-8B", "none"), ("Qwen3-8B", "fp8"), ("Qwen3-8B", "int4"),
    ("Qwen3-0.6B", "fp8"), ("Qwen3-0.6B", "int4"),
)  # fmt: skip
LEAST_S = 35.0  # an engine begins only if so much is left


class Report:
    """What was found, section by section; a section that fails or is left out says so."""

    def __init__(self, seconds: float) -> None:
        self.found: dict[str, Any] = {}
        self._ends_at = time.perf_counter() + seconds

    @property
    def left_s(self) -> float:
        return self._ends_at - time.perf_counter()

    def section(self, name: str, run: Callable[[], Any], least_s: float = 0.0) -> Any:
        if self.left_s < least_s:
            self.found[name] = {"left_out": f"{self.left_s:.0f} s left, {least_s:.0f} needed"}
            return None
        started = time.perf_counter()
        try:
            result = run()
        except Exception as error:  # noqa: BLE001 (the other sections are worth their time)
            result = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        self.found[name] = result
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
        return result


def measure_model(
    name: str, kind: str, device: torch.device, dry: bool, limit: dict[str, float]
) -> list[Row]:
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
    rows: list[Row] = []
    for batch in (1, 2) if dry else (1, 64, 256):
        row = steady_decode(engine, batch, 4 if dry else 48, vocab)
        weights = checkpoint.num_bytes * {"none": 1.0, "fp8": 0.5, "int4": 0.27}[kind]
        if "copy_gb_s" in limit:
            row["weights_at_copy_rate_ms"] = weights / limit["copy_gb_s"] / 1e6
        rows.append(row)
    rows.append(offline(engine, count, vocab, prompt, new))
    rate = 0.5 * float(str(rows[-1]["tokens_s"])) / new
    rows.append(under_load(engine, rate, 0.2 if dry else 6.0, vocab, (prompt, new)))
    return rows


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


def table(found: dict[str, Any]) -> list[str]:
    """A line for each row, its name first."""
    lines = []
    for section, rows in found.items():
        lines.append(f"## {section}")
        for row in rows if isinstance(rows, list) else [rows]:
            cells = [
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                for key, value in row.items()
            ]
            lines.append("  " + "  ".join(cells))
    return lines


def run(device: torch.device, seconds: float, dry: bool) -> dict[str, Any]:
    sizes = DRY if dry else Sizes()
    report = Report(seconds)
    report.section("machine", lambda: machine(device))
    kernels = kernels_for(device)
    timer = Timer(device, 3 if dry else 10)
    settings: dict[str, Any] = {"num_blocks": 40, "max_num_seqs": 8, "max_model_len": 128}
    if dry:
        settings["kernels"] = "reference"
    with torch.inference_mode():
        report.section("proofs", lambda: proofs(kernels, device, sizes))
        limit = report.section("limits", lambda: limits(timer, device, sizes))
        report.section("kernels", lambda: timings(kernels, timer, device, sizes), 60 * (not dry))
    report.section("same texts", lambda: same_texts(TINY, device, **settings))
    for name, kind in PLAN[:1] if dry else PLAN:
        report.section(
            f"{name} {kind if kind != 'none' else 'bf16'}",
            lambda name=name, kind=kind: measure_model(name, kind, device, dry, limit or {}),  # type: ignore[misc]
            0 if dry else LEAST_S,
        )
        free_memory(device)
        if (name, kind) == PLAN[0]:
            least_s = 0 if dry else LEAST_S
            report.section("generate_batch", lambda: generate_batch(device, dry), least_s)
            free_memory(device)
    return report.found


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=440.0, help="most time to take, about")
    parser.add_argument("--dry", action="store_true", help="the same way on a CPU, in no time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --dry goes the same way on a CPU")
    device = torch.device("cpu" if args.dry else "cuda")
    found = run(device, args.seconds, args.dry)
    print("\n".join(table(found)))
    args.out.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y-%m-%d-%H%M")
    path = args.out / f"{stamp}-gpu{'-dry' if args.dry else ''}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(path)
    wrong = [row for row in found.get("proofs", []) if isinstance(row, dict) and not row["ok"]]
    if wrong or not all(isinstance(row, dict) for row in found["proofs"]):
        raise SystemExit(f"{len(wrong)} proofs failed")


if __name__ == "__main__":
    main()
