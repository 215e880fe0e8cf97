"""A chat with tools from the door to the row: what a model may say, and what is made of it."""

import time
from dataclasses import replace

import pytest

from api.door import Door, ServedModel
from api.errors import BadRequest
from engine.tokenizer import Tokenizer
from jobs.lifecycle import ErrorCode, JobState
from tests.engine.chat_models import (
    BARE,
    MAX_MODEL_LEN,
    NAMED_RESULTS,
    PLAIN,
    TAGGED,
    THINKING,
    function,
    write_chat_model,
)
from tests.worker.test_dispatcher import NOW, World, job
from worker.entries import Claim, Finish
from worker.messages import Add, Delta, Ended, Ready, Sample

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Weather in Oslo?"}
OSLO = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
TAGGED_OSLO = f"<tool_call>\n{OSLO}\n</tool_call>"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    templates = {"tagged": TAGGED, "bare": BARE, "plain": PLAIN, "thinking": THINKING}
    templates["named results"] = NAMED_RESULTS
    return {
        name: Tokenizer.load(write_chat_model(tmp_path_factory.mktemp(name), template))
        for name, template in templates.items()
    }


def door(tokenizer):
    model = ServedModel(name="tiny", tokenizer=tokenizer, max_model_len=MAX_MODEL_LEN, created=0)
    return Door({"tiny": model})


def chat(**fields):
    return {"model": "tiny", "messages": [USER], "tools": [function()], "max_tokens": 50} | fields


def receive(tokenizer, body):
    """A worker whose model has this tokenizer, and which has claimed a job of this body."""
    world = World(tokenizer)
    world.dispatcher.engine_ready(
        Ready(pid=1, max_num_seqs=8, kv_tokens=8192, max_model_len=MAX_MODEL_LEN, load_s=0.0)
    )
    world.receive()
    world.take(Claim).answer(replace(job(url=CHAT), body=body), NOW)
    return world


def answer(tokenizer, body, *texts, finish_reason="stop"):
    """The response to a body whose samples are these texts."""
    checked = door(tokenizer).check(CHAT, body)
    world = receive(tokenizer, body)
    add = world.take(Add)
    assert len(add.prompt_ids) == checked.prompt_tokens
    samples = [Sample(i, text, finish_reason, None) for i, text in enumerate(texts)]
    deltas = [Delta(add.key, i, tokenizer.encode_word(text)) for i, text in enumerate(texts)]
    ended = Ended(add.key, samples, len(add.prompt_ids), 0, 9, time.monotonic())
    world.step(*deltas, ended=[ended])
    outcome = world.take(Finish).outcome
    assert outcome.state is JobState.SUCCEEDED
    return outcome.output


def functions(choice):
    return [call["function"] for call in choice["message"]["tool_calls"]]


def test_a_call_becomes_openais_and_the_next_turn_takes_it_back(tokenizers):
    tagged = tokenizers["tagged"]
    [choice] = answer(tagged, chat(), f"I shall look.\n{TAGGED_OSLO}")["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I shall look."
    assert functions(choice) == [{"name": "get_weather", "arguments": '{"city": "Oslo"}'}]
    [call] = choice["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3 degrees<|im_end|>"}
    following = chat(messages=[USER, choice["message"], result])
    add = receive(tagged, following).take(Add)
    shown = tagged.decode(add.prompt_ids, skip_special_tokens=False)
    assert f"I shall look.\n{TAGGED_OSLO}<|im_end|>" in shown
    assert "3 degrees<|im_end|>\n</tool_response><|im_end|>" in shown
    again = answer(tagged, following, "It is 3 degrees.")["choices"][0]
    assert (again["message"]["content"], again["finish_reason"]) == ("It is 3 degrees.", "stop")
    assert "tool_calls" not in again["message"]


def test_a_template_that_prints_a_results_name_gets_it(tokenizers):
    tokenizer = tokenizers["named results"]
    [choice] = answer(tokenizer, chat(), TAGGED_OSLO)["choices"]
    [call] = choice["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3 degrees"}
    add = receive(tokenizer, chat(messages=[USER, choice["message"], result])).take(Add)
    shown = tokenizer.decode(add.prompt_ids, skip_special_tokens=False)
    assert '{ "arguments": {"city": "Oslo"}, "name": "get_weather"}' in shown
    assert "get_weather: 3 degrees" in shown


def test_every_sample_is_read_by_itself(tokenizers):
    choices = answer(tokenizers["tagged"], chat(n=3), TAGGED_OSLO, "No need.", TAGGED_OSLO * 2)[
        "choices"
    ]
    assert [each["finish_reason"] for each in choices] == ["tool_calls", "stop", "tool_calls"]
    assert [len(each["message"].get("tool_calls", [])) for each in choices] == [1, 0, 2]
    ids = {call["id"] for each in choices for call in each["message"].get("tool_calls", [])}
    assert len(ids) == 3


def test_bare_json_is_a_call_for_models_that_write_it_so(tokenizers):
    text = OSLO.replace("arguments", "parameters")
    [choice] = answer(tokenizers["bare"], chat(), text)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert functions(choice) == [{"name": "get_weather", "arguments": '{"city": "Oslo"}'}]
    [choice] = answer(tokenizers["tagged"], chat(), text)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)


def test_a_call_that_has_to_be_is_asked_of_the_engine(tokenizers):
    named = {"type": "function", "function": {"name": "now"}}
    tools = [function(), function("now")]
    for choice, grammar_names in (("required", {"get_weather", "now"}), (named, {"now"})):
        add = receive(tokenizers["tagged"], chat(tools=tools, tool_choice=choice)).take(Add)
        form = add.params.structured_outputs
        assert (form.kind, form.param) == ("grammar", "tool_choice")
        names = {name for name in ("get_weather", "now") if f'\\"{name}\\"' in form.text}
        assert names == grammar_names
    assert receive(tokenizers["tagged"], chat()).take(Add).params.structured_outputs is None
    [choice] = answer(tokenizers["tagged"], chat(tool_choice="required"), TAGGED_OSLO)["choices"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, TAGGED_OSLO.replace("}}", "}")),
        ({}, TAGGED_OSLO.replace("get_weather", "get_time")),
        ({"tool_choice": "none"}, TAGGED_OSLO),
        ({"tools": None}, TAGGED_OSLO),
    ],
)
def test_what_is_no_call_of_an_offered_tool_is_content(tokenizers, fields, text):
    [choice] = answer(tokenizers["tagged"], chat(**fields), text)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]


def test_without_parallel_calls_there_is_one(tokenizers):
    body = chat(parallel_tool_calls=False)
    [choice] = answer(tokenizers["tagged"], body, TAGGED_OSLO + TAGGED_OSLO)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] == TAGGED_OSLO


def test_a_thought_is_told_from_the_answer_and_its_tokens_are_counted(tokenizers):
    text = f"<think>\nhm, Oslo\n</think>\n\n{TAGGED_OSLO}"
    body = answer(tokenizers["tagged"], chat(n=2), text, "No thought.")
    first, second = (choice["message"] for choice in body["choices"])
    assert (first["content"], first["reasoning_content"]) == (None, "hm, Oslo")
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert (second["content"], "reasoning_content" in second) == ("No thought.", False)
    # bytes are tokens here, and so is a line's end
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("\nhm, Oslo\n")}


def test_a_thought_that_the_prompt_opened_needs_no_tag(tokenizers):
    thinking, body = tokenizers["thinking"], chat(tools=None)
    reply = answer(thinking, body, "hm</think>\nso")
    message = reply["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("so", "hm")
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    cut = answer(thinking, body, "hm, hm", finish_reason="length")["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (None, "length")
    assert cut["message"]["reasoning_content"] == "hm, hm"


def test_the_tokens_of_an_earlier_attempts_thought_count_too(tokenizers):
    tagged = tokenizers["tagged"]
    world = World(tagged)
    world.receive()
    earlier = tagged.encode_word("<think>ab")
    body = chat(tools=None)
    world.take(Claim).answer(replace(job(url=CHAT), body=body, checkpoint=[earlier]), NOW)
    add = world.take(Add)
    sample = Sample(0, "<think>abc</think>d", "stop", None)
    ended = Ended(add.key, [sample], 5, 0, 6, time.monotonic())
    world.step(Delta(add.key, 0, tagged.encode_word("c</think>d")), ended=[ended])
    usage = world.take(Finish).outcome.output["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_the_switch_for_thinking_changes_the_prompt(tokenizers):
    tagged = tokenizers["tagged"]
    off = chat(chat_template_kwargs={"enable_thinking": False})
    prompt = receive(tagged, off).take(Add).prompt_ids
    assert tagged.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert answer(tagged, off, "so")["choices"][0]["message"]["content"] == "so"


def test_a_reply_that_has_a_form_is_all_content(tokenizers):
    asked = {"response_format": {"type": "json_object"}}
    for name, tools in (("thinking", None), ("bare", [function()])):
        text = OSLO.replace("arguments", "parameters")
        [choice] = answer(tokenizers[name], chat(tools=tools, **asked), text)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_a_completion_is_never_read(tokenizers):
    world = World(tokenizers["tagged"])
    add = world.run()
    sample = Sample(0, f"<think>hm</think>{TAGGED_OSLO}", "stop", None)
    world.step(ended=[Ended(add.key, [sample], 5, 0, 9, time.monotonic())])
    output = world.take(Finish).outcome.output
    assert output["choices"][0]["text"] == sample.text
    assert "completion_tokens_details" not in output["usage"]


REFUSED = [
    ("plain", {}, "tools", "no_tool_format", "shows no format of tool calls"),
    ("thinking", {}, "tools", "no_tool_format", "shows no format of tool calls"),
    (
        "plain",
        {"tools": None, "messages": [USER, {"role": "tool", "content": "", "tool_call_id": "1"}]},
        "messages[1].role",
        "no_tool_format",
        "shows no format of tool calls",
    ),
    (
        "bare",
        {"chat_template_kwargs": {"enable_thinking": True}},
        "chat_template_kwargs.enable_thinking",
        "no_template_variable",
        "has no enable_thinking",
    ),
    (
        "tagged",
        {"tool_choice": "required", "ignore_eos": True},
        "ignore_eos",
        None,
        "cannot be combined with tool_choice",
    ),
    (
        "tagged",
        {
            "tool_choice": "required",
            "tools": [function(parameters={"properties": {"id": {"const": 2**60 + 1}}})],
        },
        "tool_choice",
        None,
        "const may have numbers of at most 15 digits",
    ),
    ("plain", {"tool_choice": "required"}, "tools", "no_tool_format", "shows no format"),
    (
        "tagged",
        {"chat_template_kwargs": {"x": 1}},
        "chat_template_kwargs.x",
        "unsupported_parameter",
        "only",
    ),
    ("tagged", {"tools": [function("a b")]}, "tools[0].function.name", None, "1 to 64"),
]


@pytest.mark.parametrize(("model", "fields", "param", "code", "says"), REFUSED)
def test_both_doors_refuse_the_same_by_name(tokenizers, model, fields, param, code, says):
    with pytest.raises(BadRequest) as refused:
        door(tokenizers[model]).check(CHAT, chat(**fields))
    assert (refused.value.param, refused.value.code) == (param, code)
    assert says in str(refused.value)
    outcome = receive(tokenizers[model], chat(**fields)).take(Finish).outcome
    assert (outcome.state, outcome.param) == (JobState.FAILED, param)
    assert outcome.code is ErrorCode.INVALID_REQUEST
    assert says in outcome.message
