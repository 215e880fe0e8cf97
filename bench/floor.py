"""How near each run of `bench/compare.py` came to the machine's limit.

    python -m bench.floor bench/results/RUN.json

A workload's floor is its operations over the best rate of a large product, plus the bytes it must
read over the rate of reading memory, both as they were measured just before the run. Operations:
two for each weight and token, at the rate of their own products where the CPU has such in 8 or 16
bits; attention's products, in float32.
Bytes: all weights once a step, with as few steps as the longest output has tokens; keys and values
once for each token that attends to them, those of a prefix that all requests share once a step.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 34 / 32}


class Shape(NamedTuple):
    """What of a model's sizes the floor depends on."""

    layers: int = 30
    hidden: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    intermediate: int = 1536
    vocab: int = 49152

    @property
    def weights_a_token(self) -> int:
        """Weights that each token is multiplied with, all layers, without the head's."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    def attention_operations(self, first: int, last: int) -> int:
        """Of tokens that see `first`, …, `last` keys."""
        keys = (first + last) * (last - first + 1) // 2 if last >= first else 0
        return 4 * self.layers * self.heads * self.head_dim * keys

    @property
    def kv_numbers_a_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


class Work(NamedTuple):
    operations: int  # with weights
    attention: int  # operations of attention
    steps: int
    kv_tokens: int  # keys, with their values, that decodes read


def work_of(workload: dict[str, Any], shape: Shape) -> Work:
    """What a workload asks of any engine that computes what requests share once."""
    requests, n = workload["requests"], workload.get("n", 1)
    shared = _common_prefix([request["prompt"] for request in requests])
    steps = max(request["max_tokens"] for request in requests)
    operations, attention, kv_tokens = 0, 0, shared * steps
    for place, request in enumerate(requests):
        prompt, out = len(request["prompt"]), request["max_tokens"]
        found = shared if place else 0
        operations += 2 * (shape.weights_a_token * (prompt - found) + shape.head_weights)
        attention += shape.attention_operations(found + 1, prompt)
        operations += 2 * n * (shape.weights_a_token + shape.head_weights) * (out - 1)
        attention += n * shape.attention_operations(prompt + 1, prompt + out - 1)
        own = prompt - shared
        if n > 1:  # samples share their whole prompt
            kv_tokens, own = kv_tokens + own * (out - 1), 0
        kv_tokens += n * sum(range(own + 1, own + out))
    return Work(operations, attention, steps, kv_tokens)


def _common_prefix(prompts: list[list[int]]) -> int:
    if len(prompts) == 1:
        return 0
    columns = zip(*prompts, strict=False)
    return next((i for i, each in enumerate(columns) if len(set(each)) > 1), len(min(prompts)))


def floor_seconds(
    work: Work, shape: Shape, precision: str, limits: dict[str, float]
) -> tuple[float, float]:
    """Of arithmetic and of reading; `precision` is of weights, or of weights+cache."""
    of_weights, _, of_cache = precision.partition("+")
    cache = BYTES[of_cache or ("float32" if of_weights == "int8" else of_weights)]
    read = work.steps * (shape.weights_a_token + shape.head_weights) * BYTES[of_weights]
    read += work.kv_tokens * shape.kv_numbers_a_token * cache
    rate = max(limits["product_gflops"], limits["kernel_gflops"])
    own = {
        "int8": "kernel_int8_gops",
        "bfloat16": "kernel_bfloat16_gflops",
        "float16": "kernel_float16_gflops",
    }
    of_products = limits.get(own.get(of_weights, ""), rate)
    return (
        work.operations / of_products / 1e9 + work.attention / rate / 1e9,
        read / limits["read_gb_per_s"] / 1e9,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("results", type=Path, help="what compare.py --json wrote")
    parser.add_argument("--workload", type=Path, default=REPOSITORY / "bench" / "workload.json")
    options = parser.parse_args(arguments)
    workloads = json.loads(options.workload.read_text("utf-8"))
    shape = Shape()
    for system, runs in json.loads(options.results.read_text("utf-8"))["runs"].items():
        for name in (name for name in workloads if name in runs[0]):
            work = work_of(workloads[name], shape)
            for run in runs:
                if run["precision"].partition("+")[0] not in BYTES:
                    continue  # another engine's: how it keeps its numbers is its own
                products_s, reading_s = floor_seconds(work, shape, run["precision"], run["limits"])
                wall_s, floor_s = run[name]["wall_s"], products_s + reading_s
                print(
                    f"{system} {name} ({run['precision']}): {wall_s:.2f} s, floor {floor_s:.2f} s "
                    f"({products_s:.2f} of products, {reading_s:.2f} of reading): "
                    f"{floor_s / wall_s:.0%} reached"
                )


if __name__ == "__main__":
    main()
