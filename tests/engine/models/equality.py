"""Whether a runner's numbers are transformers', however tokens are cut, packed and recomputed."""

import random

import torch

from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step_plan import ScheduledSequence

LENGTHS = (1, 5, 8, 29, 41)
LEAST_VOCAB = 151
BLOCK_SIZE = 4
NUM_BLOCKS = 40


def a_runner(folder, **settings):
    config = {"model": str(folder), "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    return ModelRunner(EngineConfig(**config | settings, device="cpu"))


def prompts(seed):
    draw = random.Random(seed)
    return [[draw.randrange(3, LEAST_VOCAB) for _ in range(length)] for length in LENGTHS]


@torch.inference_mode()
def logits_of(model, token_ids):
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def a_sequence(seq_id, block_table):
    return Sequence(
        seq_id=seq_id,
        request_id=str(seq_id),
        sample_index=0,
        token_ids=[],
        num_prompt_tokens=0,
        params=SamplingParams(max_tokens=1),
        seed=0,
        block_table=block_table,
    )


def check_logits_in_any_packing(model, runner, largest_chunk, *, atol=1e-4):
    """Prompts in chunks drawn at random, in random company, over blocks that held NaN."""
    draw = random.Random(largest_chunk)
    texts = prompts(largest_chunk)
    expected = [logits_of(model, text) for text in texts]
    for layer in runner.kv_cache.layers:
        # no number in any type: what another sequence left there must not matter
        layer.view(torch.uint8).fill_(0xFF)
    free = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    block_size = runner.kv_cache.shape.block_size
    sequences = [
        a_sequence(n, [free.pop() for _ in range(-(-len(text) // block_size))])
        for n, text in enumerate(texts)
    ]
    while any(s.num_tokens < len(t) for s, t in zip(sequences, texts, strict=True)):
        step = []
        for n in draw.sample(range(len(texts)), draw.randint(1, len(texts))):
            done, left = sequences[n].num_tokens, len(texts[n]) - sequences[n].num_tokens
            if left:
                chunk = draw.randint(1, min(largest_chunk, left))
                sequences[n].token_ids = texts[n][: done + chunk]
                step.append(ScheduledSequence(sequences[n], chunk))
        if not step:
            continue
        found = runner.logits(step)
        wanted = torch.stack([expected[r.sequence.seq_id][r.sequence.num_tokens - 1] for r in step])
        torch.testing.assert_close(found, wanted, rtol=0, atol=atol)
        for row in step:
            row.sequence.num_computed_tokens += row.num_scheduled_tokens


def a_scheduler(runner, **settings):
    return Scheduler(
        **{
            "num_blocks": NUM_BLOCKS,
            "block_size": runner.kv_cache.shape.block_size,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": runner.max_model_len,
        }
        | settings
    )


def run_all(scheduler, runner):
    while scheduler.unfinished:
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, runner.run(plan).tokens, 0.0)
        scheduler.check()
