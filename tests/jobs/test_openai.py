"""Every field of OpenAI's bodies works, is harmless, or is refused by name."""

import pytest

from engine.sampling_params import OPTION_NAMES, RepetitionDetection, params_of
from jobs.openai import (
    CHAT,
    COMPLETIONS,
    URLS,
    Choice,
    Generation,
    parse,
    response_body,
)
from jobs.openai_fields import BodyError

MESSAGES = [{"role": "user", "content": "Hello"}]
# every parameter of chat.completions.create in the openai client 3.57.0, at a value that asks for
# something: it shows in what is read, changes no output anyway, or is refused by name
CHAT_WORKS = {
    "max_completion_tokens": 3, "max_tokens": 3, "messages": [{"role": "user", "content": "Bye"}],
    "model": "other", "n": 2, "seed": 7, "stop": ["x"], "temperature": 0.5, "top_p": 0.5,
    "frequency_penalty": 1, "logit_bias": {"5": 1}, "presence_penalty": 1.5, "logprobs": True,
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
}  # fmt: skip
CHAT_HARMLESS = {
    "metadata": {"k": "v"}, "parallel_tool_calls": False, "prompt_cache_key": "k",
    "safety_identifier": "s", "service_tier": "auto", "store": True, "tool_choice": "auto",
    "user": "u",
}  # fmt: skip
CHAT_REFUSED = {
    "audio": {"voice": "a"}, "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "modalities": ["audio"], "moderation": {}, "prediction": {"type": "content"},
    "prompt_cache_options": {}, "prompt_cache_retention": "24h",
    "reasoning_effort": "low", "stream": True,
    "verbosity": "low", "web_search_options": {},
}  # fmt: skip
COMPLETIONS_WORKS = {
    "max_tokens": 3, "model": "other", "n": 2, "prompt": "Twice", "seed": 7, "stop": "x",
    "temperature": 0.5, "top_p": 0.5, "frequency_penalty": 1, "logit_bias": {"5": 1},
    "presence_penalty": 1, "echo": True, "logprobs": 0,
}  # fmt: skip
COMPLETIONS_REFUSED = {
    "best_of": 2, "stream": True, "suffix": "!",
}  # fmt: skip


def chat(**fields) -> Generation:
    return parse(CHAT, {"model": "tiny", "messages": MESSAGES} | fields)


def complete(**fields) -> Generation:
    return parse(COMPLETIONS, {"model": "tiny", "prompt": "Once"} | fields)


def refusal(call, **fields) -> BodyError:
    with pytest.raises(BodyError) as caught:
        call(**fields)
    return caught.value


def test_a_plain_chat_asks_for_nothing_special():
    assert chat() == Generation(model="tiny", messages=MESSAGES, options={})


def test_a_plain_completion_gets_openais_sixteen_tokens():
    assert complete() == Generation(model="tiny", prompt="Once", options={}, max_tokens=16)
    assert complete(max_tokens=3).max_tokens == 3


def test_options_arrive_under_the_samplers_names():
    given = {
        "temperature": 0.5, "top_p": 1, "n": 2, "seed": 7, "stop": "END", "top_k": 40,
        "min_p": 0.1, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [1, 2],
        "presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
        "logit_bias": {"5": -100, "0": 0.5}, "allowed_token_ids": [5, 6], "bad_words": ["no"],
        "include_stop_str_in_output": True, "skip_special_tokens": False, "timeout_s": 2.5,
        "repetition_detection": {"max_pattern_size": 20, "min_count": 4},
        "thinking_token_budget": 0, "prompt_logprobs": 3,
    }  # fmt: skip
    search = {
        "num_beams": 4, "length_penalty": 0.5, "early_stopping": "never", "num_beam_groups": 2,
        "diversity_penalty": 1.5, "n": 4,
    }  # fmt: skip
    read = given | {
        "stop": ("END",), "stop_token_ids": (1, 2), "logit_bias": ((5, -100), (0, 0.5)),
        "allowed_token_ids": (5, 6), "bad_words": ("no",),
    }  # fmt: skip
    for call in (chat, complete):
        options = call(**given).options
        assert options == read
        params = params_of(options, max_tokens=5)
        assert params.repetition_detection == RepetitionDetection(max_pattern_size=20, min_count=4)
        assert call(**search).options == search
        assert params_of(search, max_tokens=5).early_stopping == "never"
    others = {"max_tokens", "logprobs", "structured_outputs"}
    assert set(given) | set(search) | others == OPTION_NAMES
    assert chat(stop=["a", "b"]).options["stop"] == ("a", "b")


def test_a_beam_search_may_be_asked_for_as_in_vllm():
    for call in (chat, complete):
        assert call(use_beam_search=True, n=3).options == {"n": 3, "num_beams": 3}
        assert call(use_beam_search=True, num_beams=3).options == {"num_beams": 3}
        assert call(use_beam_search=False).options == {}
        assert refusal(call, use_beam_search=True).param == "use_beam_search"
        assert refusal(call, use_beam_search=1).param == "use_beam_search"
        assert refusal(call, early_stopping=1).param == "early_stopping"


def test_logprobs_are_a_flag_and_a_number_in_a_chat_and_a_number_in_a_completion():
    assert chat(logprobs=True).options == {"logprobs": 0}
    assert chat(logprobs=True, top_logprobs=20).options == {"logprobs": 20}
    assert complete(logprobs=20).options == {"logprobs": 20}
    assert refusal(chat, logprobs=5).param == "logprobs"
    assert refusal(chat, top_logprobs=2).param == "top_logprobs"
    assert refusal(chat, logprobs=False, top_logprobs=2).param == "top_logprobs"
    assert "[0, 20]" in str(refusal(chat, logprobs=True, top_logprobs=21))
    assert refusal(complete, logprobs=True).param == "logprobs"
    assert refusal(complete, top_logprobs=2).param == "top_logprobs"
    assert refusal(complete, echo=1).param == "echo"
    assert refusal(chat, echo=True).param == "echo"


def test_an_echoed_prompt_is_scored_as_the_output_is():
    echoed = complete(echo=True, logprobs=4)
    assert (echoed.echo, echoed.prompt_logprobs) == (True, None)
    assert echoed.options == {"logprobs": 4, "prompt_logprobs": 4}
    both = complete(echo=True, logprobs=4, prompt_logprobs=7)
    assert both.prompt_logprobs == 7
    assert both.options == {"logprobs": 4, "prompt_logprobs": 7}
    assert complete(echo=True).options == {}


def test_null_means_not_given():
    nothing = dict.fromkeys(
        [*CHAT_WORKS, *CHAT_HARMLESS, *CHAT_REFUSED, "top_k", "min_p", "stop_token_ids"]
    )
    for field in ("model", "messages"):
        del nothing[field]
    assert chat(**nothing) == chat()


@pytest.mark.parametrize("value", [None, [], 1])
def test_what_does_not_exist_is_refused_even_as_null(value):
    assert refusal(chat, surprise=value).param == "surprise"
    assert refusal(complete, surprise=value).param == "surprise"
    message = {"role": "user", "content": "hi", "surprise": value}
    assert refusal(chat, messages=[message]).param == "messages[0].surprise"


def test_both_names_of_the_limit_work_and_must_agree():
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=6).max_tokens == 6
    assert chat(max_completion_tokens=6, max_tokens=6).max_tokens == 6
    assert refusal(chat, max_completion_tokens=6, max_tokens=7).param == "max_tokens"
    assert refusal(complete, max_completion_tokens=6).param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [(chat, *item) for item in CHAT_WORKS.items()]
    + [(complete, *item) for item in COMPLETIONS_WORKS.items()],
)
def test_a_field_that_works_shows_in_what_is_read(call, field, value):
    assert call(**{field: value}) != call()


@pytest.mark.parametrize("field", CHAT_HARMLESS)
def test_a_label_or_hint_changes_nothing(field):
    assert chat(**{field: CHAT_HARMLESS[field]}) == chat()
    assert complete(user="u") == complete()


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        (chat, "logprobs", False), (chat, "response_format", {"type": "text"}),
        (chat, "tools", []), (chat, "tool_choice", "none"), (chat, "modalities", ["text"]),
        (chat, "store", False), (chat, "stream", False),
        (complete, "best_of", 1), (complete, "echo", False), (complete, "suffix", ""),
    ],
)  # fmt: skip
def test_the_value_that_asks_for_nothing_is_accepted(call, field, value):
    assert call(**{field: value}) == call()


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [(chat, *item) for item in CHAT_REFUSED.items()]
    + [(complete, *item) for item in COMPLETIONS_REFUSED.items()],
)
def test_what_asks_for_more_is_refused_by_name(call, field, value):
    error = refusal(call, **{field: value})
    assert error.param == field
    assert str(error).startswith(f"{field} is not supported")


@pytest.mark.parametrize("field", ["temprature", "messages2", "chat_template", "prompt"])
def test_an_unknown_field_is_refused_by_name(field):
    error = refusal(chat, **{field: 1})
    assert (error.param, str(error)) == (
        field, f"{field} is not a field of /v1/chat/completions",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": "1"}, "must be a finite number, got '1'"),
        ({"temperature": True}, "must be a finite number, got True"),
        ({"temperature": float("nan")}, "must be a finite number, got nan"),
        ({"top_p": [1]}, "must be a finite number"),
        ({"n": True}, "must be an integer, got True"),
        ({"n": 1.0}, "must be an integer, got 1.0"),
        ({"seed": "7"}, "must be an integer"),
        ({"max_tokens": 1.5}, "must be an integer"),
        ({"max_tokens": False}, "must be an integer"),
        ({"stop": [1]}, "must be a string or a list of strings"),
        ({"stop": {"a": 1}}, "must be a string or a list of strings"),
        ({"ignore_eos": 1}, "must be true or false, got 1"),
        ({"stop_token_ids": 5}, "must be a list of token ids, got a number"),
        ({"frequency_penalty": False}, "must be a finite number, got False"),
        ({"presence_penalty": float("nan")}, "must be a finite number, got nan"),
        ({"logit_bias": [5]}, "must be an object of token ids, got a list"),
        ({"logit_bias": {"-1": 5}}, "keys must be token ids, got '-1'"),
        ({"logit_bias": {"05": 5}}, "keys must be token ids, got '05'"),
        ({"logit_bias": {"٥": 5}}, "keys must be token ids"),
        ({"logit_bias": {"9" * 5000: 5}}, "keys must be token ids"),
        ({"bad_words": "no"}, "must be a list of strings"),
        ({"bad_words": [5]}, "must be a list of strings"),
        ({"allowed_token_ids": {"5": 1}}, "must be a list of token ids, got an object"),
        ({"skip_special_tokens": 0}, "must be true or false, got 0"),
        ({"repetition_detection": True}, "must be an object, got a boolean"),
        ({"timeout_s": "5"}, "must be a finite number, got '5'"),
        ({"user": 5}, "must be a string, got a number"),
        ({"metadata": {"k": 1}}, "must be an object of strings"),
        ({"model": ""}, "must not be empty"),
        ({"model": 5}, "must be a string, got a number"),
    ],
)
def test_a_wrong_type_names_the_field_and_the_value(fields, words):
    for call in (chat, complete):
        error = refusal(call, **fields)
        assert error.param == next(iter(fields))
        assert words in str(error)


def test_a_wrong_element_names_its_place():
    assert refusal(chat, stop_token_ids=[1, True]).param == "stop_token_ids[1]"
    assert refusal(chat, logit_bias={"5": "much"}).param == "logit_bias.5"
    detection = {"max_pattern_size": 1.5}
    assert refusal(chat, repetition_detection=detection).param == (
        "repetition_detection.max_pattern_size"
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("Hello", "messages"),
        ([], "messages"),
        (["Hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "boss", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([*MESSAGES, {"role": "user", "content": ["x"]}], "messages[1].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}],
            "messages[0].content[0].cache",
        ),
        ([{"role": "user", "content": "x", "name": "a b"}], "messages[0].name"),
        ([{"role": "user", "content": "x", "name": "a" * 65}], "messages[0].name"),
        ([{"role": "user", "content": "x", "mood": "glad"}], "messages[0].mood"),
        ([{"role": "assistant", "content": "x", "audio": {"id": "1"}}], "messages[0].audio"),
        ([{"role": "user", "content": "x"}] * 4097, "messages"),
    ],
)
def test_an_odd_message_names_its_place(messages, param):
    assert refusal(chat, messages=messages).param == param


def test_messages_are_made_plain():
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "Ada", "content": [
            {"type": "text", "text": "one"}, {"type": "text", "text": "two"},
        ]},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": []},
    ]  # fmt: skip
    assert chat(messages=messages).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "name": "Ada", "content": "one\ntwo"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("a", "a"), (["a"], "a"), ([5, 0, 7], (5, 0, 7)), ([[5]], (5,)), ([0], (0,))],
)
def test_a_prompt_is_text_or_token_ids(prompt, read):
    assert complete(prompt=prompt).prompt == read


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], [[]], ["a", "b"], [[1], [2]], [1, -1], [1, True], [1.0], [1, None], 5, {}],
)
def test_other_prompts_are_refused(prompt):
    assert refusal(complete, prompt=prompt).param == "prompt"


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(BodyError, match="must be an object"):
        parse(CHAT, body)


def test_a_url_that_is_no_endpoint_of_ours_is_refused():
    with pytest.raises(BodyError, match="url must be one of") as caught:
        parse("/v1/embeddings", {"model": "tiny"})
    assert caught.value.param == "url"


def test_a_chat_response_is_openais():
    body = response_body(
        CHAT, job_id="job_01abc", model="tiny", created=1790000000.9,
        choices=[Choice(0, "Hi", "stop"), Choice(1, "Hello", "length")],
        prompt_tokens=31, cached_tokens=16, completion_tokens=9,
    )  # fmt: skip
    assert body == {
        "id": "chatcmpl-01abc",
        "object": "chat.completion",
        "created": 1790000000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            },
        ],
        "usage": {
            "prompt_tokens": 31,
            "completion_tokens": 9,
            "total_tokens": 40,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }


def test_a_completion_response_is_openais_and_says_what_openai_has_no_word_for():
    body = response_body(
        COMPLETIONS, job_id="job_01abc", model="tiny", created=1.0,
        choices=[Choice(0, "a time", "repetition"), Choice(1, "a", "deadline")],
        prompt_tokens=1, cached_tokens=0, completion_tokens=2,
    )  # fmt: skip
    assert (body["id"], body["object"]) == ("cmpl-01abc", "text_completion")
    assert body["choices"] == [
        {
            "index": 0, "text": "a time", "logprobs": None, "finish_reason": "stop",
            "stop_reason": "repetition_detected",
        },
        {"index": 1, "text": "a", "logprobs": None, "finish_reason": "deadline"},
    ]  # fmt: skip


def test_an_ending_without_text_has_no_response_body():
    for url in URLS:
        with pytest.raises(KeyError):
            response_body(
                url, job_id="job_1", model="m", created=1, choices=[Choice(0, "", "abort")],
                prompt_tokens=1, cached_tokens=0, completion_tokens=0,
            )  # fmt: skip


HUGE, LONG = 10**400, "x" * 5000
LARGE_VALUES = [
    *({name: HUGE} for name in ("temperature", "top_p", "min_p", "presence_penalty", "timeout_s")),
    *({name: -HUGE} for name in ("length_penalty", "diversity_penalty")),
    {"logit_bias": {"1": HUGE}},
    {"logit_bias": {LONG: 1}},
    {"echo": LONG},
    {"seed": LONG},
    {"max_tokens": [LONG]},
    {"max_tokens": 10**5000, "max_completion_tokens": 5},
    {"temperature": LONG},
    {"prompt": [-(10**5000)]},
    {"stop_token_ids": [LONG]},
    {"response_format": {"type": LONG}},
    {"repetition_detection": {LONG: LONG}},
    {LONG: 1},
]


@pytest.mark.parametrize("values", LARGE_VALUES, ids=range(len(LARGE_VALUES)))
def test_a_refusal_of_a_large_value_is_short(values):
    body = {"model": "m", "prompt": "hi"} | values
    if "max_completion_tokens" in values:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | values
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with pytest.raises(BodyError) as refused:
        parse(url, body)
    assert len(str(refused.value)) < 400
    assert len(refused.value.param) < 100


@pytest.mark.parametrize(
    "message",
    [
        {"role": LONG, "content": "hi"},
        {"role": "user", "content": [{"type": LONG}]},
        {"role": "user", "content": [{"type": "text", "text": "hi", LONG: 1}]},
        {"role": "user", "content": "hi", LONG: 1},
    ],
    ids=range(4),
)
def test_a_refusal_of_a_large_message_is_short(message):
    with pytest.raises(BodyError) as refused:
        parse("/v1/chat/completions", {"model": "m", "messages": [message]})
    assert len(str(refused.value)) < 400
    assert len(refused.value.param) < 100
