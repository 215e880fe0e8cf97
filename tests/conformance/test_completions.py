"""The older completions, models, and errors."""

import openai
import pytest


def test_a_text_is_continued(complete):
    reply = complete()
    assert reply.id.startswith("cmpl-")
    assert reply.object == "text_completion"
    assert isinstance(reply.choices[0].text, str)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_prompt_of_token_ids_is_taken(complete):
    assert complete(prompt=[5, 6, 7]).usage.prompt_tokens == 3


def test_a_prompt_is_echoed(complete):
    assert complete(echo=True).choices[0].text.startswith("Once upon a time")


def test_log_probabilities_are_in_their_older_shape(complete):
    logprobs = complete(logprobs=2, max_tokens=3).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert all(2 <= len(each) <= 3 for each in logprobs.top_logprobs)


def test_there_are_as_many_texts_as_asked_for(complete):
    assert [choice.index for choice in complete(n=2).choices] == [0, 1]


def test_a_stream_says_what_the_whole_text_says(complete):
    whole = complete(seed=9, max_tokens=20)
    chunks = list(complete(seed=9, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


REFUSED = {"best_of": 3, "suffix": "end"}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_supported_is_refused_by_name(complete, field):
    with pytest.raises(openai.BadRequestError) as refused:
        complete(**{field: REFUSED[field]})
    assert (refused.value.param, refused.value.code) == (field, "unsupported_value")


TOO_LONG = [({"max_tokens": 10**7}, "max_tokens"), ({"prompt": [5] * 40_000}, "prompt"),
            ({"prompt": ["x", "a b " * 20_000]}, "prompt[1]")]  # fmt: skip


@pytest.mark.parametrize(("values", "param"), TOO_LONG)
def test_more_tokens_than_the_model_takes_have_a_code(complete, values, param):
    with pytest.raises(openai.BadRequestError) as refused:
        complete(**values)
    assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")


def test_models_are_listed_and_found(client, model):
    listed = client.models.list().data
    assert model in [each.id for each in listed]
    found = client.models.retrieve(model)
    assert (found.id, found.object) == (model, "model")
    assert found.owned_by
    assert found.created > 0


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("no-such-model")
    assert missing.value.code == "model_not_found"


BAD = [
    ({"temperature": 5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"extra_body": {"surprise": 1}}, "surprise"),
]


@pytest.mark.parametrize(("values", "param"), BAD)
def test_a_bad_value_is_a_bad_request_that_names_it(chat, values, param):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(**values)
    error = refused.value
    assert (error.param, error.type) == (param, "invalid_request_error")
    assert error.status_code == 400
    assert error.request_id
    assert set(error.body) == {"message", "type", "param", "code"}


def test_a_model_that_is_not_served_is_told_by_its_code(chat):
    with pytest.raises(openai.NotFoundError) as refused:
        chat(model="no-such-model")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_a_conflict_is_not_repeated(base_url, client, model):
    asked = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [asked.append]})
    with openai.OpenAI(
        base_url=base_url, api_key=client.api_key, max_retries=2, http_client=http
    ) as patient:
        for n, prompt in enumerate(("one", "two")):
            call = {"model": model, "prompt": prompt, "max_tokens": 1}
            headers = {"Idempotency-Key": "conformance-conflict"}
            if n == 0:
                patient.completions.create(**call, extra_headers=headers)
                continue
            with pytest.raises(openai.ConflictError):
                patient.completions.create(**call, extra_headers=headers)
    assert len(asked) == 2


PROMPTS = {
    "texts": ["Once upon a time", "Never", "In the beginning"],
    "token ids": [[5, 6, 7], [8, 9], [10]],
}


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
def test_several_prompts_have_their_texts_side_by_side(complete, prompts):
    options = {"max_tokens": 5, "n": 2, "seed": 4}
    reply = complete(prompt=prompts, **options)
    alone = [complete(prompt=each, **options) for each in prompts]
    assert [choice.index for choice in reply.choices] == list(range(6))
    expected = [choice.text for each in alone for choice in each.choices]
    assert [choice.text for choice in reply.choices] == expected
    assert reply.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
    assert reply.usage.completion_tokens == sum(each.usage.completion_tokens for each in alone)
    assert reply.usage.total_tokens == sum(each.usage.total_tokens for each in alone)


def test_several_prompts_are_streamed_together(complete):
    options = {"prompt": PROMPTS["texts"], "max_tokens": 5, "n": 2, "seed": 4}
    whole = complete(**options)
    chunks = list(complete(stream=True, stream_options={"include_usage": True}, **options))
    assert len({chunk.id for chunk in chunks}) == 1
    texts, finished = dict.fromkeys(range(6), ""), []
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        assert choice.index not in finished
        texts[choice.index] += choice.text
        finished += [choice.index] if choice.finish_reason else []
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert sorted(finished) == list(range(6))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


BAD_PROMPTS = [
    (["fine", ""], "prompt[1]"),
    ([[1], [2, -1]], "prompt[1]"),
    ([[1], []], "prompt[1]"),
    ([1, "two"], "prompt"),
    ([], "prompt"),
    (["x"] * 100_000, "prompt"),
]


@pytest.mark.parametrize(("prompts", "param"), BAD_PROMPTS)
def test_one_bad_prompt_among_several_is_named_and_none_runs(complete, prompts, param):
    with pytest.raises(openai.BadRequestError) as refused:
        complete(prompt=prompts)
    assert refused.value.param == param
