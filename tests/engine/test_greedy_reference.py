"""Greedy output of a real model equals Hugging Face transformers', token for token.

`cases/reference_greedy.json` holds what transformers' `generate` gave in float32 for 16 prompts,
one at a time, with its own cache: 64 ids each, end of sequence ignored. However the engine cuts,
mixes, caches and recomputes, it must give the same.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.model_runner import ModelRunner
from engine.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

REFERENCE = json.loads(
    (Path(__file__).parents[1] / "cases" / "reference_greedy.json").read_text("utf-8")
)
PROMPTS, EXPECTED = REFERENCE["prompts"], REFERENCE["outputs"]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
BLOCK_SIZE = 16
MARGIN = 0.01  # of log-probabilities: what rounding weights may turn


@pytest.fixture(scope="module")
def engine_of(smollm2_dir):
    """Builds engines that share one loaded model; each starts with an empty cache."""
    config = {"model": str(smollm2_dir), "dtype": "float32", "device": "cpu"}
    loaded = ModelRunner(EngineConfig(**config, block_size=BLOCK_SIZE, num_blocks=256))
    tokenizer = Tokenizer.load(smollm2_dir)

    def build(*, num_blocks=256, **options):
        runner = copy.copy(loaded)
        runner.num_blocks = num_blocks
        settings = EngineConfig(**config, block_size=BLOCK_SIZE, **options)
        return LLMEngine(settings, tokenizer=tokenizer, runner=runner)

    return build


def generate(engine, prompts):
    """Ids of each prompt's output, with the books checked after every step."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    ended = {}
    while engine.has_unfinished:
        for update in engine.step():
            if update.output is not None:
                (completion,) = update.output.completions
                ended[int(update.request_id)] = list(completion.token_ids)
        engine.check()
    return [ended[index] for index in range(len(prompts))]


def assert_equal(outputs, expected_ids=EXPECTED):
    assert len(outputs) == len(expected_ids)
    for index, (output, expected) in enumerate(zip(outputs, expected_ids, strict=True)):
        differing = [
            i for i, pair in enumerate(zip(output, expected, strict=True)) if len(set(pair)) > 1
        ]
        assert not differing, (
            f"prompt {index} differs from token {differing[0]} on, where the reference's margin is "
            f"{REFERENCE['margins'][index][differing[0]]}"
        )


def test_one_at_a_time(engine_of):
    engine = engine_of(max_num_seqs=1)
    assert_equal([generate(engine, [prompt])[0] for prompt in PROMPTS[:6]], EXPECTED[:6])
    assert engine.stats().peak_step_seqs == 1


def test_all_together_and_again_from_the_prefix_cache(engine_of):
    engine = engine_of()
    assert_equal(generate(engine, PROMPTS))
    first = engine.stats()
    assert first.peak_step_seqs == 16
    assert first.cached_tokens == 0
    assert_equal(generate(engine, PROMPTS))
    full_blocks = sum((len(prompt) - 1) // BLOCK_SIZE for prompt in PROMPTS)
    assert engine.stats().cached_tokens == full_blocks * BLOCK_SIZE


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs"), [pytest.param(7, 3, marks=pytest.mark.long), (64, 16)]
)
def test_in_chunks(engine_of, num_tokens, num_seqs):
    engine = engine_of(max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs)
    assert_equal(generate(engine, PROMPTS))


def test_without_a_prefix_cache(engine_of):
    engine = engine_of(enable_prefix_caching=False)
    assert_equal(generate(engine, PROMPTS))
    assert engine.stats().cached_tokens == 0


def test_with_so_few_blocks_that_sequences_are_preempted(engine_of):
    engine = engine_of(num_blocks=60)
    assert_equal(generate(engine, PROMPTS))
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("num_seqs", [pytest.param(1, marks=pytest.mark.long), 16])
def test_rounded_weights_part_from_it_only_where_two_tokens_are_as_likely(smollm2_dir, num_seqs):
    config = EngineConfig(
        model=str(smollm2_dir), device="cpu", dtype="float16", num_blocks=256,
        max_num_seqs=num_seqs,
    )  # fmt: skip
    texts = PROMPTS if num_seqs > 1 else PROMPTS[:4]
    for index, output in enumerate(generate(LLMEngine(config), texts)):
        pairs = enumerate(zip(output, EXPECTED[index], strict=True))
        first = next((place for place, (found, expected) in pairs if found != expected), None)
        assert first is None or REFERENCE["margins"][index][first] < MARGIN


def test_log_probabilities_of_a_real_model_are_float64_s(engine_of, smollm2_dir):
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float64).eval()
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, logprobs=20, prompt_logprobs=20)
    outputs = engine_of().generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (completion,) = output.completions
        ids = [*prompt, *completion.token_ids]
        with torch.inference_mode():
            expected = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        places = [*output.prompt_logprobs[1:], *completion.logprobs]
        assert len(places) == len(ids) - 1
        for place, row in zip(places, expected, strict=False):
            assert place.logprob == pytest.approx(float(row[place.token_id]), abs=1e-4)
            found = [score for _, score in place.top[:20]]
            assert found == pytest.approx(row.topk(20).values.tolist(), abs=1e-4)
            assert found == sorted(found, reverse=True)
