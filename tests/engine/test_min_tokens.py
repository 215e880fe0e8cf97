"""Before `min_tokens`, what would end a generation is not drawn at all."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.sampler import SampledRow, sample

PROMPT = [5, 9, 13, 200, 77, 31]
MIN_TOKENS = 6


@pytest.fixture(scope="module")
def engine(tiny_llama_dir):
    return LLMEngine(EngineConfig(model=str(tiny_llama_dir), num_blocks=64, num_threads=1))


def generated(engine, **options):
    options = {"max_tokens": 12, "temperature": 0.0} | options
    (output,) = engine.generate([PROMPT], SamplingParams(**options))
    return list(output.completions[0].token_ids)


def test_a_banned_token_is_never_drawn_and_the_next_best_is():
    logits = torch.tensor([[0.0, 9.0, 5.0, 1.0]] * 2)
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    rows = [
        SampledRow(params=greedy, seed=0, position=0, banned=(1,)),
        SampledRow(params=greedy, seed=0, position=0),
    ]
    assert sample(logits, rows) == [2, 1]


def test_stop_ids_wait_for_min_tokens_and_are_not_in_the_output_before(engine):
    free = generated(engine, ignore_eos=True)
    stops = tuple(sorted(set(free)))  # greedy, and every token it would like to say stops it
    assert len(generated(engine, stop_token_ids=stops)) == 1
    held = generated(engine, stop_token_ids=stops, min_tokens=MIN_TOKENS)
    assert len(held) > MIN_TOKENS
    assert not set(held[:MIN_TOKENS]) & set(stops)


def test_it_is_what_hugging_face_does(engine, tiny_llama_dir):
    free = generated(engine, ignore_eos=True)
    stops = sorted({*free, *engine.tokenizer.eos_token_ids})
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()
    config = GenerationConfig(
        max_new_tokens=12, min_new_tokens=MIN_TOKENS, do_sample=False, eos_token_id=stops,
        pad_token_id=0,
    )  # fmt: skip
    expected = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        generation_config=config,
    )[0, len(PROMPT) :].tolist()
    held = generated(engine, stop_token_ids=tuple(stops), min_tokens=MIN_TOKENS)
    assert held == expected


def test_the_end_token_of_the_tokenizer_alone_waits_too(tiny_llama_dir, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, folder)
    plain = LLMEngine(EngineConfig(model=str(folder), num_blocks=64, num_threads=1))
    wanted = generated(plain, ignore_eos=True)[0]
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        config = json.loads(path.read_text()) | {"eos_token_id": 0}
        path.write_text(json.dumps(config))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"eos_token": plain.tokenizer.token(wanted)}
    path.write_text(json.dumps(config))
    engine = LLMEngine(EngineConfig(model=str(folder), num_blocks=64, num_threads=1))
    assert wanted in engine.tokenizer.eos_token_ids
    assert generated(engine) == [wanted]
    assert wanted not in generated(engine, min_tokens=MIN_TOKENS)[:MIN_TOKENS]
