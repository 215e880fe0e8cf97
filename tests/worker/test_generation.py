"""A job's body on its way into the engine, and the engine's outcome on its way into a row."""

import pytest

from engine import sampling_params
from engine.outputs import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from jobs.lifecycle import ErrorCode, JobState
from tests.engine.tokenizers_on_disk import KINDS, write
from worker.generation import Limits, Refusal, outcome_of, prepare
from worker.messages import Ended, Sample
from worker.prompt import Prompt

LIMITS = Limits(max_model_len=512, kv_tokens=4096)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
LONG = [{"role": "user", "content": "hello" * 600}]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir):
    return Tokenizer.load(tiny_llama_dir)


@pytest.fixture
def prepared(tokenizer):
    def prepared(url: str, limits: Limits = LIMITS, **body) -> Prompt:
        return prepare("job_1", url, {"model": "m"} | body, tokenizer, limits)

    return prepared


def test_text_ids_and_messages_become_token_ids(prepared, tokenizer):
    assert prepared(COMPLETIONS, prompt="hello").token_ids == tokenizer.encode("hello")
    assert prepared(COMPLETIONS, prompt=[5, 6]).token_ids == [5, 6]
    assert prepared(CHAT, messages=HELLO).token_ids == tokenizer.encode_chat(HELLO)


def test_without_max_tokens_a_completion_gets_sixteen_and_a_chat_what_is_left(prepared):
    assert prepared(COMPLETIONS, prompt="hello").params.max_tokens == 16
    chat = prepared(CHAT, messages=HELLO)
    assert len(chat.token_ids) + chat.params.max_tokens == 512
    small = prepared(CHAT, Limits(max_model_len=512, kv_tokens=64), messages=HELLO)
    assert len(small.token_ids) + small.params.max_tokens == 64


def test_without_max_tokens_no_more_is_generated_than_can_be_scored(prepared, monkeypatch):
    monkeypatch.setattr(sampling_params, "MAX_SCORES", 1000)
    scored = prepared(CHAT, messages=HELLO, n=2, logprobs=True, top_logprobs=20)
    assert scored.params.max_tokens == 1000 // (2 * 21)
    beside = prepared(CHAT, messages=HELLO, n=2, logprobs=True, prompt_logprobs=4)
    left = 1000 - 5 * len(beside.token_ids)
    assert beside.params.max_tokens == left // 2
    with pytest.raises(Refusal) as refused:
        prepared(COMPLETIONS, prompt=[5] * 48, prompt_logprobs=20)
    assert refused.value.param == "prompt_logprobs"
    assert prepared(CHAT, messages=HELLO).params.max_tokens > 400


def test_a_search_without_a_limit_has_room_for_all_of_its_beams(prepared):
    limits = Limits(max_model_len=512, kv_tokens=23 * 16, block_size=16)
    search = prepared(CHAT, limits, messages=HELLO, num_beams=4)
    assert len(search.token_ids) + search.params.max_tokens == 5 * 16
    assert search.params.num_seqs == 4


def test_options_reach_the_sampler_under_their_names(prepared):
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "n": 2, "seed": 9}
    params = prepared(COMPLETIONS, prompt="x", stop=["a"], ignore_eos=True, **options).params
    assert {name: getattr(params, name) for name in options} == options
    assert (params.stop, params.ignore_eos) == (("a",), True)


def test_a_form_reaches_the_engine_with_the_field_it_came_in(prepared):
    body = {"response_format": {"type": "json_object"}}
    form = prepared(CHAT, messages=HELLO, **body).params.structured_outputs
    assert (form.kind, form.param) == ("json", "response_format")
    form = prepared(COMPLETIONS, prompt="x", structured_outputs={"regex": "a+"}).params
    assert form.structured_outputs.text == "a+"


TOO_LONG = ErrorCode.CONTEXT_LENGTH_EXCEEDED


@pytest.mark.parametrize(
    ("url", "body", "code", "param"),
    [
        ("/v1/embeddings", {"prompt": "x"}, ErrorCode.INVALID_REQUEST, "url"),
        (COMPLETIONS, {"prompt": ""}, ErrorCode.INVALID_REQUEST, "prompt"),
        (COMPLETIONS, {"prompt": [384]}, ErrorCode.INVALID_REQUEST, "prompt"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, ErrorCode.INVALID_REQUEST, "n"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 512}, TOO_LONG, "max_tokens"),
        (CHAT, {"messages": []}, ErrorCode.INVALID_REQUEST, "messages"),
        (CHAT, {"messages": LONG}, TOO_LONG, "messages"),
        (CHAT, {"messages": HELLO, "max_tokens": 512}, TOO_LONG, "max_tokens"),
        (
            CHAT,
            {"messages": HELLO, "max_completion_tokens": 512},
            TOO_LONG,
            "max_completion_tokens",
        ),
        (
            CHAT,
            {"messages": HELLO, "max_completion_tokens": -1},
            ErrorCode.INVALID_REQUEST,
            "max_completion_tokens",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(prepared, url, body, code, param):
    with pytest.raises(Refusal) as refused:
        prepared(url, **body)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_what_fits_the_model_but_not_the_kv_cache_exceeds_its_capacity(prepared):
    with pytest.raises(Refusal) as refused:
        prepared(COMPLETIONS, Limits(max_model_len=512, kv_tokens=64), prompt="x", max_tokens=100)
    assert refused.value.code == ErrorCode.EXCEEDS_CAPACITY
    small = Limits(max_model_len=512, kv_tokens=64)
    with pytest.raises(Refusal) as refused:
        prepared(CHAT, small, messages=HELLO, max_completion_tokens=100)
    assert refused.value.param == "max_completion_tokens"


def test_more_samples_than_the_engine_takes_are_refused_with_its_own_bound(prepared):
    limits = Limits(max_model_len=512, kv_tokens=4096, max_n=32)
    assert prepared(COMPLETIONS, limits, prompt="x", n=32).params.n == 32
    for options in ({"n": 33}, {"n": 129}, {"n": 33, "use_beam_search": True}):
        with pytest.raises(Refusal, match=r"^n must be in \[1, 32\]") as refused:
            prepared(COMPLETIONS, limits, prompt="x", **options)
        assert refused.value.param == "n"


def ended(*finish_reasons: str, error: str | None = None) -> Ended:
    samples = [
        Sample(index, f"text {index}", reason, error if reason == "error" else None)
        for index, reason in enumerate(finish_reasons)
    ]
    return Ended("job_1:1", samples, 5, 2, 30, 12.5)


@pytest.fixture
def outcome(tokenizer):
    def outcome(*finish_reasons: str, error: str | None = None):
        return outcome_of(
            ended(*finish_reasons, error=error),
            Prompt(token_ids=[5], params=SamplingParams(max_tokens=40)),
            tokenizer,
            job_id="job_1",
            url=CHAT,
            model="m",
            created=1.5,
        )

    return outcome


def test_a_success_is_the_endpoints_response_with_every_sample(outcome):
    result = outcome("stop", "length")
    assert (result.state, result.finish_reason) == (JobState.SUCCEEDED, "length")
    assert (result.prompt_tokens, result.cached_tokens, result.completion_tokens) == (5, 2, 30)
    choices = result.output["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["text 0", "text 1"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    assert result.output["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize(
    ("finish_reasons", "state"),
    [
        (("stop", "deadline"), JobState.EXPIRED),
        (("deadline", "error"), JobState.FAILED),
        (("stop", "abort"), JobState.FAILED),
    ],
)
def test_the_worst_sample_decides_and_half_an_answer_is_none(outcome, finish_reasons, state):
    result = outcome(*finish_reasons)
    assert result.state == state
    assert result.output is None
    assert result.code is not None


def test_an_echo_keeps_the_space_between_the_prompt_and_the_text(tmp_path):
    """A decoder of Llama 2's kind takes it off a text that stands alone."""
    tokenizer = Tokenizer.load(write(tmp_path, KINDS["byte_fallback"]()))
    body = {"model": "m", "prompt": "the", "echo": True, "logprobs": 0}
    prompt = prepare("job_1", COMPLETIONS, body, tokenizer, LIMITS)
    ids = tokenizer.encode_word("the tin")
    text = tokenizer.decode(ids)
    assert text == "the tin"
    scores = [TokenLogprobs(token_id, -1.0, 1, ()) for token_id in ids]
    sample = Sample(0, text, "length", None, logprobs=scores)
    before = [None, *(TokenLogprobs(i, -1.0, 1, ()) for i in prompt.token_ids[1:])]
    end = Ended("job_1:1", [sample], len(prompt.token_ids), 0, len(ids), 12.5, before)
    outcome = outcome_of(
        end, prompt, tokenizer, job_id="job_1", url=COMPLETIONS, model="m", created=1.5,
        generated=[ids],
    )  # fmt: skip
    [choice] = outcome.output["choices"]
    assert choice["text"] == "the the tin"
    assert choice["logprobs"]["text_offset"][len(prompt.token_ids)] == len("the ")
    alone = prepare("job_1", COMPLETIONS, body | {"echo": False}, tokenizer, LIMITS)
    plain = outcome_of(
        end, alone, tokenizer, job_id="job_1", url=COMPLETIONS, model="m", created=1.5,
        generated=[ids],
    )  # fmt: skip
    assert plain.output["choices"][0]["text"] == "the tin"
