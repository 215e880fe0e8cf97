"""Chat completions."""

import json

import openai
import pydantic
import pytest

from tests.conformance.conftest import PLACE, WEATHER

TOOL = {"type": "function", "function": WEATHER}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}


class Weather(pydantic.BaseModel):
    cold: bool


def test_a_reply_has_its_shape(chat, model):
    reply = chat()
    assert reply.id.startswith("chatcmpl-")
    assert (reply.object, reply.model) == ("chat.completion", model)
    [choice] = reply.choices
    assert (choice.index, choice.message.role) == (0, "assistant")
    assert isinstance(choice.message.content, str)
    assert choice.finish_reason in ("stop", "length")


def test_usage_adds_up(chat):
    usage = chat().usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 1 <= usage.completion_tokens <= 8
    assert usage.prompt_tokens_details.cached_tokens >= 0


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_reply_is_cut_at_its_limit(chat, name):
    reply = chat(**{name: 3}, extra_body={"ignore_eos": True})
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 3


def test_there_are_as_many_choices_as_asked_for(chat):
    assert [choice.index for choice in chat(n=3).choices] == [0, 1, 2]


def test_a_seed_repeats_a_reply(chat):
    first, again = (chat(seed=7, temperature=1.0) for _ in range(2))
    assert first.choices[0].message.content == again.choices[0].message.content


def test_greedy_replies_are_the_same(chat):
    first, again = (chat(temperature=0) for _ in range(2))
    assert first.choices[0].message.content == again.choices[0].message.content


def test_a_stop_string_ends_a_reply_and_is_no_part_of_it(chat):
    text = chat(temperature=0, max_tokens=24).choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 1]
    reply = chat(temperature=0, max_tokens=24, stop=[stop])
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.content == text[: text.index(stop)]


def test_log_probabilities_stand_beside_each_token(chat):
    reply = chat(logprobs=True, top_logprobs=2, max_tokens=4)
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    assert all(each.logprob <= 0 and len(each.top_logprobs) == 2 for each in content)


def test_a_schema_is_kept_to(chat):
    reply = chat(response_format=SCHEMA, max_tokens=100)
    assert set(json.loads(reply.choices[0].message.content)) == {"place", "cold"}


def test_json_is_json(chat):
    content = chat(response_format={"type": "json_object"}, max_tokens=200, seed=3).choices[0]
    assert content.finish_reason == "length" or isinstance(
        json.loads(content.message.content), dict
    )


def test_the_clients_parse_helper_gets_its_type(client, model):
    reply = client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": "Is it cold?"}],
        response_format=Weather, max_tokens=60,
    )  # fmt: skip
    assert isinstance(reply.choices[0].message.parsed, Weather)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_call_can_be_asked_for_and_answered(chat, choice):
    asked = {"role": "user", "content": "Weather?"}
    reply = chat(messages=[asked], tools=[TOOL], tool_choice=choice, max_tokens=200)
    [call] = reply.choices[0].message.tool_calls[:1]
    assert reply.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "3 degrees"}
    said = reply.choices[0].message.model_dump(exclude_none=True)
    assert chat(messages=[asked, said, result], tools=[TOOL]).choices[0].message is not None


WORKS = {
    "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "presence_penalty": 0.5, "top_p": 0.9,
    "metadata": {"k": "v"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k",
    "service_tier": "auto", "modalities": ["text"], "store": False,
    "extra_body": {"top_k": 5, "min_p": 0.01, "priority": 2},
}  # fmt: skip


@pytest.mark.parametrize("field", WORKS)
def test_a_field_is_taken(chat, field):
    assert chat(max_tokens=2, **{field: WORKS[field]}).choices


REFUSED = {
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "low",
    "verbosity": "low",
    "web_search_options": {},
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "prompt_cache_retention": "24h",
    "service_tier": "priority",
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_supported_is_refused_by_name(chat, field):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(**{field: REFUSED[field]})
    assert refused.value.param == field
    whole = {"audio", "prediction", "reasoning_effort", "verbosity", "web_search_options",
             "prompt_cache_retention"}  # fmt: skip
    code = "unsupported_parameter" if field in whole else "unsupported_value"
    assert refused.value.code == code


PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
DEEPER = [
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [PICTURE]}]},
        "messages[0].content[0]",
    ),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), DEEPER)
def test_what_is_not_supported_deeper_inside_is_told_alike(chat, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(**fields)
    assert (refused.value.param, refused.value.code) == (param, "unsupported_value")


TOO_LONG = [
    ({"max_tokens": 10**7}, "max_tokens"),
    ({"max_completion_tokens": 10**7}, "max_completion_tokens"),
    ({"content": "a b " * 20_000}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), TOO_LONG)
def test_more_tokens_than_the_model_takes_have_a_code(chat, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(**fields)
    assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")


def test_roles_and_parts_of_content_are_read(chat):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Go on."},
    ]
    assert chat(messages=messages).choices[0].message.role == "assistant"


def test_every_reply_has_the_requests_id(client, model):
    reply = client.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=1
    )
    assert reply.headers["x-request-id"]
    assert reply.parse()._request_id == reply.headers["x-request-id"]


def test_a_call_repeated_under_its_key_is_the_same_call(chat):
    headers = {"Idempotency-Key": "conformance-chat"}
    first, again = (chat(extra_headers=headers) for _ in range(2))
    assert first.id == again.id


# -- streams


def content_of(chunks, index=0):
    return "".join(
        choice.delta.content or ""
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index
    )


def test_a_stream_says_what_the_whole_reply_says(chat):
    reply = chat(seed=11, max_tokens=24)
    chunks = list(chat(seed=11, max_tokens=24, stream=True))
    assert content_of(chunks) == reply.choices[0].message.content
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == reply.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}


def test_a_stream_tells_its_usage_if_asked(chat):
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chat(stream=True))


def test_a_stream_of_several_choices_tells_each(chat):
    chunks = list(chat(stream=True, n=2, seed=5, max_tokens=6))
    whole = chat(n=2, seed=5, max_tokens=6)
    assert [content_of(chunks, i) for i in range(2)] == [
        choice.message.content for choice in whole.choices
    ]


def test_a_stream_has_log_probabilities(chat):
    chunks = list(chat(stream=True, logprobs=True, top_logprobs=1, max_tokens=5, seed=2))
    tokens = [
        each
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for each in choice.logprobs.content
    ]
    whole = chat(logprobs=True, top_logprobs=1, max_tokens=5, seed=2)
    assert [each.token for each in tokens] == [
        each.token for each in whole.choices[0].logprobs.content
    ]


def test_a_stream_tells_calls(chat):
    chunks = chat(stream=True, tools=[TOOL], tool_choice="required", max_tokens=200)
    calls = [call for chunk in chunks for c in chunk.choices for call in c.delta.tool_calls or ()]
    assert calls[0].index == 0
    assert calls[0].function.name == "get_weather"
    assert json.loads(calls[0].function.arguments) == {"city": "Oslo"}


def test_the_clients_stream_helper_reads_it(client, model):
    with client.chat.completions.stream(
        model=model,
        messages=[{"role": "user", "content": "Hi"}],
        response_format=Weather,
        max_tokens=60,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "chunk" in kinds
    assert isinstance(final.choices[0].message.parsed, Weather)


def test_a_stream_that_is_left_harms_nobody(chat):
    stream = chat(stream=True, max_tokens=200, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert chat().choices


STREAM_REFUSED = {"prompt_logprobs": 1, "surprise": True}


@pytest.mark.parametrize("field", STREAM_REFUSED)
def test_what_a_stream_cannot_tell_is_refused_by_name(chat, field):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(stream=True, extra_body={field: STREAM_REFUSED[field]})
    assert refused.value.param == field


# -- stored


@pytest.fixture
def kept(client, chat):
    """Two chats that were to be stored, the later one last; and one that was not."""
    made = [chat("one", store=True, metadata={"k": "a"}), chat("two", store=True)]
    chat("three")
    yield made
    for each in made:
        client.chat.completions.delete(each.id)


def test_a_stored_chat_is_found_again_with_its_labels(client, kept):
    found = client.chat.completions.retrieve(kept[0].id)
    assert found.choices == kept[0].choices
    assert found.metadata == {"k": "a"}
    changed = client.chat.completions.update(kept[0].id, metadata={"k": "b"})
    assert changed.metadata == client.chat.completions.retrieve(kept[0].id).metadata == {"k": "b"}


def test_stored_chats_are_listed_page_by_page(client, kept):
    ids = [each.id for each in kept]
    listed = [each.id for each in client.chat.completions.list(limit=1, order="desc")]
    assert listed[:2] == ids[::-1]
    behind = client.chat.completions.list(after=ids[0], order="asc")
    assert [each.id for each in behind] == ids[1:]


def test_stored_chats_are_listed_by_their_labels(client, kept):
    listed = client.chat.completions.list(metadata={"k": "a"})
    assert kept[0].id in [each.id for each in listed]
    assert {each.metadata["k"] for each in listed} == {"a"}
    assert list(client.chat.completions.list(metadata={"k": "a", "l": "b"})) == []


def test_what_a_stored_chat_was_asked_is_listed(client, kept):
    [message] = client.chat.completions.messages.list(kept[1].id)
    assert (message.role, message.content) == ("user", "two")
    assert message.id


def test_a_stored_chat_is_gone_once_deleted(client, chat):
    made = chat(store=True)
    assert client.chat.completions.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(made.id)


def test_a_chat_that_was_not_to_be_stored_is_not_found_again(client, chat):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(chat().id)
