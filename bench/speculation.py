"""What speculation brings on W1 and on a workload of copying: `python -m bench.speculation`.

Each workload is generated greedily without drafts and with each kind of them. The tokens must be
the same; if any differ, that is said and the exit status is 1. Printed are the share of drafts that
were confirmed and the tokens that a sequence gets in a step. These are counts, not times: the
engine's clock stands still, so that drafts are made in nearly every step (31 of 32) whether they
would pay or not. With `--timed` it goes, drafts pause where they do not pay, and times are printed.
With `--json` one JSON object goes to standard output; what a person reads goes to standard error.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.copying import copying
from engine import EngineConfig, LLMEngine, SamplingParams

REPOSITORY = Path(__file__).parents[1]
MODEL = REPOSITORY / ".tokenmill" / "models" / "smollm2-135m-instruct"
Counts = dict[str, int | float]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if not options.model.is_dir():
        sys.exit(f"no model in {options.model}: tokenmill models fetch {options.model.name}")
    found: dict[str, Any] = {}
    plain: dict[str, list[list[int]]] = {}
    num_different = 0
    for name, speculation in _kinds(options).items():
        engine = _engine(options, speculation)
        workloads = {
            "W1": json.loads(options.workload.read_text("utf-8"))["W1"],
            "copying": copying(engine.tokenizer),
        }
        for workload, asked in workloads.items():
            asked["requests"] = requests = asked["requests"][:: options.every]
            tokens, counts = _generated(engine, asked, timed=options.timed)
            same = [a == b for a, b in zip(tokens, plain.setdefault(workload, tokens), strict=True)]
            num_different += same.count(False)
            counts["same_tokens"] = same.count(True)
            found.setdefault(workload, {"requests": len(requests)})[name] = counts
            _say(f"{workload:8} {name:6} {_line(counts)}, {same.count(True)} of {len(same)} same")
        engine.close()
    if options.json:
        print(json.dumps({"model": options.model.name, "timed": options.timed, **found}))
    if num_different:
        sys.exit(f"{num_different} texts are not those without drafts")


def _kinds(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The engine's settings under each kind's name; without drafts first."""
    most = {"num_draft_tokens": options.num_draft_tokens}
    kinds = {"off": {"speculation": "off"}, "ngram": {"speculation": "ngram", **most}}
    if options.draft_model is not None:
        kinds["draft"] = {"speculation": "draft", "draft_model": str(options.draft_model), **most}
    return kinds


def _engine(options: argparse.Namespace, speculation: dict[str, Any]) -> LLMEngine:
    config = EngineConfig(
        model=str(options.model),
        dtype=options.dtype,
        device=options.device,
        num_threads=options.threads,
        max_num_seqs=options.seqs,
        max_num_batched_tokens=512,  # the same steps on every machine
        **speculation,
    )
    return LLMEngine(config, clock=time.perf_counter if options.timed else lambda: 0.0)


def _generated(
    engine: LLMEngine, workload: dict[str, Any], *, timed: bool
) -> tuple[list[list[int]], Counts]:
    """Tokens by request, and what the engine counted on the way."""
    before = engine.stats()
    started = time.perf_counter()
    ignore_eos = workload.get("ignore_eos", True)
    outputs = engine.generate(
        [request["prompt"] for request in workload["requests"]],
        [
            SamplingParams(max_tokens=request["max_tokens"], temperature=0, ignore_eos=ignore_eos)
            for request in workload["requests"]
        ],
    )
    seconds = time.perf_counter() - started
    after = engine.stats()
    steps, tokens, drawing, drafts, confirmed = (
        getattr(after, total) - getattr(before, total)
        for total in (
            "num_steps", "generated_tokens", "drawing_seqs", "draft_tokens", "confirmed_tokens",
        )
    )  # fmt: skip
    counts: Counts = {
        "steps": steps,
        "tokens": tokens,
        "drafts": drafts,
        "confirmed": confirmed,
        "acceptance": round(confirmed / max(1, drafts), 3),
        "tokens_per_step": round(tokens / drawing, 3),  # of a sequence
    }
    if timed:
        counts["wall_s"] = round(seconds, 3)
        counts["tokens_per_s"] = round(tokens / seconds, 1)
    return [list(output.completions[0].token_ids) for output in outputs], counts


def _line(counts: Counts) -> str:
    said = (
        f"{counts['tokens_per_step']:.2f} tokens a step, {counts['acceptance']:.1%} of "
        f"{counts['drafts']} drafts confirmed, {counts['steps']} steps"
    )
    return said + (f", {counts['tokens_per_s']} tokens/s" if "wall_s" in counts else "")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint folder")
    parser.add_argument("--draft-model", type=Path, help="folder; measure its drafts, too")
    parser.add_argument("--workload", type=Path, default=REPOSITORY / "bench" / "workload.json")
    parser.add_argument("--every", type=int, default=1, help="of so many requests one")
    parser.add_argument("--seqs", type=int, default=64, help="sequences in a step")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--timed", action="store_true", help="let drafts pause, and print times")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
