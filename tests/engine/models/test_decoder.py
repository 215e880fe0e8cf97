"""Logits of each family against transformers, however the tokens are cut and packed."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from engine.models.decoder import Decoder
from engine.models.packed_decoder import PackedDecoder
from engine.sampling_params import SamplingParams
from tests.engine.models.beams import check_beams
from tests.engine.models.checkpoints import CONFIGS, write_checkpoint
from tests.engine.models.equality import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    a_runner,
    a_scheduler,
    check_logits_in_any_packing,
    logits_of,
    prompts,
    run_all,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(
    scope="module",
    params=[
        (name, model)
        for name in CONFIGS
        for model in (Decoder, PackedDecoder)
        if model is Decoder or "moe" not in name  # compiled kernels have no experts
    ],
    ids=lambda param: f"{param[0]}: {param[1].__name__}",
)
def models(request, tmp_path_factory):
    """The same model in transformers and here, in plain PyTorch and by compiled kernels."""
    name, model = request.param
    folder = tmp_path_factory.mktemp("checkpoint")
    expected = write_checkpoint(name, folder)
    plain = model is Decoder
    runner = a_runner(
        folder, kernels="reference" if plain else "auto", block_size=BLOCK_SIZE if plain else 16
    )
    assert isinstance(runner._model, model)
    return expected, runner


@pytest.mark.parametrize("largest_chunk", [4, 100])
def test_logits_equal_transformers_in_any_packing(models, largest_chunk):
    check_logits_in_any_packing(*models, largest_chunk)


@pytest.mark.parametrize(
    ("scarce", "num_batched_tokens", "prefix_caching"),
    [(False, 9, True), (True, 9, True), (True, 100, False)],
)
def test_greedy_tokens_equal_transformers_with_and_without_preemption(
    models, scarce, num_batched_tokens, prefix_caching
):
    model, runner = models
    # scarce: hardly more than the longest one needs
    num_blocks = {4: 16, 16: 5}[runner.kv_cache.shape.block_size] if scarce else NUM_BLOCKS
    texts = prompts(3)
    texts[3] = texts[4][:17]  # two that share a prefix
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    scheduler = a_scheduler(
        runner,
        num_blocks=num_blocks,
        max_num_batched_tokens=num_batched_tokens,
        enable_prefix_caching=prefix_caching,
    )
    sequences = [scheduler.add(str(n), t, params, seed=0)[0] for n, t in enumerate(texts)]
    run_all(scheduler, runner)
    assert (scheduler.num_preemptions > 0) == scarce
    for sequence, text in zip(sequences, texts, strict=True):
        assert sequence.num_generated_tokens == 20
        logits = logits_of(model, sequence.token_ids)[len(text) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(sequence.generated_ids).unsqueeze(1)).squeeze(1)
        assert (logits.amax(dim=1) - chosen).max() < 1e-4


def test_beams_find_the_texts_that_transformers_finds(models):
    check_beams(*models)


def test_experts_are_read_from_one_tensor_each_too(tmp_path):
    model = write_checkpoint("qwen3_moe", tmp_path)
    model.save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.gate_up_proj" in file.keys()  # noqa: SIM118
    check_logits_in_any_packing(model, a_runner(tmp_path), largest_chunk=13)


def test_a_scaled_embedding_and_norms_of_weight_and_1_are_rounded_as_in_transformers(tmp_path):
    write_checkpoint("gemma3, windows of 9 in two of three layers", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = a_runner(tmp_path, dtype="bfloat16", kernels="reference")._model
    token_ids = torch.arange(200)
    with torch.inference_mode():
        vectors = model.model.embed_tokens(token_ids)
        assert torch.equal(found.embedding(token_ids), vectors)
        assert torch.equal(found.norm(vectors), model.model.norm(vectors))


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
