"""Log-probabilities against a float64 reference, in any company, cut, preempted and resumed."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.logprobs import token_logprobs
from engine.model_runner import ModelRunner
from engine.sequence import FinishReason
from engine.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [5, 9, 13, 200, 77, 31, 120, 14, 77, 31, 301, 62, 62, 18, 240, 99, 41, 6, 150, 151, 30]
CLOSE = {"abs": 1e-4}


@pytest.fixture(scope="module")
def reference(tiny_llama_dir):
    """log-probabilities [T - 1, vocab] float64 of each token's successor."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float64).eval()

    def logprobs(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(dim=-1)

    return logprobs


# blocks of 16 are what the compiled kernels take
@pytest.fixture(scope="module", params=[(12, 8), (5, 16)], ids=["plain", "compiled"])
def engine_of(request, tiny_llama_dir):
    tokenizer = Tokenizer.load(tiny_llama_dir)
    num_blocks, block_size = request.param
    common = {
        "model": str(tiny_llama_dir),
        "device": "cpu",
        "num_blocks": num_blocks,
        "block_size": block_size,
    }
    runner = ModelRunner(EngineConfig(**common))

    def build(**config):
        return LLMEngine(EngineConfig(**common | config), tokenizer=tokenizer, runner=runner)

    return build


def params(**options):
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | options)


def assert_scores(scores, token_ids, expected, num_top):
    """`scores` are of token_ids, whose distributions are the rows of `expected`."""
    assert [score.token_id for score in scores] == list(token_ids)
    for score, row in zip(scores, expected, strict=True):
        assert score.logprob == pytest.approx(row[score.token_id].item(), **CLOSE)
        assert score.rank == int((row > row[score.token_id]).sum()) + 1
        values, ids = row.topk(num_top)
        assert [token_id for token_id, _ in score.top] == ids.tolist()
        assert [value for _, value in score.top] == pytest.approx(values.tolist(), **CLOSE)


def assert_whole_output(output, reference, prompt=PROMPT, num_top=20, num_prompt_top=20):
    """All log-probabilities of prompt and samples are the reference's."""
    assert output.prompt_logprobs[0] is None
    for completion in output.completions:
        expected = reference([*prompt, *completion.token_ids])
        first = len(prompt) - 1
        assert_scores(completion.logprobs, completion.token_ids, expected[first:], num_top)
        assert_scores(output.prompt_logprobs[1:], prompt[1:], expected[:first], num_prompt_top)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.3, "seed": 3, "top_k": 40, "top_p": 0.9},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.4},
        {"logit_bias": ((7, 90.0),), "temperature": 0.8, "seed": 4},
        {"allowed_token_ids": (3, 250, 251), "min_tokens": 3},
    ],
    ids=str,
)
def test_they_are_of_the_models_own_distribution_whatever_the_options(
    engine_of, reference, options
):
    (output,) = engine_of().generate([PROMPT], params(logprobs=20, prompt_logprobs=20, **options))
    assert_whole_output(output, reference)


def test_none_are_made_unless_asked_for(engine_of):
    (output,) = engine_of().generate([PROMPT], params())
    assert output.prompt_logprobs is None
    assert output.completions[0].logprobs is None
    (output,) = engine_of().generate([PROMPT], params(logprobs=0))
    assert output.prompt_logprobs is None
    assert [score.top for score in output.completions[0].logprobs] == [()] * 8
    (output,) = engine_of().generate([PROMPT], params(prompt_logprobs=1))
    assert [len(score.top) for score in output.prompt_logprobs[1:]] == [1] * (len(PROMPT) - 1)
    assert output.completions[0].logprobs is None


@pytest.mark.parametrize("num_batched_tokens", [3, 7, 8, 512])
@pytest.mark.parametrize("num_scored", [1, 5, 10**6])
def test_a_prompt_may_be_cut_anywhere_and_scored_in_any_portions(
    engine_of, reference, num_batched_tokens, num_scored, monkeypatch
):
    monkeypatch.setattr("engine.llm_engine.max_num_scored_tokens", lambda vocab_size: num_scored)
    engine = engine_of(max_num_batched_tokens=num_batched_tokens)
    (output,) = engine.generate([PROMPT], params(logprobs=2, prompt_logprobs=3, max_tokens=3))
    assert engine.stats().num_steps >= 2 + len(PROMPT) // min(num_batched_tokens, num_scored + 1)
    assert_whole_output(output, reference, num_top=2, num_prompt_top=3)


def test_a_cached_prefix_is_computed_again_where_it_has_to_be_scored(engine_of, reference):
    engine = engine_of()
    engine.generate([PROMPT], params())
    (output,) = engine.generate([PROMPT], params(logprobs=20, prompt_logprobs=20))
    assert output.stats.cached_tokens == 0
    assert_whole_output(output, reference)
    (output,) = engine.generate([PROMPT], params(logprobs=20))
    assert output.stats.cached_tokens == 16
    expected = reference([*PROMPT, *output.completions[0].token_ids])[len(PROMPT) - 1 :]
    completion = output.completions[0]
    assert_scores(completion.logprobs, completion.token_ids, expected, 20)


def test_every_sample_has_its_own_and_one_scores_the_prompt(engine_of, reference):
    options = params(n=3, temperature=1.0, seed=6, logprobs=20, prompt_logprobs=20)
    (output,) = engine_of().generate([PROMPT], options)
    assert len({c.token_ids for c in output.completions}) == 3
    assert_whole_output(output, reference)


def crowd():
    """Requests that want different things of each other's steps."""
    for number in range(8):
        prompt = [10 + number, *PROMPT[: 9 + number]]
        logprobs = (None, 0, 4)[number % 3]
        prompt_logprobs = (None, 5)[number % 2]
        yield prompt, params(max_tokens=20, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def assert_crowd(outputs, reference):
    for (prompt, options), output in zip(crowd(), outputs, strict=True):
        (completion,) = output.completions
        assert completion.finish_reason is FinishReason.LENGTH
        expected = reference([*prompt, *completion.token_ids])
        first = len(prompt) - 1
        if options.logprobs is not None:
            assert_scores(
                completion.logprobs, completion.token_ids, expected[first:], options.logprobs
            )
        if options.prompt_logprobs is not None:
            assert_scores(output.prompt_logprobs[1:], prompt[1:], expected[:first], 5)


@pytest.mark.parametrize("num_batched_tokens", [9, 512])
def test_preemption_and_batch_mates_change_none(engine_of, reference, num_batched_tokens):
    engine = engine_of(max_num_batched_tokens=num_batched_tokens)
    outputs = engine.generate([p for p, _ in crowd()], [options for _, options in crowd()])
    assert engine.stats().num_preemptions > 0
    assert_crowd(outputs, reference)


@pytest.mark.parametrize("num_steps", [1, 6, 30])
def test_what_an_earlier_attempt_generated_is_scored_again(engine_of, reference, num_steps):
    first, second = engine_of(), engine_of(max_num_batched_tokens=16)
    for number, (prompt, options) in enumerate(crowd()):
        first.add_request(str(number), prompt, options)
    outputs = {}

    def step(engine):
        for update in engine.step():
            if update.output is not None:
                outputs[update.request_id] = update.output
        engine.check()

    for _ in range(num_steps):
        step(first)
    for number, (prompt, options) in enumerate(crowd()):
        if str(number) not in outputs:
            checkpoint = first.checkpoint(str(number))
            second.add_request(str(number), prompt, options, generated=checkpoint)
    while second.has_unfinished:
        step(second)
    assert_crowd([outputs[str(number)] for number in range(8)], reference)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 6}, FinishReason.LENGTH),
        ({"stop_token_ids": "last"}, FinishReason.STOP),
        ({"stop": "last"}, FinishReason.STOP),
    ],
)
def test_a_complete_checkpoint_is_scored_and_nothing_is_drawn(
    engine_of, reference, options, reason
):
    engine = engine_of()
    (free,) = engine.generate([PROMPT], params(max_tokens=6))
    token_ids = free.completions[0].token_ids
    if "stop_token_ids" in options:
        options = {"stop_token_ids": (token_ids[-1],)}
    if "stop" in options:
        options = {"stop": (free.completions[0].text[-1],)}
    asked = params(**{"max_tokens": 9, "logprobs": 3} | options)
    (whole,) = engine.generate([PROMPT], asked)
    (expected,) = whole.completions
    engine.add_request("again", PROMPT, asked, generated=[expected.token_ids])
    output = None
    while engine.has_unfinished:
        for update in engine.step():
            assert not update.deltas
            output = update.output
        engine.check()
    (completion,) = output.completions
    assert (completion.token_ids, completion.text) == (expected.token_ids, expected.text)
    assert (completion.finish_reason, completion.stop_reason) == (reason, expected.stop_reason)
    distributions = reference([*PROMPT, *token_ids])[len(PROMPT) - 1 :][: len(expected.token_ids)]
    assert_scores(completion.logprobs, completion.token_ids, distributions, 3)


def test_a_prompt_can_be_scored_with_nothing_generated(engine_of, reference):
    engine = engine_of(max_num_batched_tokens=8)
    scoring = params(max_tokens=0, prompt_logprobs=20)
    outputs = engine.generate([PROMPT, PROMPT[:1], PROMPT], [scoring, scoring, params()])
    for output in outputs[:2]:
        (completion,) = output.completions
        assert (completion.token_ids, completion.text) == ((), "")
        assert completion.finish_reason is FinishReason.LENGTH
    assert_scores(outputs[0].prompt_logprobs[1:], PROMPT[1:], reference(PROMPT), 20)
    assert outputs[1].prompt_logprobs == (None,)
    assert len(outputs[2].completions[0].token_ids) == 8
    total = sum(score.logprob for score in outputs[0].prompt_logprobs[1:])
    exact = reference(PROMPT).gather(1, torch.tensor(PROMPT[1:])[:, None]).sum().item()
    assert total == pytest.approx(exact, abs=1e-3)


def test_a_prompt_whose_logits_are_no_numbers_fails_alone(engine_of):
    engine = engine_of(max_num_batched_tokens=8)
    runner = engine._runner
    compute = runner.logits

    def logits(scheduled, before=None):
        found = compute(scheduled, before)
        sampling = sum(row.samples for row in scheduled)
        if sampling < len(found):
            found[sampling] = math.nan
        return found

    runner.logits = logits
    try:
        scored, plain = engine.generate([PROMPT, PROMPT], [params(prompt_logprobs=1), params()])
    finally:
        del runner.logits
    assert scored.completions[0].error.startswith("numerical_error: the logits for token 1 ")
    assert plain.completions[0].finish_reason is FinishReason.LENGTH


def test_a_token_that_cannot_be_has_minus_infinity():
    logits = torch.tensor([[0.0, -math.inf, 1.0]] * 2)
    impossible, certain = token_logprobs(logits, [1, 2], [0, 3])
    assert (impossible.logprob, impossible.rank, impossible.top) == (-math.inf, 3, ())
    assert (certain.rank, certain.top[2]) == (1, (1, -math.inf))
