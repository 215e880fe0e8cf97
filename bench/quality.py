"""What smaller weights, and a smaller KV cache, cost in quality: `python -m bench.quality`.

The model reads the prompts of workloads W1 and W3 (documentation of Python, 24,387 tokens), kept in
each way. Prints the perplexity, and at how many places the likeliest token is the one that it is
with all in float32.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

from bench.kept import kept_as
from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.outputs import TokenLogprobs
from engine.sampling_params import SamplingParams

REPOSITORY = Path(__file__).parents[1]
MODEL = REPOSITORY / ".tokenmill" / "models" / "smollm2-135m-instruct"
KEPT = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32 weights, int8 KV": "float32+int8",
    "int8 weights, float32 KV": "int8+float32",
    "int8 weights, float16 KV": "int8+float16",
    "int8 weights, int8 KV": "int8+int8",
}


def places(engine: LLMEngine, texts: list[list[int]]) -> Iterator[TokenLogprobs]:
    """Each token but a text's first, as the model sees it, text by text."""
    for output in engine.generate(texts, SamplingParams(max_tokens=0, prompt_logprobs=1)):
        for place in (output.prompt_logprobs or ())[1:]:
            assert place is not None
            yield place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--only", nargs="*", choices=KEPT.values(), help="beside float32")
    parser.add_argument("--every", type=int, default=1, help="of so many prompts one")
    options = parser.parse_args()
    workloads = json.loads((REPOSITORY / "bench" / "workload.json").read_text("utf-8"))
    texts = [each["prompt"] for name in ("W1", "W3") for each in workloads[name]["requests"]]
    texts = texts[:: options.every]
    likeliest: list[int] = []
    for name, kept in KEPT.items():
        if likeliest and options.only is not None and kept not in options.only:
            continue
        config = EngineConfig(model=str(options.model), **kept_as(kept))
        found = list(places(LLMEngine(config), texts))
        perplexity = math.exp(-sum(place.logprob for place in found) / len(found))
        tops = [place.top[0][0] for place in found]
        likeliest = likeliest or tops
        same = sum(x == y for x, y in zip(tops, likeliest, strict=True)) / len(tops)
        print(
            f"{name:24} perplexity {perplexity:.4f} over {len(found)} tokens; "
            f"the likeliest token is float32's at {100 * same:.2f} % of them",
            flush=True,
        )


if __name__ == "__main__":
    main()
