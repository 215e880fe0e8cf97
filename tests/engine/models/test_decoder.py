"""Logits of each family against transformers, however the tokens are cut and packed."""

import random

import pytest
import torch

from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step_plan import ScheduledSequence
from tests.engine.models.checkpoints import CONFIGS, VOCAB_SIZE, write_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 5, 8, 29, 41)
BLOCK_SIZE = 4
NUM_BLOCKS = 40


@pytest.fixture(scope="module", params=CONFIGS)
def models(request, tmp_path_factory):
    """The same model in transformers and here."""
    folder = tmp_path_factory.mktemp("checkpoint")
    expected = write_checkpoint(request.param, folder)
    runner = ModelRunner(
        EngineConfig(model=str(folder), device="cpu", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    )
    return expected, runner


def prompts(seed):
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@torch.inference_mode()
def logits_of(model, token_ids):
    return model(torch.tensor([token_ids])).logits[0]


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


@pytest.mark.parametrize("largest_chunk", [4, 100])
def test_logits_equal_transformers_in_any_packing(models, largest_chunk):
    model, runner = models
    draw = random.Random(largest_chunk)
    texts = prompts(largest_chunk)
    expected = [logits_of(model, text) for text in texts]
    for layer in runner.kv_cache.layers:
        layer.fill_(torch.nan)  # what another sequence left there must not matter
    free = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sequences = [
        a_sequence(n, [free.pop() for _ in range(-(-len(text) // BLOCK_SIZE))])
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
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        for row in step:
            row.sequence.num_computed_tokens += row.num_scheduled_tokens


def run_all(scheduler, runner):
    while scheduler.unfinished:
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, runner.run(plan), 0.0)
        scheduler.check()


def a_scheduler(runner, **settings):
    return Scheduler(
        **{
            "num_blocks": NUM_BLOCKS,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": runner.max_model_len,
        }
        | settings
    )


@pytest.mark.parametrize(
    ("num_blocks", "num_batched_tokens", "prefix_caching"),
    [(NUM_BLOCKS, 9, True), (15, 9, True), (15, 100, False)],
)
def test_greedy_tokens_equal_transformers_with_and_without_preemption(
    models, num_blocks, num_batched_tokens, prefix_caching
):
    model, runner = models
    texts = prompts(3)
    texts[3] = texts[4][:17]  # two that share a prefix
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    scheduler = a_scheduler(
        runner,
        num_blocks=num_blocks,
        max_num_batched_tokens=num_batched_tokens,
        enable_prefix_caching=prefix_caching,
    )
    sequences = [scheduler.add(str(n), t, params, seed=0)[0] for n, t in enumerate(texts)]
    run_all(scheduler, runner)
    assert (scheduler.num_preemptions > 0) == (num_blocks < NUM_BLOCKS)
    for sequence, text in zip(sequences, texts, strict=True):
        assert sequence.num_generated_tokens == 10
        logits = logits_of(model, sequence.token_ids)[len(text) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(sequence.generated_ids).unsqueeze(1)).squeeze(1)
        assert (logits.amax(dim=1) - chosen).max() < 1e-4


def test_samples_of_one_prompt_differ_and_come_again_when_resumed(models):
    _, runner = models
    text = prompts(4)[4]
    params = SamplingParams(max_tokens=8, n=3, temperature=0.8, ignore_eos=True)
    scheduler = a_scheduler(runner, num_blocks=30)
    together = scheduler.add("together", text, params, seed=9)
    scheduler.add("beside", prompts(5)[3], params, seed=1)
    run_all(scheduler, runner)
    assert len({tuple(s.generated_ids) for s in together}) == 3
    scheduler = a_scheduler(runner, enable_prefix_caching=False)
    resumed = scheduler.add(
        "resumed", text, params, seed=9, generated=[s.generated_ids[:4] for s in together]
    )
    run_all(scheduler, runner)
    assert [s.generated_ids for s in resumed] == [s.generated_ids for s in together]
