"""Which type the KV cache has, and that a cache in 8 bits changes nothing but the last digits."""

import math
import random

import pytest
import torch

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.kernels.cpu.pairs import HAS_PAIRS
from engine.models.packing import cache_dtype
from engine.step_plan import ScheduledSequence
from tests.engine.models.checkpoints import write_checkpoint
from tests.engine.models.equality import a_runner, a_sequence, logits_of, prompts
from tests.engine.models.families import TIER_2, write
from tests.tiny_llama import VOCAB_SIZE

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
MAX_TOKENS = 40


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, torch.float32),
        ({"quantization": "int8"}, torch.bfloat16 if HAS_PAIRS else torch.float16),
        ({"quantization": "int8", "dtype": "bfloat16"}, torch.bfloat16),
        ({"quantization": "int8", "kv_cache_dtype": "float32"}, torch.float32),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "float16", "kv_cache_dtype": "int8"}, torch.int8),
        ({"kv_cache_dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_which_type_it_has(settings, kept):
    config = EngineConfig(model="m", **settings)
    computed = getattr(torch, config.dtype, torch.float32)
    assert cache_dtype(config, CPU, computed) == kept


def test_on_a_gpu_it_has_the_models_type_or_8_bits(monkeypatch):
    for settings in ({"kv_cache_dtype": "bfloat16"}, {"quantization": "int8"}):
        config = EngineConfig(model="m", **settings)
        assert cache_dtype(config, GPU, torch.bfloat16) == torch.bfloat16
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name, kept in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        config = EngineConfig(model="m", kv_cache_dtype=name)
        assert cache_dtype(config, GPU, torch.bfloat16) == kept
    capability = (8, 6)
    with pytest.raises(ValueError, match=r"fp8 needs a GPU of compute capability 8\.9"):
        cache_dtype(config, GPU, torch.bfloat16)
    with pytest.raises(ValueError, match="kv_cache_dtype fp8 needs a GPU"):
        cache_dtype(config, CPU, torch.float32)
    config = EngineConfig(model="m", kv_cache_dtype="float16")
    with pytest.raises(ValueError, match="kv_cache_dtype float16 needs a CPU: on cuda:0"):
        cache_dtype(config, GPU, torch.bfloat16)


def test_as_much_memory_holds_more_blocks(tiny_llama_dir):
    blocks = {
        name: a_runner(
            tiny_llama_dir, block_size=16, num_blocks=None, kv_cache_bytes=1 << 20,
            kv_cache_dtype=name,
        ).num_blocks
        for name in ("float32", "float16", "int8")
    }  # fmt: skip
    of_a_token = 2 * 2 * 2 * 16  # layers, heads, key and value, numbers
    assert blocks["float32"] == (1 << 20) // (16 * of_a_token * 4)
    assert blocks["float16"] == 2 * blocks["float32"]
    assert blocks["int8"] == (1 << 20) // (16 * of_a_token * 20 // 16)


@pytest.mark.parametrize("family", ["llama", "mistral, window of 11", "qwen3"])
def test_compiled_kernels_keep_in_8_bits_what_the_reference_does(tmp_path, family):
    model = write_checkpoint(family, tmp_path)
    text = prompts(1)[-1]
    expected = logits_of(model, text)[-1]
    reference, compiled = (
        logits_alone(
            a_runner(tmp_path, kv_cache_dtype="int8", block_size=16, kernels=kernels), text
        )
        for kernels in ("reference", "auto")
    )
    # a number that lies between two steps may be kept as either: sums end in other digits
    torch.testing.assert_close(compiled, reference, rtol=0, atol=5e-4)
    assert 0.001 < (compiled - expected).abs().max() < 0.2


# soft caps and windows, sinks, values that are smaller than keys
@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_models_of_transformers_take_it_too(tmp_path, model_type):
    model = write(model_type, tmp_path, **TIER_2[model_type], initializer_range=0.05)
    runner = a_runner(tmp_path, kv_cache_dtype="int8")
    assert {layer.dtype for layer in runner.kv_cache.layers} == {torch.int8}
    text = prompts(1)[-1]
    expected = logits_of(model, text)[-1]
    assert 0 < (logits_alone(runner, text) - expected).abs().max() < 0.1 * expected.std()


def logits_alone(runner, text):
    sequence = a_sequence(0, list(range(-(-len(text) // runner.kv_cache.shape.block_size))))
    sequence.token_ids = text
    return runner.logits([ScheduledSequence(sequence, len(text))])[0]


def requests(draw):
    """Prompts of which many begin alike, and some are sampled thrice."""
    story = [draw.randrange(3, VOCAB_SIZE) for _ in range(300)]
    for seed in range(18):
        own = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(1, 9))]
        prompt = story[: draw.choice((0, 15, 40, 40, 270))] + own
        yield prompt, SamplingParams(
            max_tokens=MAX_TOKENS, seed=seed, n=draw.choice((1, 1, 3)), ignore_eos=True,
            temperature=draw.choice((0.0, 1.0)), logprobs=1,
        )  # fmt: skip


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_alone_together_in_chunks_forked_and_preempted_the_tokens_are_the_same(
    tiny_llama_dir, quantization
):
    def engine(**config):
        return LLMEngine(
            EngineConfig(
                model=str(tiny_llama_dir), device="cpu", kv_cache_dtype="int8", num_threads=1,
                quantization=quantization, **config,
            )
        )  # fmt: skip

    asked = list(requests(random.Random(1)))
    lone = engine(num_blocks=64, enable_prefix_caching=False)
    alone = [lone.generate([prompt], params)[0] for prompt, params in asked]
    for config in (
        {"num_blocks": 30, "max_num_batched_tokens": 23},
        {"num_blocks": 640},
    ):
        crowd = engine(**config)
        prompts, params = zip(*asked, strict=True)
        together = crowd.generate(list(prompts), list(params))
        for output, expected in zip(together, alone, strict=True):
            for found, wanted in zip(output.completions, expected.completions, strict=True):
                assert found.token_ids == wanted.token_ids
                assert scores(found) == pytest.approx(scores(wanted), abs=1e-5)
        assert (crowd.stats().num_preemptions > 0) == (config["num_blocks"] == 30)
        assert crowd.stats().cached_tokens > 0


def scores(completion):
    return [score.logprob for score in completion.logprobs]


def test_greedy_tokens_are_float32s_but_where_two_are_nearly_as_likely(tiny_llama_dir):
    """What float32 has generated, read by both: how likely each of its tokens was, and the best."""
    draw = random.Random(2)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 17, 60, 300)]
    engines = [
        LLMEngine(
            EngineConfig(
                model=str(tiny_llama_dir), device="cpu", kv_cache_dtype=name, num_blocks=99
            )
        )
        for name in ("float32", "int8")
    ]
    greedy = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    texts = [
        prompt + list(output.completions[0].token_ids)
        for prompt, output in zip(prompts, engines[0].generate(prompts, greedy), strict=True)
    ]
    read = SamplingParams(max_tokens=0, prompt_logprobs=2)
    exact, rounded = (
        [score for output in engine.generate(texts, read) for score in output.prompt_logprobs[1:]]
        for engine in engines
    )
    off = [a.logprob - b.logprob for a, b in zip(exact, rounded, strict=True)]
    assert 0 < math.sqrt(sum(x * x for x in off) / len(off)) < 0.02
    for a, b in zip(exact, rounded, strict=True):
        (best, first), (_, second) = a.top
        assert best == b.top[0][0] or first - second < 0.2
