"""Samples of one prompt hold its blocks once, and say what they would have said alone."""

import json
import random
import shutil

import pytest

from engine import EngineConfig, LLMEngine, SamplingParams
from tests.tiny_llama import VOCAB_SIZE

NUM_SAMPLES, PROMPT, OUTPUT, BLOCK = 16, 512, 64, 16


@pytest.fixture(scope="module")
def folder(tiny_llama_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("longer") / "model"
    shutil.copytree(tiny_llama_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = PROMPT + OUTPUT
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(folder, requests):
    """Completions of all requests together, and the most blocks held after a step."""
    engine = LLMEngine(
        EngineConfig(
            model=str(folder), device="cpu", block_size=BLOCK, num_blocks=640,
            max_num_seqs=NUM_SAMPLES, enable_prefix_caching=False,
        )
    )  # fmt: skip
    for request_id, prompt, params in requests:
        engine.add_request(request_id, prompt, params)
    outputs, peak = {}, 0
    while engine.has_unfinished:
        for update in engine.step():
            if update.output is not None:
                outputs[update.request_id] = update.output.completions
        engine.check()
        stats = engine.stats()
        peak = max(peak, stats.num_blocks - stats.num_free_blocks)
    return outputs, peak


def test_sixteen_samples_of_a_long_prompt_save_most_of_the_cache(folder, capsys):
    draw = random.Random(4)
    prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(PROMPT)]

    def params(n, seed=11):
        return SamplingParams(max_tokens=OUTPUT, n=n, seed=seed, ignore_eos=True)

    together, shared = run(folder, [("all", prompt, params(NUM_SAMPLES))])
    apart, separate = run(folder, [(str(i), prompt, params(1, 11 + i)) for i in range(NUM_SAMPLES)])
    saving = 1 - shared / separate
    with capsys.disabled():
        said = (
            f"{NUM_SAMPLES} samples in {shared} KV blocks, apart in {separate}: {saving:.0%} less"
        )
        print(f"\n{said}")  # noqa: T201
    # the block with the prompt's last token is written by each; all before it are held once
    assert shared <= PROMPT // BLOCK - 1 + NUM_SAMPLES * (1 + OUTPUT // BLOCK)
    assert separate >= NUM_SAMPLES * PROMPT // BLOCK
    assert saving >= 0.55
    # sample i of a request is what a lone request with the seed + i has
    for i, completion in enumerate(together["all"]):
        assert apart[str(i)][0].token_ids == completion.token_ids
        assert apart[str(i)][0].text == completion.text
    assert len({completion.token_ids for completion in together["all"]}) == NUM_SAMPLES
