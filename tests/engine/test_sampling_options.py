"""Each sampling option shows in an output, and the output obeys it."""

import pytest

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.model_runner import ModelRunner
from engine.sampling_params import ParameterError, RepetitionDetection
from engine.sequence import FinishReason
from engine.tokenizer import Tokenizer
from tests.tiny_llama import SPECIAL_TOKENS, write_tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

THINK, END_OF_THINK = 3, 4
MAX_TOKENS = 24
OPTIONS = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.4, "presence_penalty": -1.5},
    {"frequency_penalty": -2.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": -0.5},
    {"logit_bias": ((17, 4.0), (80, -100.0), (200, 3.5))},
    {"allowed_token_ids": tuple(range(40, 300, 3))},
    {"bad_words": ("in", "?", " upon")},
    {"stop": ("do", "?"), "include_stop_str_in_output": True},
    {"stop": ("in", "do"), "min_tokens": 6},
    {"stop_token_ids": (126, 246, 35), "min_tokens": 3},
    {"skip_special_tokens": False, "logit_bias": ((0, 5.0), (1, 5.0))},
    {
        "frequency_penalty": -2.0,
        "repetition_detection": RepetitionDetection(max_pattern_size=4, min_count=3),
    },
    {"thinking_token_budget": 5, "logit_bias": ((THINK, 6.0), (END_OF_THINK, -100.0))},
    {"logprobs": 5},
    {"n": 3, "logit_bias": ((200, -1.0),)},
]
DRAWS = [
    {"temperature": 0.0},
    {"temperature": 1.2, "seed": 12, "top_k": 200, "top_p": 0.98, "min_p": 0.001},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tags = ("<think>", "</think>")
    return write_tiny_llama(
        tmp_path_factory.mktemp("thinker"), special_tokens=(*SPECIAL_TOKENS, *tags)
    )


@pytest.fixture(scope="module")
def engine_of(folder):
    """Engines that share one model and its little KV cache."""
    tokenizer = Tokenizer.load(folder)
    common = {"model": str(folder), "device": "cpu", "num_blocks": 20, "block_size": 8}
    runner = ModelRunner(EngineConfig(**common), eos_token_ids=tokenizer.eos_token_ids)

    def build(**config):
        return LLMEngine(EngineConfig(**common | config), tokenizer=tokenizer, runner=runner)

    return build


def requests():
    """Pairs of prompt and params: every option with every way to draw."""
    pairs = []
    for options in OPTIONS:
        for draw in DRAWS:
            prompt = [*range(30, 42), *range(60, 68)]
            if "thinking_token_budget" in options:
                prompt.append(THINK)
            params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **options, **draw)
            pairs.append((prompt, params))
    return pairs


@pytest.fixture(scope="module")
def alone(engine_of):
    """Each request's output when there is no other."""
    found = []
    for prompt, params in requests():
        (output,) = engine_of(enable_prefix_caching=False).generate([prompt], [params])
        found.append(output)
    return found


def test_each_option_shows_in_the_output(alone, folder):
    """Each gives a greedy text of its own, but for log-probabilities, which change none."""
    greedy = [output.completions[0] for output in alone[:: len(DRAWS)]]
    texts = [(c.token_ids, c.text) for c in greedy]
    silent = OPTIONS.index({"logprobs": 5})
    assert texts[silent] == texts[0]
    assert len(set(texts)) == len(texts) - 1
    tokenizer = Tokenizer.load(folder)
    for output, (_, params) in zip(alone, requests(), strict=True):
        for completion in output.completions:
            assert_obeys(completion, params, tokenizer)


def assert_obeys(completion, params, tokenizer):
    ids = completion.token_ids
    if params.allowed_token_ids is not None:
        assert set(ids) <= set(params.allowed_token_ids)
    for word in params.bad_words:
        spelled = tokenizer.encode_word(word)
        places = range(len(ids) - len(spelled) + 1)
        assert not any(list(ids[at : at + len(spelled)]) == spelled for at in places)
    if params.thinking_token_budget is not None:
        assert ids[params.thinking_token_budget] == END_OF_THINK
    if params.repetition_detection is not None:
        looped = completion.finish_reason is FinishReason.REPETITION
        assert looped or completion.finish_reason is FinishReason.LENGTH
    if params.stop and completion.finish_reason is FinishReason.STOP:
        assert completion.text.endswith(params.stop) == params.include_stop_str_in_output
        assert len(ids) > params.min_tokens


def test_sixteen_samples_are_the_samples_asked_for_alone(engine_of):
    prompt = list(range(50, 70))
    options = {"max_tokens": 12, "seed": 5, "ignore_eos": True, "frequency_penalty": 1.0}
    (crowd,) = engine_of().generate([prompt], SamplingParams(n=16, **options))
    assert len({c.token_ids for c in crowd.completions}) == 16
    for n in (1, 2, 7):
        (few,) = engine_of().generate([prompt], SamplingParams(n=n, **options))
        assert few.completions == crowd.completions[:n]


def test_as_many_samples_run_as_the_engine_is_set_to_and_one_more_is_refused(engine_of):
    engine = engine_of(max_n=32)
    params = SamplingParams(n=32, max_tokens=3, seed=5, ignore_eos=True)
    (output,) = engine.generate([[50, 51]], params)
    assert [len(each.token_ids) for each in output.completions] == [3] * 32
    for own, n, bound in ((engine, 33, "[1, 32], got 33"), (engine_of(), 17, "[1, 16], got 17")):
        with pytest.raises(ParameterError) as refused:
            own.add_request("more", [50, 51], SamplingParams(n=n, max_tokens=3))
        assert (refused.value.param, str(refused.value)) == ("n", f"n must be in {bound}")
        assert not own.has_unfinished


def test_of_more_samples_than_run_at_once_each_is_the_lone_request_with_its_seed(engine_of):
    prompt, seed = list(range(50, 70)), 5
    options = {"max_tokens": 12, "ignore_eos": True}
    (crowd,) = engine_of(max_n=32, max_num_seqs=16).generate(
        [prompt], SamplingParams(n=20, seed=seed, **options)
    )
    alone = [SamplingParams(seed=seed + i, **options) for i in range(20)]
    for sample, lone in zip(
        crowd.completions, engine_of().generate([prompt] * 20, alone), strict=True
    ):
        assert sample.token_ids == lone.completions[0].token_ids
        assert sample.text == lone.completions[0].text
    assert len({each.token_ids for each in crowd.completions}) == 20


def test_a_model_without_think_tags_refuses_a_thinking_budget(tiny_llama_dir):
    engine = LLMEngine(EngineConfig(model=str(tiny_llama_dir), num_blocks=8))
    with pytest.raises(ParameterError, match="<think>") as refused:
        engine.add_request("a", [5], SamplingParams(max_tokens=5, thinking_token_budget=3))
    assert refused.value.param == "thinking_token_budget"
    assert not engine.has_unfinished
