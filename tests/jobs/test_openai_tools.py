"""Tools, calls and results in a chat body; calls and thoughts in its response."""

import json

import pytest

from jobs.openai import CHAT, COMPLETIONS, Choice, parse, response_body
from jobs.openai_fields import BodyError
from jobs.openai_tools import NO_TOOLS, ToolCall

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}
TOOL = {"type": "function", "function": WEATHER}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}
USER = {"role": "user", "content": "Weather?"}


def chat(*messages, **fields):
    return parse(CHAT, {"model": "m", "messages": [USER, *messages]} | fields)


def tool(**fields):
    return {"type": "function", "function": WEATHER | fields}


def assistant(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | fields


def called(**fields):
    return assistant(CALL | {"function": CALL["function"] | fields})


def deep(levels):
    schema: dict = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_tools_are_given_on_as_templates_take_them():
    bare = {"type": "function", "function": {"name": "now", "parameters": None}}
    use = chat(tools=[TOOL, bare]).tool_use
    no_parameters = {"type": "object", "properties": {}}
    assert use.tools == (
        TOOL,
        {"type": "function", "function": {"name": "now", "parameters": no_parameters}},
    )
    assert use.names == {"get_weather", "now"}
    assert use.parallel
    assert list(chat(tools=[tool(strict=False)]).tool_use.tools) == [TOOL]
    assert not chat(tools=[TOOL], parallel_tool_calls=False, tool_choice="auto").tool_use.parallel


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_call_that_has_to_be_is_strict_anyway(choice):
    use = chat(tools=[tool(strict=True)], tool_choice=choice).tool_use
    assert list(use.forced) == [TOOL]  # its grammar is made of the schema; templates see no strict
    assert chat(tools=[tool(strict=True)], tool_choice="none").tool_use == NO_TOOLS


def test_with_tool_choice_none_the_model_is_shown_no_tools():
    assert chat(tools=[TOOL], tool_choice="none").tool_use == NO_TOOLS
    assert chat(tools=None, tool_choice="auto", parallel_tool_calls=False).tool_use == NO_TOOLS


def test_a_choice_of_tool_says_which_have_to_be_called():
    now = {"type": "function", "function": {"name": "now"}}
    assert chat(tools=[TOOL, now]).tool_use.forced == ()
    required = chat(tools=[TOOL, now], tool_choice="required").tool_use
    assert required.forced == required.tools
    assert required.parallel
    named = chat(tools=[TOOL, now], tool_choice=now).tool_use
    assert (named.forced, named.parallel) == ((named.tools[1],), False)
    assert len(named.tools) == 2


def test_calls_and_results_are_given_on_as_templates_take_them():
    said = assistant(CALL, reasoning_content="hm", refusal=None, annotations=None, audio=None)
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]}
    assert chat(said, result).messages == [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": {"city": "Oslo"}},
                }
            ],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "get_weather"},
    ]
    assert chat(called(arguments=" ")).messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_a_result_has_the_name_of_the_call_it_answers():
    first, second = CALL | {"id": "a"}, {**CALL, "id": "b", "function": dict(CALL["function"])}
    second["function"]["name"] = "now"

    def named(call_id, **fields):
        result = {"role": "tool", "content": "3", "tool_call_id": call_id} | fields
        return chat(assistant(first, second), result).messages[2].get("name")

    assert (named("a"), named("b"), named("c")) == ("get_weather", "now", None)
    assert named("a", name="by_hand") == "by_hand"


def test_a_message_of_ours_can_be_sent_back():
    for choice in (
        Choice(
            0, "", "stop", reasoning="thought", calls=(ToolCall("get_weather", '{"city": "Oslo"}'),)
        ),
        Choice(0, "", "length", reasoning="thought"),
        Choice(0, "text", "stop"),
    ):
        message = body(choice)["choices"][0]["message"]
        assert chat(message).messages[1]["role"] == "assistant"


def test_template_variables_are_read():
    assert chat(chat_template_kwargs={"enable_thinking": False}).template_variables == {
        "enable_thinking": False
    }
    for nothing in ({}, None, {"enable_thinking": None}):
        assert chat(chat_template_kwargs=nothing).template_variables == {}


BAD_BODIES = [
    ({"tools": {}}, "tools", "must be a list"),
    ({"tools": [TOOL] * 129}, "tools", "at most 128 entries, got 129"),
    ({"tools": ["f"]}, "tools[0]", "must be an object, got a string"),
    ({"tools": [TOOL, {"type": "retrieval"}]}, "tools[1].type", "must be function"),
    ({"tools": [{"function": WEATHER}]}, "tools[0].type", "must be function, got None"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object, got nothing"),
    ({"tools": [TOOL | {"mood": 1}]}, "tools[0].mood", "is not a field"),
    ({"tools": [tool(mood=1)]}, "tools[0].function.mood", "is not a field"),
    ({"tools": [tool(name=None)]}, "tools[0].function.name", "must be a string, got nothing"),
    ({"tools": [tool(name="")]}, "tools[0].function.name", "1 to 64 characters"),
    ({"tools": [tool(name="a" * 65)]}, "tools[0].function.name", "1 to 64 characters"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name", "a-z, A-Z, 0-9, _ and -"),
    ({"tools": [tool(name="a\n")]}, "tools[0].function.name", "a-z, A-Z, 0-9, _ and -"),
    ({"tools": [tool(name="<|im_end|>")]}, "tools[0].function.name", "'<|im_end|>'"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "name of an earlier tool"),
    ({"tools": [tool(description=5)]}, "tools[0].function.description", "must be a string"),
    ({"tools": [tool(description="x" * 8193)]}, "tools[0].function.description", "at most 8192"),
    ({"tools": [tool(strict=True)]}, "tools[0].function.strict", "needs a tool_choice"),
    (
        {"tools": [tool(), tool(name="now", strict=True)], "tool_choice": "auto"},
        "tools[1].function.strict",
        "needs a tool_choice",
    ),
    ({"tools": [tool(strict=1)]}, "tools[0].function.strict", "must be true or false"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "must be an object"),
    (
        {"tools": [tool(parameters=deep(25))]},
        "tools[0].function.parameters",
        "at most 24 levels deep, got 25",
    ),
    (
        {"tools": [tool(parameters={"title": "x" * 65_536})]},
        "tools[0].function.parameters",
        "at most 65536 bytes",
    ),
    (
        {"tools": [tool(parameters={"type": "string"})]},
        "tools[0].function.parameters.type",
        "must be 'object', got 'string'",
    ),
    (
        {"tools": [tool(parameters={"properties": []})]},
        "tools[0].function.parameters.properties",
        "must be an object",
    ),
    (
        {"tools": [tool(parameters={"properties": {"a": 1}})]},
        "tools[0].function.parameters.properties.a",
        "must be a schema",
    ),
    (
        {"tools": [tool(parameters={"required": "a"})]},
        "tools[0].function.parameters.required",
        "must be a list of strings",
    ),
    ({"tool_choice": 0}, "tool_choice", "must be a string or an object"),
    ({"tool_choice": "maybe"}, "tool_choice", "must be none or auto or required, got 'maybe'"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    (
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
        "and response_format both ask for a form",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice.function.name",
        "one of the tools, got 'other'",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type", "function"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function", "object"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false, got 1"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object"),
    (
        {"chat_template_kwargs": {"enable_thinking": 1}},
        "chat_template_kwargs.enable_thinking",
        "must be true or false, got 1",
    ),
    (
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs.messages",
        "only enable_thinking is",
    ),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "is not a field"),
]


@pytest.mark.parametrize(("fields", "param", "says"), BAD_BODIES)
def test_odd_tools_are_refused_by_name_and_limit(fields, param, says):
    with pytest.raises(BodyError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert str(refused.value).startswith(param)
    assert says in str(refused.value)


RESULT = {"role": "tool", "content": "3", "tool_call_id": "call_1"}
BAD_MESSAGES = [
    (USER | {"tool_calls": [CALL]}, ".tool_calls", "messages of role assistant, not user"),
    (USER | {"tool_call_id": "1"}, ".tool_call_id", "messages of role tool, not user"),
    (RESULT | {"reasoning_content": "x"}, ".reasoning_content", "role assistant, not tool"),
    (RESULT | {"tool_call_id": None}, ".tool_call_id", "must be a string, got nothing"),
    (RESULT | {"tool_call_id": ""}, ".tool_call_id", "1 to 128 characters, got 0"),
    (RESULT | {"tool_call_id": "x" * 129}, ".tool_call_id", "1 to 128 characters, got 129"),
    (RESULT | {"content": None}, ".content", "must be a string, got nothing"),
    ({"role": "function", "name": "f", "content": "3"}, ".role", "use tool"),
    (assistant() | {"tool_calls": {}}, ".tool_calls", "must be a list"),
    (assistant(*[CALL] * 129), ".tool_calls", "at most 128 calls, got 129"),
    (assistant(), ".content", "must be a string, got nothing"),
    (assistant(CALL, content=5), ".content", "must be a string"),
    (assistant(CALL, reasoning_content=5), ".reasoning_content", "must be a string"),
    (assistant("f"), ".tool_calls[0]", "must be an object"),
    (assistant(CALL, CALL | {"index": 0}), ".tool_calls[1].index", "is not a field"),
    (assistant(CALL | {"id": None}), ".tool_calls[0].id", "must be a string"),
    (assistant(CALL | {"type": "custom"}), ".tool_calls[0].type", "must be function"),
    (assistant(CALL | {"function": None}), ".tool_calls[0].function", "must be an object"),
    (called(mood=1), ".tool_calls[0].function.mood", "is not a field"),
    (called(name="a b"), ".tool_calls[0].function.name", "1 to 64 characters"),
    (called(arguments={}), ".tool_calls[0].function.arguments", "must be a string"),
    (called(arguments="{"), ".tool_calls[0].function.arguments", "must be the JSON text"),
    (called(arguments="[]"), ".tool_calls[0].function.arguments", "an object, got a list"),
    (called(arguments='{"a": NaN}'), ".tool_calls[0].function.arguments", "NaN"),
    (called(arguments='{"a": "\\ud800"}'), ".tool_calls[0].function.arguments", "surrogate"),
    (called(arguments='{"a": ' * 40), ".tool_calls[0].function.arguments", "JSON"),
    (called(arguments='{"a":' * 40 + "1" + "}" * 40), ".tool_calls[0].function.arguments", "32"),
]


@pytest.mark.parametrize(("message", "param", "says"), BAD_MESSAGES)
def test_odd_calls_and_results_are_refused_by_name_and_limit(message, param, says):
    with pytest.raises(BodyError) as refused:
        chat(message)
    assert refused.value.param == "messages[1]" + param
    assert says in str(refused.value)


def body(*choices, url=CHAT, **fields):
    return response_body(
        url, job_id="job_01abc", model="m", created=1, choices=choices,
        prompt_tokens=1, cached_tokens=0, completion_tokens=9, **fields,
    )  # fmt: skip


def test_a_call_is_openais_and_its_id_is_the_jobs_own():
    calls = (ToolCall("get_weather", '{"city":  "Oslo"}'), ToolCall("now", "{}"))
    first, second = body(Choice(0, "", "stop", calls=calls), Choice(1, "So:", "stop", calls=calls))[
        "choices"
    ]
    assert first["finish_reason"] == second["finish_reason"] == "tool_calls"
    assert first["message"]["content"] is None
    assert second["message"]["content"] == "So:"
    assert "reasoning_content" not in first["message"]
    assert first["message"]["tool_calls"][0] == {
        "id": first["message"]["tool_calls"][0]["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city":  "Oslo"}'},
    }
    ids = [call["id"] for choice in (first, second) for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    assert all(call_id.startswith("call_") and len(call_id) == 29 for call_id in ids)
    again = body(Choice(0, "", "stop", calls=calls))["choices"][0]["message"]["tool_calls"]
    assert [call["id"] for call in again] == ids[:2]


@pytest.mark.parametrize("reason", ["length", "repetition", "deadline"])
def test_a_reply_cut_short_says_so_though_it_has_a_call(reason):
    whole = body(Choice(0, "", reason, calls=(ToolCall("f", "{}"),)))["choices"][0]
    without = body(Choice(0, "", reason))["choices"][0]
    assert whole["finish_reason"] == without["finish_reason"] != "tool_calls"


def test_a_thought_stands_beside_the_content_and_its_tokens_in_usage():
    thought = body(Choice(0, "so", "stop", reasoning="hm"), reasoning_tokens=4)
    assert thought["choices"][0]["message"] == {
        "role": "assistant", "content": "so", "refusal": None, "reasoning_content": "hm",
    }  # fmt: skip
    assert thought["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert "completion_tokens_details" not in body(Choice(0, "so", "stop"))["usage"]
    only = body(Choice(0, "", "length", reasoning="hm"))["choices"][0]["message"]
    assert (only["content"], only["reasoning_content"]) == (None, "hm")
    assert body(Choice(0, "", "stop"))["choices"][0]["message"]["content"] == ""


def test_completions_know_no_tools():
    for field in ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"):
        with pytest.raises(BodyError, match=f"{field} is not a field of {COMPLETIONS}"):
            parse(COMPLETIONS, {"model": "m", "prompt": "x", field: None})
    json.dumps(body(Choice(0, "x", "stop"), url=COMPLETIONS))
