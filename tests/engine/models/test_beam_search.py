"""Beam search in the engine against transformers' own, however beams are packed and preempted.

`cases/group_beams.json` holds what `generate` of transformers 4 gave in float32 for several groups
of beams, one prompt at a time, under our names of its options; the id that it pads ended groups
with was made unlikely. Every family is searched in test_decoder.py and test_hf_decoder.py.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import EngineConfig, LLMEngine, SamplingParams
from tests.conftest import REPOSITORY
from tests.engine.models.beams import (
    EOS,
    TEXTS,
    WAYS,
    beams_of,
    texts_in_one_batch,
    texts_of_groups,
    texts_of_transformers,
)
from tests.engine.models.checkpoints import write_checkpoint
from tests.engine.models.equality import a_runner, a_scheduler, run_all

GROUPS = json.loads((REPOSITORY / "tests" / "cases" / "group_beams.json").read_text("utf-8"))
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(
    scope="module",
    params=["llama", "qwen2", "mistral, window of 11"],
    ids=["llama", "qwen2", "mistral"],
)
def models(request, tmp_path_factory):
    """The same model in transformers and here; its end comes often."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = write_checkpoint(request.param, folder)
    return model, a_runner(folder, num_blocks=200)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_texts_are_those_of_transformers(models, length_penalty, early_stopping):
    model, runner = models
    params = beams_of(length_penalty, early_stopping)
    found = texts_in_one_batch(runner, [(text, params) for text in TEXTS])
    assert found == [texts_of_transformers(model, text, params) for text in TEXTS]


def test_a_length_penalty_shows(models):
    _, runner = models
    short, long = (
        texts_in_one_batch(runner, [(text, beams_of(length_penalty, False)) for text in TEXTS])
        for length_penalty in (-1.0, 2.0)
    )
    assert num_tokens(short) < num_tokens(long)


def num_tokens(found):
    return sum(len(text) for texts in found for text in texts)


@pytest.mark.parametrize(
    ("num_blocks", "num_batched_tokens", "prefix_caching"),
    [(90, 9, True), (45, 16, False), (40, 64, True)],
)
def test_neither_company_nor_a_lack_of_blocks_changes_a_text(
    models, num_blocks, num_batched_tokens, prefix_caching
):
    model, runner = models
    params = SamplingParams(max_tokens=8, num_beams=4, n=3, ignore_eos=True)
    plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    scheduler = a_scheduler(
        runner,
        num_blocks=num_blocks,
        max_num_seqs=12,
        max_num_batched_tokens=num_batched_tokens,
        enable_prefix_caching=prefix_caching,
    )
    places = [scheduler.add(str(n), text, params, seed=0) for n, text in enumerate(TEXTS)]
    alone = [scheduler.add(f"plain {n}", text, plain, seed=0)[0] for n, text in enumerate(TEXTS)]
    for _ in range(6):
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, runner.run(plan).tokens, 0.0)
        scheduler.check()
    urgent = [
        scheduler.add(f"urgent {n}", text, plain, seed=0, priority=1)[0]
        for n, text in enumerate(TEXTS)
    ]
    run_all(scheduler, runner)
    assert scheduler.num_preemptions > 0
    for n, (text, group) in enumerate(zip(TEXTS, places, strict=True)):
        wanted = texts_of_transformers(model, text, params)
        assert [place.generated_ids for place in group[:3]] == wanted
        assert alone[n].generated_ids == urgent[n].generated_ids


@pytest.mark.parametrize(
    ("options", "transformers_options"),
    [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        (
            {"min_tokens": 5, "logit_bias": ((EOS, 6.0),)},
            {"min_new_tokens": 5, "sequence_bias": [[[EOS], 6.0]]},
        ),
    ],
)
def test_options_act_on_each_beam_by_its_own_tokens(models, options, transformers_options):
    model, runner = models
    params = SamplingParams(max_tokens=10, num_beams=4, n=4, **options)
    for text in TEXTS:
        (found,) = texts_in_one_batch(runner, [(text, params)])
        assert found == texts_of_transformers(model, text, params, **transformers_options)


def test_the_penalty_of_other_groups_comes_off_after_all_other_options(models):
    model, runner = models
    options = {"num_beam_groups": 2, "repetition_penalty": 1.7}
    for diversity_penalty in (0.3, 0.6, 1.0, 1.5):
        params = beams_of(1.0, False, **options, diversity_penalty=diversity_penalty)
        (found,) = texts_in_one_batch(runner, [(TEXTS[0], params)])
        assert found == texts_of_groups(model, TEXTS[0], params)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    config = {"model": str(smollm2_dir), "dtype": "float32", "device": "cpu", "num_blocks": 192}
    return LLMEngine(EngineConfig(**config))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_models_texts_are_those_of_transformers(smollm2, smollm2_dir):
    prompts = ("The three largest cities of France are", "def fibonacci(n):\n")
    prompts = [smollm2.tokenizer.encode(prompt) for prompt in prompts]
    stop_ids = (28, 30, 198)  # of ",", "." and a new line: its own end is far away
    requests = [
        (prompt, beams_of(*way, max_tokens=16, stop_token_ids=stop_ids))
        for prompt in prompts
        for way in WAYS
    ]
    outputs = smollm2.generate(*zip(*requests, strict=True))
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    for request, output in zip(requests, outputs, strict=True):
        found = [list(choice.token_ids) for choice in output.completions]
        assert found == texts_of_transformers(model, *request)


def check_recorded_groups(engine, cases):
    requests = []
    for case in cases:
        options = dict(case["options"])
        options["stop_token_ids"] = tuple(options.get("stop_token_ids", ()))
        options["logit_bias"] = tuple(map(tuple, options.get("logit_bias", ())))
        requests.append((case["prompt"], SamplingParams(**options)))
    outputs = engine.generate(*zip(*requests, strict=True))
    for case, (_, params), output in zip(cases, requests, outputs, strict=True):
        stop_ids = params.stop_ids(frozenset({EOS}))
        found = [list(choice.token_ids) for choice in output.completions]
        # transformers 4 wrote the first of the ids for whichever of them ended a text
        found = [[EOS if token_id in stop_ids else token_id for token_id in text] for text in found]
        assert found == case["texts"], case["options"]


def test_groups_find_what_transformers_4_found(tiny_llama_dir):
    config = {"model": str(tiny_llama_dir), "device": "cpu", "num_blocks": 200}
    check_recorded_groups(LLMEngine(EngineConfig(**config)), GROUPS["tiny_llama"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_groups_of_a_real_model_find_what_transformers_4_found(smollm2):
    check_recorded_groups(smollm2, GROUPS["smollm2"])
