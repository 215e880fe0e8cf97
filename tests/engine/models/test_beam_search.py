"""Beam search in the engine against transformers' own, however beams are packed and preempted."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import EngineConfig, LLMEngine, SamplingParams
from tests.engine.models.checkpoints import write_checkpoint
from tests.engine.models.equality import a_runner, a_scheduler, run_all

EOS = 2
TEXTS = ([5, 9, 17, 40, 3], [8, 100, 7] * 9, [11, 60, 61, 62, 63, 64, 65, 66, 120])
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


@torch.inference_mode()
def texts_of_transformers(model, prompt, params, **options):
    """The generated ids of each text, best first."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=params.num_beams,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        **{"eos_token_id": EOS, "pad_token_id": 1} | options,
    )
    return [to_its_end(row[len(prompt) :].tolist()) for row in found]


def to_its_end(token_ids):
    """Without the padding behind it."""
    return token_ids[: token_ids.index(EOS) + 1] if EOS in token_ids else token_ids


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_texts_are_those_of_transformers(models, length_penalty, early_stopping):
    model, runner = models
    bias = 4.0
    params = SamplingParams(
        max_tokens=9,
        num_beams=4,
        n=4,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        logit_bias=((EOS, bias),),
    )
    scheduler = a_scheduler(runner, num_blocks=200, max_num_seqs=16, eos_token_ids=frozenset({EOS}))
    places = [scheduler.add(str(n), text, params, seed=0) for n, text in enumerate(TEXTS)]
    run_all(scheduler, runner)
    for text, group in zip(TEXTS, places, strict=True):
        wanted = texts_of_transformers(model, text, params, sequence_bias=[[[EOS], bias]])
        assert [place.generated_ids for place in group] == wanted


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
        wanted = texts_of_transformers(model, text, params, eos_token_id=None)
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
        ({"stop_token_ids": (31, 90, 77)}, {"eos_token_id": [EOS, 31, 90, 77]}),
    ],
)
def test_options_act_on_each_beam_by_its_own_tokens(models, options, transformers_options):
    model, runner = models
    params = SamplingParams(max_tokens=10, num_beams=4, n=4, **options)
    scheduler = a_scheduler(runner, num_blocks=200, max_num_seqs=16, eos_token_ids=frozenset({EOS}))
    for n, text in enumerate(TEXTS):
        places = scheduler.add(str(n), text, params, seed=0)
        run_all(scheduler, runner)
        wanted = texts_of_transformers(model, text, params, **transformers_options)
        assert [place.generated_ids for place in places] == wanted


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_real_models_texts_are_those_of_transformers(smollm2_dir):
    prompts = ("The three largest cities of France are", "def fibonacci(n):\n")
    params = SamplingParams(max_tokens=16, num_beams=4, n=4)
    config = EngineConfig(model=str(smollm2_dir), dtype="float32", device="cpu", num_blocks=64)
    engine = LLMEngine(config)
    outputs = engine.generate(prompts, params)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        prompt_ids = engine.tokenizer.encode(prompt)
        wanted = texts_of_transformers(model, prompt_ids, params, eos_token_id=EOS, pad_token_id=0)
        assert [list(choice.token_ids) for choice in output.completions] == wanted
