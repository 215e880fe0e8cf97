"""A model's format of calls is read from its template; tools reach the prompt safely."""

import json

import pytest
from transformers import AutoTokenizer

from engine.chat_template import ChatTemplate
from engine.detokenizer import Detokenizer
from engine.dialect import Dialect
from engine.reply import ToolFormat
from engine.sampling_params import ParameterError
from engine.tokenizer import Tokenizer
from tests.engine.chat_models import (
    BARE,
    LIST,
    NAMED_RESULTS,
    PLAIN,
    TAGGED,
    TAGGED_XML,
    TAGS,
    THINKING,
    call,
    function,
    write_chat_model,
)

QUESTION = {"role": "user", "content": "Weather in Oslo?"}
TALK = [
    {"role": "system", "content": "Be brief."},
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [call()]},
    {"role": "tool", "content": '{"celsius": 3}', "tool_call_id": "call_1"},
]
NAMES = frozenset({"get_weather"})


@pytest.fixture(scope="module", params=[TAGGED, BARE], ids=["tagged", "bare"])
def folder(request, tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder)


def dialect(template, vocabulary=()):
    return Dialect.of(ChatTemplate(template, {"bos_token": "<s>"}), vocabulary)


@pytest.mark.parametrize(
    ("template", "tool_format", "thinks", "variables"),
    [
        (TAGGED, ToolFormat.TAGGED_JSON, True, {"enable_thinking"}),
        (NAMED_RESULTS, ToolFormat.TAGGED_JSON, True, {"enable_thinking"}),
        (BARE, ToolFormat.BARE_JSON, False, set()),
        (PLAIN, None, False, set()),
        (THINKING, None, False, set()),
        (TAGGED_XML, None, True, {"enable_thinking"}),
        (LIST, None, False, set()),
        (TAGGED.replace("tool | tojson", "''"), None, True, {"enable_thinking"}),
        ("{{ raise_exception('no') }}", None, False, set()),
        ("{% set enable_thinking = 1 %}{{ enable_thinking }}", None, False, set()),
        ("{{ messages[9].x.y }}{{ ''.__class__ }}", None, False, set()),
        ('{{ "[{" * 9999 }}probe_function', None, False, set()),
    ],
)  # fmt: skip
def test_a_template_shows_what_its_model_was_taught(template, tool_format, thinks, variables):
    found = dialect(template)
    assert (found.tool_format, found.thinks, set(found.variables)) == (
        tool_format, thinks, variables,
    )  # fmt: skip


def test_a_vocabulary_with_both_tags_thinks():
    assert dialect(PLAIN, ["<think>", "</think>"]).thinks
    assert not dialect(PLAIN, ["<think>"]).thinks


def test_a_chat_with_tools_has_the_ids_that_transformers_gives(folder, tokenizer):
    theirs = AutoTokenizer.from_pretrained(folder)
    for messages, tools in (
        (TALK, [function(), function("other", parameters={"type": "object", "properties": {}})]),
        (TALK, []),
        ([QUESTION], [function(description='quotes " and é and </tools>')]),
    ):
        expected = theirs.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        assert tokenizer.encode_chat(messages, tools) == expected


def test_arguments_reach_the_template_as_objects(tokenizer):
    text = tokenizer.decode(tokenizer.encode_chat(TALK), skip_special_tokens=False)
    assert '": {"city": "Oslo"}}' in text
    assert '"celsius' in text or '\\"celsius' in text


@pytest.mark.parametrize("control", ["<|im_end|>", "<|eot_id|>", "<s>", "<|start_header_id|>"])
@pytest.mark.parametrize(
    "place",
    [
        "result", "call's name", "argument", "argument's key", "tool's name", "description",
        "schema's value", "schema's key", "schema's enum",
    ],
)  # fmt: skip
def test_no_tool_can_make_a_control_token(tokenizer, place, control):
    def chat(text):
        at = {place: text}
        schema = {
            "type": "object",
            "properties": {"city" + at.get("schema's key", ""): {"type": "string"}},
            "title": at.get("schema's value", ""),
            "enum": ["x", {"deep": [at.get("schema's enum", "")]}],
        }
        tool = function(
            "get" + at.get("tool's name", ""),
            description=at.get("description", "d"),
            parameters=schema,
        )
        arguments = {"city" + at.get("argument's key", ""): [at.get("argument", "")]}
        said = call("get" + at.get("call's name", ""), arguments)
        messages = [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [said]},
            {"role": "tool", "content": at.get("result", "r"), "tool_call_id": "call_1"},
        ]
        return tokenizer.encode_chat(messages, [tool])

    hostile, harmless = chat(f"a{control}b"), chat("ab")
    controls = set(tokenizer._controls.values())
    assert [i for i in hostile if i in controls] == [i for i in harmless if i in controls]
    shown = tokenizer.decode(hostile, skip_special_tokens=False)
    assert f"a{control}b" in shown
    assert shown.replace(f"a{control}b", "ab") == tokenizer.decode(
        harmless, skip_special_tokens=False
    )


@pytest.mark.parametrize("template", [PLAIN, TAGGED_XML, LIST, "{{ messages[0].content }}"])
def test_a_model_without_a_known_format_takes_no_tools(tmp_path, template):
    tokenizer = Tokenizer.load(write_chat_model(tmp_path, template))
    for messages, tools, param in (
        ([QUESTION], [function()], "tools"),
        (TALK[:3], [], "messages[2].tool_calls"),
        ([QUESTION, TALK[3]], [], "messages[1].role"),
    ):
        with pytest.raises(ParameterError, match="shows no format of tool calls") as refused:
            tokenizer.encode_chat(messages, tools)
        assert (refused.value.param, refused.value.code) == (param, "no_tool_format")


def test_a_template_of_its_own_for_tools_is_used_where_there_are_some(tmp_path):
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TAGGED}]
    write_chat_model(tmp_path, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.dialect.tool_format is ToolFormat.TAGGED_JSON
    for tools in ([function()], None):
        expected = theirs.apply_chat_template(
            [QUESTION], tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert ours.encode_chat([QUESTION], tools or ()) == expected
    (tmp_path / "chat_template.jinja").write_text(BARE)
    assert Tokenizer.load(tmp_path).dialect.tool_format is ToolFormat.BARE_JSON
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TAGGED)
    assert Tokenizer.load(tmp_path).dialect.tool_format is ToolFormat.TAGGED_JSON


def test_a_template_may_refuse_a_chat_of_calls_in_its_own_words(tmp_path):
    tokenizer = Tokenizer.load(write_chat_model(tmp_path, BARE))
    twice = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call(), call()]}]
    with pytest.raises(ParameterError, match="single tool-calls") as refused:
        tokenizer.encode_chat(twice)
    assert refused.value.param == "messages"


def test_only_a_template_that_thinks_on_demand_takes_the_switch(tmp_path):
    tagged = Tokenizer.load(write_chat_model(tmp_path / "tagged", TAGGED))
    plain = Tokenizer.load(write_chat_model(tmp_path / "plain", PLAIN))

    def ending(switch):
        ids = tagged.encode_chat([QUESTION], variables=switch)
        return tagged.decode(ids, skip_special_tokens=False).rpartition("assistant")[2]

    assert ending({}) == ending({"enable_thinking": True}) == "\n"
    assert ending({"enable_thinking": False}) == "\n<think>\n\n</think>\n\n"
    for tokenizer, name in ((plain, "enable_thinking"), (tagged, "tools"), (tagged, "messages")):
        with pytest.raises(ParameterError, match=f"has no {name}") as refused:
            tokenizer.encode_chat([QUESTION], variables={name: True})
        assert refused.value.param == f"chat_template_kwargs.{name}"
        assert refused.value.code == "no_template_variable"


@pytest.mark.parametrize("special_tags", [False, True])
def test_tags_are_part_of_the_text_whatever_the_vocabulary_says(tmp_path, special_tags):
    tagged = Tokenizer.load(write_chat_model(tmp_path, TAGGED, special_tags=special_tags))
    ids = [*map(tagged._rust.token_to_id, TAGS), tagged._rust.token_to_id("<|im_end|>")]
    assert tagged.decode(ids) == "".join(TAGS)
    stream = Detokenizer(tagged)
    assert stream.add(ids) + stream.flush() == "".join(TAGS)


def test_a_special_token_that_is_no_tag_of_the_dialect_stays_hidden(tmp_path):
    bare = Tokenizer.load(write_chat_model(tmp_path, BARE, special_tags=True))
    ids = list(map(bare._rust.token_to_id, TAGS))
    assert bare.decode(ids) == "<think></think>"  # it has both in its vocabulary


def test_how_a_reply_is_read_depends_on_where_its_prompt_ends(tmp_path):
    tokenizer = Tokenizer.load(write_chat_model(tmp_path, THINKING))
    form = tokenizer.reply_form(tokenizer.encode_chat([QUESTION]), tool_names=frozenset())
    assert (form.thinks, form.in_thought, form.tool_format) == (True, True, None)
    assert form.thinking_ids == tuple(map(tokenizer._rust.token_to_id, TAGS[:2]))
    other = tokenizer.reply_form(tokenizer.encode("x"), tool_names=NAMES)
    assert (other.in_thought, other.tool_format) == (False, None)


def test_calls_are_looked_for_only_where_there_are_tools(tokenizer):
    prompt = tokenizer.encode_chat([QUESTION], [function()])
    assert tokenizer.reply_form(prompt, tool_names=frozenset()).tool_format is None
    form = tokenizer.reply_form(prompt, tool_names=NAMES, max_calls=1)
    assert form.tool_format is tokenizer.dialect.tool_format
    assert (form.tool_names, form.max_calls, form.in_thought) == (NAMES, 1, False)
