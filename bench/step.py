"""Milliseconds of single steps of a model: so many decodes at one context, or a fresh prompt.

    python -m bench.step [MODEL_FOLDER] [--dtype int8]

Each line is the fastest and the median of nine steps. The same number of sequences at a context of
one block tells what is not attention. The last lines are what a step of 64 sequences takes outside
the model, greedy and at temperature 1: choosing tokens from logits and, in Python, the rest.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from bench.kept import kept_as
from engine.config import EngineConfig
from engine.layers.attention import AttentionMetadata
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams

MODEL = Path(__file__).parents[1] / ".tokenmill" / "models" / "smollm2-135m-instruct"
DECODES = ((1, 16), (1, 512), (16, 16), (16, 230), (64, 16), (64, 230))  # sequences, context
PROMPTS = (64, 256, 512)
ROUNDS = 9


@torch.inference_mode()
def milliseconds(runner: ModelRunner, query_lens: list[int], seq_lens: list[int]) -> list[float]:
    """Of each of some steps with these sequences, in random blocks of their own."""
    block_size, num_tokens = runner.kv_cache.shape.block_size, sum(query_lens)
    counts = [-(-length // block_size) for length in seq_lens]
    free = torch.randperm(runner.num_blocks)
    tables = torch.zeros((len(counts), max(counts)), dtype=torch.int32)
    slots, positions = [], []
    taken = 0
    for table, query_len, seq_len, count in zip(tables, query_lens, seq_lens, counts, strict=True):
        row = free[taken : taken + count]
        taken += count
        table[:count] = row
        at = torch.arange(seq_len - query_len, seq_len)
        positions.append(at)
        slots.append(row[at // block_size] * block_size + at % block_size)
    ends = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    metadata = AttentionMetadata(
        cu_query_lens=ends,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        slot_mapping=torch.cat(slots),
        block_tables=tables,
    )
    times = []
    for _ in range(ROUNDS):
        token_ids = torch.randint(0, runner.vocab_size, (num_tokens,))
        started = time.perf_counter()
        runner._model.forward(
            token_ids, torch.cat(positions), metadata, runner.kv_cache.layers, ends[1:].long() - 1
        )
        times.append((time.perf_counter() - started) * 1e3)
    return times


def milliseconds_outside(engine: LLMEngine, num_sequences: int, temperature: float) -> list[float]:
    """What each step of so many decodes takes outside the model's forward pass."""
    model = engine._runner._model  # type: ignore[attr-defined]
    forward, inside = model.forward, []

    def timed(*given: object) -> object:
        started = time.perf_counter()
        result = forward(*given)
        inside.append((time.perf_counter() - started) * 1e3)
        return result

    model.forward = timed
    params = SamplingParams(max_tokens=2 * ROUNDS, temperature=temperature, ignore_eos=True)
    for n in range(num_sequences):
        engine.add_request(str(n), [n + 1], params)
    times = []
    while engine.has_unfinished:
        started = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started) * 1e3 - inside[-1])
    model.forward = forward
    return times[1:-1]  # the first has the prompts, the last the outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument(
        "--dtype", default="auto", help="of weights and KV cache: int8, int8+int8, …"
    )
    options = parser.parse_args()
    engine = LLMEngine(EngineConfig(model=str(options.model), **kept_as(options.dtype)))
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    for count, context in DECODES:
        times = milliseconds(runner, [1] * count, [context] * count)
        print(f"{count:3d} decodes at {context:4d} tokens: ", end="")
        print(f"{min(times):7.1f} ms ({statistics.median(times):.1f})", flush=True)
    for length in PROMPTS:
        times = milliseconds(runner, [length], [length])
        print(f"a fresh prompt of {length:4d}:     ", end="")
        print(f"{min(times):7.1f} ms ({statistics.median(times):.1f})", flush=True)
    for temperature in (0.0, 1.0):
        times = milliseconds_outside(engine, 64, temperature)
        print(f" 64 decodes at temperature {temperature}, outside the model: ", end="")
        print(f"{min(times):7.2f} ms ({statistics.median(times):.2f})", flush=True)


if __name__ == "__main__":
    main()
