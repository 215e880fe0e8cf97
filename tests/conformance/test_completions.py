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
    assert refused.value.param == field


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
