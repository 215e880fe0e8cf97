"""One section of the GPU bench, in a process of its own: what breaks its device ends it alone.

Rows go to a pipe as JSON, a line each, as soon as they are known.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
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
from bench.gpu_kernels import DRY, Row, Sizes, Timer, aimed_at, kernels_for, limits, timings
from bench.gpu_proofs import proofs
from engine.lifeline import heed_parent_alone


def rows_of(section: str, device: torch.device, given: dict[str, Any]) -> Iterator[Row]:
    """What a section finds. `given` is what it is to know: groups, a model, measured limits."""
    dry = device.type == "cpu"
    sizes = DRY if dry else Sizes()
    if section == "engine":
        yield from measure_model(given["model"], given["kind"], device, given["limits"])
        return
    if section == "generate_batch":
        yield generate_batch(device)
        return
    if section == "same texts":
        settings: dict[str, Any] = {"num_blocks": 40, "max_num_seqs": 8, "max_model_len": 128}
        yield from same_texts(TINY, device, **settings | ({"kernels": "reference"} if dry else {}))
        return
    kernels = kernels_for(device)
    with torch.inference_mode():
        if section == "proofs":
            yield from proofs(kernels, device, sizes, given["groups"])
            return
        timer = Timer(device, 3 if dry else 10)
        if section == "limits":
            yield dict(limits(timer, device, sizes))
            yield from aimed_at(kernels, timer, device, sizes)
        else:
            assert section == "kernels", section
            yield from timings(kernels, timer, device, sizes)


def measure_model(
    name: str, kind: str, device: torch.device, limit: dict[str, float]
) -> Iterator[Row]:
    dry = device.type == "cpu"
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
        if "copy_gb_s" in limit:
            read = checkpoint.bytes_read(kind)
            row["weights_at_copy_rate_ms"] = read / limit["copy_gb_s"] / 1e6
        yield row
    row = offline(engine, count, vocab, prompt, new)
    yield row
    rate = 0.5 * float(str(row["tokens_s"])) / new
    yield under_load(engine, rate, 0.2 if dry else 6.0, vocab, (prompt, new))


def generate_batch(device: torch.device) -> Row:
    """transformers' continuous batching on the same shape and load."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    dry = device.type == "cpu"
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section")
    parser.add_argument("--device", required=True)
    parser.add_argument("--rows-to", type=int, required=True, help="file descriptor")
    parser.add_argument("--given", type=json.loads, default={})
    args = parser.parse_args()
    heed_parent_alone()
    with os.fdopen(args.rows_to, "w") as out:
        try:
            for row in rows_of(args.section, torch.device(args.device), args.given):
                print(json.dumps(row), file=out, flush=True)
        except Exception as error:  # noqa: BLE001 (told of, and the other sections go on)
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"[:2000]}), file=out)


if __name__ == "__main__":
    main()
