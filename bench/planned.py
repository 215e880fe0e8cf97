"""What the planned order of a batch brings: rows that share long beginnings, shuffled.

    python -m bench.planned --model DIR --rows 2000 --repeat 3

`--groups` beginnings of `--shared` tokens, each followed by tokens of a row's own. Both orders go
through one engine, turn by turn, whose KV cache holds `--held` of the beginnings beside the rows
that run; the worker's batch planner makes the one, the shuffled file is the other. Prints one JSON
object: tokens per second of prompts and outputs together, and hits in the prefix cache as a share
of the ideal, where each beginning is computed once.
"""

import argparse
import json
import random
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from worker.batch_plan import Plan

BLOCK = 16
OWN_TOKENS = 24  # of each prompt, behind what it shares
URL = "/v1/completions"


def prompts_of(options: argparse.Namespace, draw: random.Random) -> list[list[int]]:
    def some(num: int) -> list[int]:
        return [draw.randrange(3, options.vocabulary) for _ in range(num)]

    beginnings = [some(options.shared) for _ in range(options.groups)]
    rows = [beginnings[i % options.groups] + some(OWN_TOKENS) for i in range(options.rows)]
    draw.shuffle(rows)
    return rows


def planned(prompts: list[list[int]], max_tokens: int) -> list[int]:
    with closing(Plan()) as plan:
        for number, prompt in enumerate(prompts):
            plan.add(number, 0, URL, max_tokens, json.dumps(prompt).encode())
        return [each.number for each in plan.rows()]


def main() -> None:
    options = _options()
    draw = random.Random(0)
    length = options.shared + OWN_TOKENS + options.max_tokens
    blocks_each = -(-length // BLOCK)
    num_blocks = options.seats * blocks_each + options.held * (options.shared // BLOCK)
    engine = LLMEngine(
        EngineConfig(
            model=str(options.model), num_threads=options.threads, block_size=BLOCK,
            num_blocks=num_blocks, max_num_seqs=options.seats, kernels=options.kernels,
        )
    )  # fmt: skip
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, temperature=0.0)
    ideal = (options.rows - options.groups) * (options.shared // BLOCK * BLOCK)
    rates: dict[str, list[float]] = {"input": [], "planned": []}
    cpu_rates: dict[str, list[float]] = {"input": [], "planned": []}
    hits: dict[str, list[float]] = {"input": [], "planned": []}
    for _ in range(options.repeat):
        prompts = prompts_of(options, draw)  # others each time: no round finds the last one's
        orders = {
            "input": list(range(options.rows)), "planned": planned(prompts, options.max_tokens)
        }  # fmt: skip
        for name, order in orders.items():
            salt = 1 if name == "planned" else 2  # nor does an order find the other's
            before, started, cpu = engine.stats(), time.perf_counter(), time.process_time()
            engine.generate([[salt, *prompts[i][1:]] for i in order], params)
            wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
            rates[name].append((length * options.rows) / wall_s)
            cpu_rates[name].append((length * options.rows) / cpu_s)
            hits[name].append((engine.stats().cached_tokens - before.cached_tokens) / ideal)
    engine.close()
    print(json.dumps(_result(options, num_blocks, rates, cpu_rates, hits), indent=1))


def _result(
    options: argparse.Namespace,
    num_blocks: int,
    rates: dict[str, list[float]],
    cpu_rates: dict[str, list[float]],
    hits: dict[str, list[float]],
) -> dict[str, Any]:
    def ratio(of: dict[str, list[float]]) -> dict[str, float]:
        ratios = [b / a for a, b in zip(of["input"], of["planned"], strict=True)]
        return {"median": round(statistics.median(ratios), 3), "least": round(min(ratios), 3)}

    return {
        "rows": options.rows,
        "groups": options.groups,
        "shared_tokens": options.shared,
        "kv_tokens": num_blocks * BLOCK,
        "tokens_per_s": {name: [round(rate, 1) for rate in each] for name, each in rates.items()},
        "ratio": ratio(rates),
        "ratio_of_cpu": ratio(cpu_rates),  # what a busy machine says something of
        "hits_of_ideal": {name: round(statistics.median(each), 4) for name, each in hits.items()},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--groups", type=int, default=50)
    parser.add_argument("--shared", type=int, default=256, help="tokens of each beginning")
    parser.add_argument("--held", type=int, default=8, help="beginnings that the cache can keep")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=2000, help="token ids that are drawn")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
