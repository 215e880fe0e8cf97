"""Values at which engines have died, each in a batch that must not notice; a tiny real engine."""

import pytest
import torch

from bench.neighbours import HOSTILE
from engine import EngineConfig, LLMEngine, ParameterError, SamplingParams
from engine.sampler import SampledRow, sample
from engine.sampling_params import MAX_SCORES
from engine.sequence import FinishReason
from engine.structured_outputs import StructuredOutputs

PROMPT = "the quick brown"
ALWAYS = SamplingParams(max_tokens=6, seed=3)


@pytest.fixture(scope="module")
def engine(tiny_llama_dir):
    return LLMEngine(EngineConfig(model=str(tiny_llama_dir), num_threads=1, num_blocks=256))


@pytest.fixture(autouse=True)
def _the_engine_lives(engine):
    """Before and after: the same request has the same output, and the books balance."""
    before = engine.generate([PROMPT], ALWAYS)[0].completions
    yield
    engine.check()
    assert not engine.has_unfinished
    assert engine.generate([PROMPT], ALWAYS)[0].completions == before


def texts(engine, *params, prompt=PROMPT):
    outputs = engine.generate([prompt] * len(params), list(params))
    for output in outputs:
        for completion in output.completions:
            assert completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert completion.token_ids
    return [output.completions[0].token_ids for output in outputs]


def asking(**options):
    return SamplingParams(**{"max_tokens": 12, "seed": 4, "ignore_eos": True} | options)


@pytest.mark.parametrize("token_id", [-1, 384, 2**31, 2**63, 1.0, True, None])
def test_a_token_id_that_is_none_is_refused(engine, token_id):
    for prompt in ([token_id], [5, token_id, 6]):
        with pytest.raises(ParameterError, match=r"\[0, 384\)") as refused:
            engine.add_request("bad", prompt, ALWAYS)
        assert refused.value.param == "prompt"


@pytest.mark.parametrize("token_id", [384, 2**31 - 1])
def test_a_bias_beyond_the_vocabulary_is_refused(engine, token_id):
    with pytest.raises(ParameterError) as refused:
        engine.add_request("bad", PROMPT, asking(logit_bias=((token_id, 1.0),)))
    assert refused.value.param == "logit_bias"


@pytest.mark.parametrize("bias", [1e308, float("nan"), float("-inf"), -100.1])
def test_a_bias_that_is_no_number_or_too_large_is_refused(bias):
    with pytest.raises(ParameterError, match=r"\[-100, 100\]"):
        asking(logit_bias=((5, bias),))
    with pytest.raises(ParameterError, match="at most 1024, got 100000"):
        asking(logit_bias=tuple((i, 0.0) for i in range(100_000)))


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(engine, prompt):
    with pytest.raises(ParameterError, match="at least 1 token, got 0"):
        engine.add_request("bad", prompt, ALWAYS)
    with pytest.raises(ParameterError, match="at least 1 message"):
        engine.add_request("bad", messages=[], params=ALWAYS)


@pytest.mark.parametrize("prompt", [" ", "\n", "\t \n ", "\u00a0"])
def test_white_space_is_a_prompt_like_any_other(engine, prompt):
    texts(engine, asking(), prompt=prompt)
    chat = [{"role": "user", "content": prompt}]
    engine.add_request("chat", messages=chat, params=asking())
    ended = []
    while engine.has_unfinished:
        ended += [update.output for update in engine.step() if update.output is not None]
    assert [each.completions[0].finish_reason for each in ended] == [FinishReason.LENGTH]


@pytest.mark.parametrize("temperature", [0.0, -0.0, 5e-324, 1e-7, 9.9e-5])
def test_a_temperature_of_next_to_nothing_is_greedy(engine, temperature):
    greedy, cold = texts(
        engine, asking(temperature=0.0), asking(temperature=temperature, top_p=0.9, seed=9)
    )
    assert cold == greedy


def test_the_lowest_temperature_that_is_not_greedy_and_the_highest_say_something(engine):
    greedy, cold, hot = texts(
        engine, asking(temperature=0.0), asking(temperature=1e-4), asking(temperature=2.0)
    )
    assert cold == greedy
    assert hot != greedy
    with pytest.raises(ParameterError, match=r"\[0, 2\]"):
        asking(temperature=1e6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-4, 1.0, 2.0])
def test_logits_at_the_ends_of_half_precision_give_a_token(dtype, temperature):
    logits = torch.tensor([[-65504.0, 65504.0, 3.0], [1e-7, 0.0, -1e-7], [-65504.0] * 3])
    params = SamplingParams(max_tokens=1, temperature=temperature, top_p=0.9)
    rows = [SampledRow(params=params, seed=1, position=i) for i in range(3)]
    tokens = sample(logits.to(dtype), rows)
    assert tokens[0] == 1
    assert all(token in (0, 1, 2) for token in tokens)


@pytest.mark.parametrize(
    "options", [{"top_p": 1e-9}, {"top_p": 5e-324}, {"top_k": 1}, {"min_p": 1.0}]
)
def test_the_narrowest_filter_leaves_the_likeliest_token(engine, options):
    greedy, narrow = texts(engine, asking(temperature=0.0), asking(**options))
    assert narrow == greedy


@pytest.mark.parametrize(
    "options", [{"top_p": 1.0}, {"top_k": 0}, {"top_k": -1}, {"top_k": 2**31 - 1}, {"min_p": 0.0}]
)
def test_the_widest_filter_leaves_every_token(engine, options):
    free, wide = texts(engine, asking(), asking(**options))
    assert wide == free


@pytest.mark.parametrize(
    "options", [{"top_p": 0.0}, {"top_p": 1.0 + 2**-52}, {"top_k": -2}, {"min_p": 1.0 + 2**-52}]
)
def test_a_filter_out_of_bounds_is_refused(options):
    with pytest.raises(ParameterError) as refused:
        asking(**options)
    assert refused.value.param in options


def test_as_many_samples_as_may_be_are_all_there(engine):
    for n in (1, 16):
        (output,) = engine.generate([PROMPT], asking(n=n, logprobs=20))
        assert [each.index for each in output.completions] == list(range(n))
        assert output.stats.completion_tokens == 12 * n  # what usage counts


def test_the_longest_prompt_is_scored_in_bounded_memory(engine):
    """Each place holds its token and 20 others; how many places there may be is checked before."""
    prompt = [5 + i % 300 for i in range(engine.max_model_len)]
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=20)
    (output,) = engine.generate([prompt], scoring)
    assert len(output.prompt_logprobs) == engine.max_model_len
    assert {len(each.top) for each in output.prompt_logprobs[1:]} == {20}
    assert engine.max_model_len * 21 <= MAX_SCORES
    for wrong in (-1, 21):
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(ParameterError, match=r"\[0, 20\]"):
                asking(**{name: wrong})


def test_scores_beyond_the_bound_are_refused_before_anything_is_computed(engine, monkeypatch):
    monkeypatch.setattr("engine.sampling_params.MAX_SCORES", 100)
    for options in ({"prompt_logprobs": 20}, {"logprobs": 20}):
        with pytest.raises(ParameterError, match="more than the 100") as refused:
            engine.add_request("bad", [5] * 12, asking(**options))
        assert refused.value.param in options


INVALID = [
    ("regex", "(a", "unclosed"),
    ("regex", "a(?=b)", "look-around"),
    ("json", '{"type":"object","properties":5}', "properties"),
    ("json", '{"not":{"type":"string"}}', "not supported"),
    ("json", '{"type":"string","format":"regex"}', "regex"),
    ("grammar", "start: nowhere", "nowhere"),
]


@pytest.mark.parametrize(("kind", "text", "says"), INVALID)
def test_an_invalid_form_between_valid_ones_is_refused_alone(engine, kind, text, says):
    valid = StructuredOutputs(kind="regex", text="[0-9]{4}")
    for _ in range(2):
        (output,) = engine.generate(
            [PROMPT], SamplingParams(max_tokens=9, structured_outputs=valid)
        )
        assert output.completions[0].text.isdecimal()
        form = StructuredOutputs(kind=kind, text=text, param="here")
        with pytest.raises(ParameterError, match=says) as refused:
            engine.generate([PROMPT], SamplingParams(max_tokens=9, structured_outputs=form))
        assert refused.value.param == "here"


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_form_ends_and_says_why(engine, name):
    """Refused, cut at its length, or in a text that has the form; beside it nothing changes."""
    kind, text = HOSTILE[name]
    form = StructuredOutputs(kind=kind, text=text(7), param="here")
    engine.add_request("hostile", PROMPT, SamplingParams(max_tokens=40, structured_outputs=form))
    engine.add_request("free", PROMPT, ALWAYS)
    ended, refused = {}, {}
    while engine.has_unfinished:
        for update in engine.step():
            if update.output is not None:
                (ended[update.request_id],) = update.output.completions
            if update.refusal is not None:
                refused[update.request_id] = update.refusal
    assert ended["free"].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if "hostile" in refused:
        assert refused["hostile"].param == "here"
        says = "use anyOf|takes more than 2 seconds|try again later|no output can have"
        assert any(words in str(refused["hostile"]) for words in says.split("|"))
    else:
        assert ended["hostile"].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
