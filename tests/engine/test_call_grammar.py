"""A reply that has to be a call is one, whatever the model would say."""

import json

import pytest

from engine import EngineConfig, LLMEngine
from engine.call_grammar import call_grammar
from engine.reply import ToolFormat, parse_reply
from engine.sampling_params import params_of
from engine.structured.grammar import Grammar, load_vocabulary, translate
from engine.structured_outputs import StructuredOutputs
from engine.tokenizer import Tokenizer
from tests.engine.chat_models import (
    BARE,
    TAGGED,
    TAGS,
    THINKING,
    function,
    write_chat_model,
)
from tests.engine.tokenizers_on_disk import byte_level, write

SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
    "x-guidance": {"whitespace_pattern": "x*"},  # a client's word on how to mask is not taken
}
TOOLS = [function(parameters=SCHEMA), function("now", parameters={"type": "object"})]
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
TAGGED_CALL = f"<tool_call>\n{CALL}\n</tool_call>"
BARE_CALL = CALL.replace("arguments", "parameters")
NOW = '<tool_call>\n{"name": "now", "arguments": {"any": [1]}}\n</tool_call>'


@pytest.fixture(scope="module", params=["tokens", "special tokens", "letters"])
def vocabulary(request, tmp_path_factory):
    """The tokenizer, llguidance's view of it, and the tags that are tokens in it."""
    folder = tmp_path_factory.mktemp("vocabulary")
    if request.param == "letters":
        write(folder, byte_level(), template=None)
    else:
        write_chat_model(folder, TAGGED, special_tags=request.param == "special tokens")
    tokenizer = Tokenizer.load(folder)
    tags = ["<think>"] if request.param == "letters" else TAGS
    guidance = load_vocabulary(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.eos_token_ids)
    return tokenizer, guidance, tags


def takes(vocabulary, text, tools=TOOLS, **form):
    """Whether a reply may be this text."""
    tokenizer, guidance, tags = vocabulary
    usual = {"tool_format": ToolFormat.TAGGED_JSON, "in_thought": False, "thinks": False}
    grammar = call_grammar(tools, tag_tokens=tags, **usual | {"parallel": False} | form)
    source = translate(StructuredOutputs(kind="grammar", text=grammar))
    matcher = Grammar(guidance, source).fresh()
    ids = tokenizer.encode_word(text)
    if matcher.validate_tokens(ids) < len(ids):
        return False
    return matcher.consume_tokens(ids) and matcher.is_accepting()


def test_a_reply_is_a_call_and_nothing_else(vocabulary):
    assert takes(vocabulary, TAGGED_CALL)
    assert takes(vocabulary, NOW)
    for text in ("", "Sure.", CALL, f"Sure: {TAGGED_CALL}", TAGGED_CALL + " Done", NOW[:-1]):
        assert not takes(vocabulary, text)
    for wrong in ("Oslp", "Os", 'Oslo", "x": "'):
        assert not takes(vocabulary, TAGGED_CALL.replace("Oslo", wrong))
    assert not takes(vocabulary, TAGGED_CALL.replace('": {', '":xx {'))
    assert not takes(vocabulary, NOW, tools=TOOLS[:1])


def test_bare_json_is_its_own_form(vocabulary):
    assert takes(vocabulary, BARE_CALL, tool_format=ToolFormat.BARE_JSON)
    assert not takes(vocabulary, CALL, tool_format=ToolFormat.BARE_JSON)
    assert not takes(
        vocabulary, BARE_CALL + BARE_CALL, tool_format=ToolFormat.BARE_JSON, parallel=True
    )


def test_several_calls_only_where_they_may_be(vocabulary):
    both = f"{TAGGED_CALL}\n{NOW}"
    assert takes(vocabulary, both, parallel=True)
    assert takes(vocabulary, NOW, parallel=True)
    assert not takes(vocabulary, both)


def test_a_thought_may_come_first_and_has_to_end(vocabulary):
    thought = "<think>\nhm <b>\n</think>\n\n"
    assert takes(vocabulary, thought + NOW, thinks=True)
    assert takes(vocabulary, NOW, thinks=True)
    assert not takes(vocabulary, thought + NOW)
    assert takes(vocabulary, "hm\n</think>" + NOW, thinks=True, in_thought=True)
    assert not takes(vocabulary, "hm" + NOW, thinks=True, in_thought=True)


@pytest.mark.parametrize("template", [TAGGED.replace("think>", ">"), BARE])
def test_a_model_of_random_weights_calls_what_it_has_to(tmp_path, tiny_llama_dir, template):
    """From tools to the mask and back from the text, by the engine."""
    for file in tiny_llama_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    engine = LLMEngine(EngineConfig(model=str(tmp_path), num_threads=1, num_blocks=256))
    tokenizer = engine.tokenizer
    short = {"properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tools = [function(description="", parameters={**short, "additionalProperties": False})]
    prompt = tokenizer.encode_chat([{"role": "user", "content": "x"}], tools)
    options = tokenizer.call_options(prompt, tools, parallel=False)
    options |= {"temperature": 1.5, "seed": 3, "n": 8}
    [output] = engine.generate([prompt], params_of(options, max_tokens=250))
    form = tokenizer.reply_form(prompt, tool_names=frozenset({"get_weather"}))
    for completion in output.completions:
        assert completion.finish_reason.value == "stop", completion
        reply = parse_reply(completion.text, form)
        [call] = reply.calls
        assert (call.name, reply.content) == ("get_weather", "")
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")


def test_without_a_tool_to_call_there_are_no_options(tmp_path):
    tokenizer = Tokenizer.load(write_chat_model(tmp_path, THINKING))
    prompt = tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert tokenizer.call_options(prompt, (), parallel=True) == {}
