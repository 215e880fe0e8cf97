"""Responses: waited for, streamed, in the background, and heard again."""

import json
import time

import openai
import pytest

from tests.conformance.conftest import PLACE, TIMEOUT_S, WEATHER

TOOL = {"type": "function", "strict": False, **WEATHER}
FORMAT = {"format": {"type": "json_schema", "name": "place", "schema": PLACE}}
LAST = {"response.completed", "response.incomplete", "response.failed"}
LONG = {"max_output_tokens": 60, "extra_body": {"ignore_eos": True}}


def ended(client, response_id):
    until = time.monotonic() + TIMEOUT_S
    while (found := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < until
        time.sleep(0.1)
    return found


def numbers(events):
    return [event.sequence_number for event in events]


def text_of(events):
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_a_response_has_its_shape(respond, model):
    response = respond()
    assert response.id.startswith("resp_")
    assert (response.object, response.model) == ("response", model)
    assert response.status in ("completed", "incomplete")
    assert response.error is None
    assert response.output[0].type == "message"
    assert isinstance(response.output_text, str)


def test_usage_adds_up(respond):
    usage = respond().usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens >= 0


def test_one_that_is_cut_says_so(respond):
    response = respond(**LONG | {"max_output_tokens": 4})
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 4


def test_instructions_and_items_are_read(respond):
    items = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
    ]
    short = respond("Hi").usage.input_tokens
    response = respond(items, instructions="Be brief.")
    assert response.usage.input_tokens > short
    assert response.instructions == "Be brief."


def test_it_goes_on_from_an_earlier_one(client, respond):
    first = respond("My name is Ada.")
    second = respond("What is it?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]


def test_an_unknown_earlier_one_is_refused(respond):
    with pytest.raises(openai.BadRequestError) as refused:
        respond(previous_response_id="resp_nothing")
    assert refused.value.param == "previous_response_id"


def test_a_schema_is_kept_to(respond):
    response = respond(text=FORMAT, max_output_tokens=100)
    assert set(json.loads(response.output_text)) == {"place", "cold"}


def test_a_call_can_be_asked_for_and_answered(respond):
    response = respond(tools=[TOOL], tool_choice="required", max_output_tokens=200)
    call = next(item for item in response.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Oslo"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3 degrees"}
    again = respond([result], previous_response_id=response.id, tools=[TOOL])
    assert again.status in ("completed", "incomplete")


def test_log_probabilities_are_included_if_asked(respond):
    response = respond(
        include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=3
    )
    scores = response.output[0].content[0].logprobs
    assert len(scores) == response.usage.output_tokens
    assert all(len(each.top_logprobs) == 2 for each in scores)


WORKS = {
    "temperature": 0.5, "top_p": 0.9, "metadata": {"k": "v"}, "user": "u", "truncation": "disabled",
    "parallel_tool_calls": False, "service_tier": "auto", "store": False,
    "extra_body": {"seed": 3, "top_k": 4},
}  # fmt: skip


@pytest.mark.parametrize("field", WORKS)
def test_a_field_is_taken(respond, field):
    assert respond(max_output_tokens=2, **{field: WORKS[field]}).status


REFUSED = {
    "conversation": "conv_1", "prompt": {"id": "p"}, "truncation": "auto", "max_tool_calls": 3,
    "reasoning": {"effort": "low"}, "service_tier": "flex", "context_management": [],
    "tools": [{"type": "web_search"}], "include": ["reasoning.encrypted_content"],
    "extra_body": {"surprise": 1},
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_supported_is_refused_by_name(respond, field):
    with pytest.raises(openai.BadRequestError) as refused:
        respond(**{field: REFUSED[field]})
    expected = "surprise" if field == "extra_body" else field
    assert refused.value.param.startswith(expected)
    if field == "extra_body":
        assert refused.value.code == "unknown_field"
    elif field in ("conversation", "prompt", "max_tool_calls", "context_management"):
        assert refused.value.code == "unsupported_parameter"
    else:
        assert refused.value.code == "unsupported_value"


def test_a_part_that_is_no_text_is_refused_by_its_type(respond):
    picture = {"type": "input_image", "image_url": "data:image/png;base64,", "detail": "auto"}
    with pytest.raises(openai.BadRequestError) as refused:
        respond(input=[{"role": "user", "content": [picture]}])
    assert (refused.value.param, refused.value.code) == (
        "input[0].content[0].type", "unsupported_value",
    )  # fmt: skip


TOO_LONG = [
    ({"max_output_tokens": 10**7}, "max_output_tokens"),
    ({"input": "a b " * 20_000}, "input"),
]


@pytest.mark.parametrize(("fields", "param"), TOO_LONG)
def test_more_tokens_than_the_model_takes_have_a_code(respond, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        respond(**fields)
    assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")


def test_it_is_found_again_and_gone_once_deleted(client, respond):
    response = respond()
    assert client.responses.retrieve(response.id).output_text == response.output_text
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_one_that_is_not_stored_is_not_found_again(client, respond):
    response = respond(store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_its_input_is_listed_page_by_page(client, respond):
    items = [{"role": "user", "content": text} for text in "abc"]
    response = respond(items)
    listed = list(client.responses.input_items.list(response.id, limit=2, order="asc"))
    assert [item.content[0].text for item in listed] == ["a", "b", "c"]
    assert len({item.id for item in listed}) == 3


def test_the_tokens_of_an_input_are_counted(client, model, respond):
    counted = client.responses.input_tokens.count(model=model, input="What is a queue?")
    assert counted.input_tokens == respond("What is a queue?").usage.input_tokens


# -- streams


def test_events_come_in_order_and_say_what_the_response_says(client, respond):
    events = list(respond(stream=True, max_output_tokens=20))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:-1] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip
    assert kinds[-1] in LAST
    assert numbers(events) == list(range(len(events)))
    whole = events[-1].response
    assert text_of(events) == whole.output_text
    assert client.responses.retrieve(whole.id).output_text == whole.output_text


def test_calls_are_streamed(respond):
    events = list(respond(stream=True, tools=[TOOL], tool_choice="required", max_output_tokens=200))
    done = [each for each in events if each.type == "response.function_call_arguments.done"]
    assert json.loads(done[0].arguments) == {"city": "Oslo"}
    item = events[-1].response.output[-1]
    assert (item.type, item.id) == ("function_call", done[-1].item_id)


def test_the_clients_stream_helper_reads_it(client, model):
    with client.responses.stream(
        model=model, input="Hi", max_output_tokens=100, text=FORMAT
    ) as stream:
        kinds = [event.type for event in stream]
        assert kinds[-1] in LAST
        assert stream.get_final_response().status == "completed"


@pytest.fixture(scope="module")
def heard(client, model):
    """All events of one response, as they came."""
    stream = client.responses.create(
        model=model, input="Hi", max_output_tokens=12, background=True, stream=True
    )
    return list(stream)


@pytest.mark.parametrize("after", [None, 0, 1, 3, 5, 8, -2])
def test_it_is_heard_again_from_behind_any_event(client, heard, after):
    response_id = heard[0].response.id
    if after is None:
        again = list(client.responses.retrieve(response_id, stream=True))
    else:
        after = after if after >= 0 else len(heard) + after
        again = list(client.responses.retrieve(response_id, stream=True, starting_after=after))
    expected = heard if after is None else heard[after + 1 :]
    assert [(e.sequence_number, e.type) for e in again] == [
        (e.sequence_number, e.type) for e in expected
    ]
    assert text_of(again) == text_of(expected)


def test_nothing_comes_behind_the_last_event(client, heard):
    response_id, last = heard[0].response.id, heard[-1].sequence_number
    assert list(client.responses.retrieve(response_id, stream=True, starting_after=last)) == []


def test_a_number_without_a_stream_is_refused(client, respond):
    response = respond()
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.retrieve(response.id, extra_query={"starting_after": 1})
    assert refused.value.param == "starting_after"


def test_a_stream_that_is_left_is_taken_up_again(client, respond):
    stream = respond(stream=True, background=True, **LONG)
    first = []
    for event in stream:
        first.append(event)
        if event.type == "response.output_text.delta":
            break
    stream.close()
    after = first[-1].sequence_number
    rest = list(client.responses.retrieve(first[0].response.id, stream=True, starting_after=after))
    assert numbers(first + rest) == list(range(len(first) + len(rest)))
    assert [event.type in LAST for event in rest].count(True) == 1
    assert text_of(first + rest) == rest[-1].response.output_text


def test_one_in_the_background_is_queued_and_then_done(client, respond):
    response = respond(background=True)
    assert response.status in ("queued", "in_progress")
    assert response.background
    done = ended(client, response.id)
    assert done.status in ("completed", "incomplete")
    assert done.output_text is not None
    assert done.status == "incomplete" or done.completed_at >= done.created_at


def test_one_made_without_a_stream_is_heard_all_the_same(client, respond):
    response = respond(background=True)
    events = list(client.responses.retrieve(response.id, stream=True))
    assert events[-1].type in LAST
    assert text_of(events) == events[-1].response.output_text


def test_one_in_the_background_is_cancelled_twice_alike(client, respond):
    response = respond(background=True, max_output_tokens=3000, extra_body={"ignore_eos": True})
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.retrieve(response.id).status == "cancelled"


def test_a_deleted_stream_has_an_end_that_says_so(client, respond):
    stream = respond(
        background=True, stream=True, max_output_tokens=3000, extra_body={"ignore_eos": True}
    )
    events = []
    for event in stream:
        events.append(event)
        if len(events) == 3:
            client.responses.delete(events[0].response.id)
    assert numbers(events) == list(range(len(events)))
    assert [event.type in LAST for event in events].count(True) == 1
    assert events[-1].type == "response.failed"
    assert "deleted" in events[-1].response.error.message


def test_only_one_that_is_complete_says_when(client, respond):
    cut = respond(max_output_tokens=2, extra_body={"ignore_eos": True})
    assert (cut.status, cut.completed_at) == ("incomplete", None)
    assert client.responses.retrieve(cut.id).completed_at is None


def test_a_cancelled_stream_has_one_end(client, respond):
    stream = respond(
        background=True, stream=True, max_output_tokens=3000, extra_body={"ignore_eos": True}
    )
    events = []
    for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta" and text_of(events[:-1]) == "":
            client.responses.cancel(events[0].response.id)
    assert [event.type in LAST for event in events].count(True) == 1
    assert events[-1].response.status == "cancelled"
    assert numbers(events) == list(range(len(events)))


def test_one_that_is_waited_for_is_not_cancelled(client, respond):
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(respond().id)


def test_the_background_needs_a_store(respond):
    with pytest.raises(openai.BadRequestError) as refused:
        respond(background=True, store=False)
    assert refused.value.param == "background"


@pytest.mark.parametrize("call", ["retrieve", "cancel", "delete"])
def test_an_unknown_one_is_not_found(client, call):
    with pytest.raises(openai.NotFoundError) as missing:
        getattr(client.responses, call)("resp_nothing")
    assert missing.value.code == "response_not_found"
