"""What smaller weights cost in quality: `python -m bench.quality [MODEL_FOLDER]`.

The model reads the prompts of workloads W1 and W3 (documentation of Python, 24,387 tokens) with its
weights kept in each way. Prints the perplexity, and at how many places the likeliest token is the
one that it is with float32 weights.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.outputs import TokenLogprobs
from engine.sampling_params import SamplingParams

REPOSITORY = Path(__file__).parents[1]
MODEL = REPOSITORY / ".tokenmill" / "models" / "smollm2-135m-instruct"
KEPT: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"quantization": "int8"},
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
    model = str(parser.parse_args().model)
    workloads = json.loads((REPOSITORY / "bench" / "workload.json").read_text("utf-8"))
    texts = [each["prompt"] for name in ("W1", "W3") for each in workloads[name]["requests"]]
    likeliest: list[int] = []
    for name, kept in KEPT.items():
        found = list(places(LLMEngine(EngineConfig(model=model, **kept)), texts))
        perplexity = math.exp(-sum(place.logprob for place in found) / len(found))
        tops = [place.top[0][0] for place in found]
        likeliest = likeliest or tops
        same = sum(x == y for x, y in zip(tops, likeliest, strict=True)) / len(tops)
        print(
            f"{name:9} perplexity {perplexity:.4f} over {len(found)} tokens; "
            f"the likeliest token is float32's at {100 * same:.2f} % of them",
            flush=True,
        )


if __name__ == "__main__":
    main()
