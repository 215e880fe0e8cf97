"""A form's words for llguidance, and where a sequence stands in it."""

import json
import math
import random
from decimal import Decimal

import jsonschema
import pytest
from llguidance import LLParserLimits

from engine.call_grammar import call_grammar
from engine.reply import ToolFormat
from engine.structured.grammar import Grammar, GrammarError, load_vocabulary, translate
from engine.structured_outputs import StructuredOutputs
from engine.tokenizer import Tokenizer
from tests.engine.structured.forms import judge
from tests.tiny_llama import SPECIAL_TOKENS

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir):
    return Tokenizer.load(tiny_llama_dir)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    # more ids than the tokenizer has, as in a padded embedding
    return load_vocabulary(tokenizer.to_json(), tokenizer.vocab_size + 50, {EOS})


def form(kind, text, **options):
    return StructuredOutputs(kind=kind, text=text, **options)


def allowed(mask):
    return {8 * i + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


@pytest.fixture(scope="module")
def accepts(vocabulary, tokenizer):
    """Whether the text has the form, by the engine's own masks alone."""

    def judge(asked, text):
        state = Grammar(vocabulary, translate(asked)).state()
        ids = []
        for token_id in tokenizer.encode(text):
            if token_id not in allowed(state.mask(ids)):
                return False
            ids.append(token_id)
        return EOS in allowed(state.mask(ids))

    return judge


def test_a_complete_form_allows_the_end_alone(vocabulary, tokenizer):
    state = Grammar(vocabulary, translate(form("regex", "ab?"))).state()
    assert EOS not in allowed(state.mask([]))
    assert EOS in allowed(state.mask(tokenizer.encode("a")))
    assert allowed(state.mask(tokenizer.encode("ab"))) == {EOS}


def test_a_mask_is_a_function_of_the_generated_ids_alone(vocabulary, tokenizer):
    grammar = Grammar(vocabulary, translate(form("json", '{"type":"object"}')))
    texts = ['{"a": 1, "b": [true, null]}', '{"xyz": "a\\nb"}', '{\n "k": -1.5e3}']
    rng = random.Random(5)
    wandering = grammar.state()
    for _ in range(60):
        ids = tokenizer.encode(rng.choice(texts))
        known = ids[: rng.randrange(len(ids) + 1)]
        fresh = Grammar(vocabulary, translate(form("json", '{"type":"object"}'))).state()
        assert wandering.mask(known) == fresh.mask(known)


def test_drafts_are_allowed_as_far_as_the_masks_allow_them(vocabulary, tokenizer):
    """Whatever was guessed, and asked about, before."""
    grammar = Grammar(vocabulary, translate(form("json", '{"type":"object"}')))
    texts = ['{"a": 1, "b": [true, null]}', '{"xyz": "a\\nb"}', '{"a": 2, "b": {}}', '{"a": tru']
    rng = random.Random(5)
    guessing, counts = grammar.state(), []
    for _ in range(60):
        ids = [*tokenizer.encode(rng.choice(texts)), EOS]
        known = ids[: rng.randrange(len(ids))]
        drafts = (ids[len(known) :] + tokenizer.encode("{ x"))[: rng.randrange(1, 8)]
        num_allowed = guessing.num_allowed(known, drafts)
        fresh = Grammar(vocabulary, translate(form("json", '{"type":"object"}'))).state()
        if EOS in drafts:  # an end may count or not: nothing is drawn behind it
            drafts = drafts[: drafts.index(EOS)]
            num_allowed = min(num_allowed, len(drafts))
        for i, draft in enumerate(drafts[: num_allowed + 1]):
            assert (draft in allowed(fresh.mask(known + drafts[:i]))) == (i < num_allowed)
        counts.append(num_allowed)
        if rng.random() < 0.5:
            num_masks = rng.randrange(num_allowed + 1)
            assert guessing.mask(known + drafts[:num_masks])
    assert len(set(counts)) > 4


def test_no_id_beyond_the_vocabulary_and_no_special_one_is_allowed(vocabulary, tokenizer):
    ids = allowed(Grammar(vocabulary, translate(form("regex", "(.|\\n)*"))).state().mask([]))
    assert max(ids) < tokenizer.vocab_size
    assert ids & {0, 1, 2} == {EOS}


@pytest.mark.parametrize(
    ("text", "bounded", "compact", "own"),
    [
        ('{"a":1}', True, True, True),
        ('{"a": 1}', True, False, True),
        ('{"a":  1}', True, False, False),
        ('{"a":   1}', False, False, False),
        ('{\n  "a": 1\n}', True, False, False),
        ('{\n\n"a": 1}', False, False, False),
        ('{"a":\t1}', False, False, False),
        ("{" + "\n" + " " * 17 + '"a":1}', False, False, False),
        (' {"a":1}', False, False, False),
    ],
)
def test_white_space_is_bounded_unless_asked_for(accepts, text, bounded, compact, own):
    schema = '{"type":"object"}'
    assert accepts(form("json", schema), text) == bounded
    assert accepts(form("json", schema, whitespace=""), text) == compact
    assert accepts(form("json", schema, whitespace=" "), text) == own


def test_a_choice_is_taken_by_the_letter(accepts):
    choices = ["a.b", "a|c", "\\x41", "é☃", "(", "日本\n"]
    asked = form("choice", json.dumps(choices))
    assert all(accepts(asked, choice) for choice in choices)
    assert not any(accepts(asked, text) for text in ["axb", "a", "A", "c", "é", ""])


def test_an_expression_is_that_of_the_whole_text(accepts):
    assert accepts(form("regex", "^ab$"), "ab")
    assert not accepts(form("regex", "ab"), "abc")
    assert not accepts(form("regex", "b"), "ab")


@pytest.mark.parametrize(
    ("kind", "text", "before", "next_"),
    [
        ("choice", '["the engine"]', "", "the engine"),
        ("regex", "^the engine$", "", "the engine"),
        ("json", '{"const": "the engine"}', '"', "the engine"),
        ("grammar", 'root ::= "the engine"', "", "the engine"),
        ("grammar", 'start: "the engine" // so', "", "the engine"),
        ("grammar", '%llguidance {"no_forcing": false}\nstart: "the engine"', "", "the engine"),
        ("choice", '["<|im_end|>"]', "", "<|im_end|>"),
        ("json", '{"const": "<|im_start|>"}', '"', "<|im_start|>"),
    ],
)
def test_where_one_text_can_follow_any_token_may_that_begins_it(
    vocabulary, tokenizer, kind, text, before, next_
):
    """And a special token spells nothing, even there."""
    state = Grammar(vocabulary, translate(form(kind, text))).state()
    begins = {
        token_id
        for token_id in range(len(SPECIAL_TOKENS), tokenizer.vocab_size)
        if (piece := tokenizer.decode([token_id])) and next_.startswith(piece)
    }
    assert allowed(state.mask(tokenizer.encode(before))) == begins


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.5 0.1 0.000001", "0 0.0 -0 0.51"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.5", "0 0.0 1 1.0"),
        ({"exclusiveMinimum": 10.0, "maximum": 10.5}, "10.5 10.01", "10 10.0 10.6"),
        ({"minimum": -2.5, "exclusiveMaximum": -2}, "-2.5 -2.01", "-2 -2.0 -1.9"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0.5 -0.01", "0 -0 -0.0 0.0"),
        ({"exclusiveMinimum": 0}, "1 0.1 12.5", "0 -0 0.0 -1"),
    ],
)
def test_an_exclusive_bound_is_no_number_of_the_form(accepts, bounds, inside, outside):
    alone = {"type": "number", **bounds}
    apart = {"type": "number", "allOf": [{name: bound} for name, bound in bounds.items()]}
    forms = [form("json", json.dumps(schema)) for schema in (alone, apart)]
    call = {
        "function": {"name": "f", "parameters": {"properties": {"x": alone}, "required": ["x"]}}
    }
    grammar = call_grammar(
        [call], tool_format=ToolFormat.BARE_JSON, tag_tokens=(), in_thought=False, thinks=False,
        parallel=False,
    )  # fmt: skip
    for texts, wanted in ((inside, True), (outside, False)):
        for text in texts.split():
            assert [accepts(each, text) for each in forms] == [wanted] * 2, text
            said = f'{{"name": "f", "parameters": {{"x":{text}}}}}'
            assert accepts(form("grammar", grammar), said) == wanted, text


def test_no_bound_is_passed_by_the_next_number(accepts):
    """Whatever digits it has: the library reads more than 15 of them as another number's."""
    rng = random.Random(3)
    wholes = [1980, -32, *(rng.randint(-(2**31), 2**31) for _ in range(30))]
    passed = []
    for bound in wholes:
        for name, other, sign in (("Minimum", "maximum", 1), ("Maximum", "minimum", -1)):
            schema = {"type": "number", f"exclusive{name}": bound, other: bound + sign * 0.5}
            asked = form("json", json.dumps(schema))
            assert accepts(asked, str(bound + sign * 0.25))
            passed += [schema] * accepts(asked, str(bound))
    for bound in [rng.uniform(-1e9, 1e9) for _ in range(30)]:
        for name, sign in (("minimum", -1), ("maximum", 1)):
            schema = {"type": "number", name: bound}
            asked = form("json", json.dumps(schema))
            assert accepts(asked, str(round(bound) - 2 * sign))
            passed += [schema] * accepts(asked, repr(math.nextafter(bound, sign * math.inf)))
    assert not passed


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": 2**53 + 1}, 2**53 + 10**6, 2**53),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, 10**18, 2**63),
        ({"maximum": -(2**53) - 1}, -(2**53) - 10**6, -(2**53)),
    ],
)
def test_bounds_of_64_bits_are_kept(accepts, bounds, inside, outside):
    asked = form("json", json.dumps({"type": "integer", **bounds}))
    assert accepts(asked, str(inside))
    assert not accepts(asked, str(outside))


def test_a_constant_is_met_by_itself(accepts):
    rng = random.Random(4)
    numbers = [0, -0.0, 2**53, -(2**53), 1e-20, 1e15, 123456789012345, 0.1]
    numbers += [float(f"{rng.uniform(-1, 1):.14e}") for _ in range(20)]
    for number in numbers:
        asked = form("json", json.dumps({"enum": ["x", number]}))
        written = format(Decimal(repr(number)).normalize(), "f")
        assert accepts(asked, written), number


def test_bounds_of_whole_numbers_and_what_only_looks_like_bounds_stay(accepts):
    whole = {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}
    asked = form("json", json.dumps(whole))
    assert [n for n in range(-1, 5) if accepts(asked, str(n))] == [1, 2]
    named = {"const": {"exclusiveMinimum": 0}}
    assert accepts(form("json", json.dumps(named)), '{"exclusiveMinimum":0}')


SPELLED = {
    "type": "object",
    "properties": {"ab": {"type": "integer"}, "é": {"type": "integer"}},
    "patternProperties": {"^x": {"type": "integer"}},
    "additionalProperties": {"type": "null"},
}


@pytest.mark.parametrize(
    "key", ["a\\u0062", "\\u0061b", "\\u00e9", "\\u00E9", "\\u0078", "\\u0079"]
)
@pytest.mark.parametrize("written", [json.dumps(SPELLED), json.dumps(SPELLED, ensure_ascii=False)])
def test_no_key_is_spelled_otherwise_than_declared(accepts, written, key):
    assert not accepts(form("json", written), f'{{"{key}":null}}')
    assert accepts(form("json", written), '{"y\\n\\"":null}')
    call = {"function": {"name": "f", "parameters": json.loads(written)}}
    grammar = call_grammar(
        [call], tool_format=ToolFormat.BARE_JSON, tag_tokens=(), in_thought=False, thinks=False,
        parallel=False,
    )  # fmt: skip
    said = f'{{"name": "f", "parameters": {{"{key}":null}}}}'
    assert not accepts(form("grammar", grammar), said)
    assert accepts(form("grammar", grammar), said.replace(key, "y"))


@pytest.mark.parametrize("control", ["\x01", "\x1f", "\x7f"])
def test_a_control_character_of_the_schema_can_be_written(accepts, control):
    escaped = f'"a\\u{ord(control):04x}"'
    assert accepts(form("json", json.dumps({"const": f"a{control}"})), escaped)
    assert not accepts(form("json", '{"type":"string"}'), escaped)


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        (r'"\u00e9ab"', "éab", "\ue9ab"),
        (r'"\u0041\u0042\U0001F600"', "AB😀", "A"),
        (r'"\\u0041"', r"\u0041", "A"),
        (r'"\u000ab" "\x0ab"', "\nb\nb", "b"),
        (r"[\u0041-\u0043\u00e9]+", "ABCé", "D"),
        (r"[^\u0000-\u001f]+", "a é", "\n"),
        (r"[\u4e00-\u9fff]+", "日本", "a"),
        ("[a&&b]+", "a&b", "c"),
        ("[+--]+", "+,-", "."),
        ("[--/]+", "-./", "+"),
        ("[a~~b]+", "~ab", "c"),
        ("[-a]+", "-a", "b"),
        ("[a-]+", "a-", "b"),
        (r"[^&\]\\]", "a", "]"),
        ('"[a&&b]"', "[a&&b]", "a"),
        ('[a-c] # [x-z] "\n', "b", "x"),
    ],
)
def test_a_grammar_in_gbnf_means_what_it_says(accepts, rule, inside, outside):
    asked = form("grammar", f"root ::= {rule}")
    assert accepts(asked, inside)
    assert not accepts(asked, outside)


def test_properties_come_in_the_order_of_the_schema(accepts):
    asked = form("json", '{"type":"object","properties":{"z":{},"a":{}},"required":["z","a"]}')
    assert accepts(asked, '{"z":1,"a":2}')
    assert not accepts(asked, '{"a":2,"z":1}')


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json", '{"not":{}}', "not supported: .*not"),
        ("json", '{"not":{},"x-guidance":{"lenient":true}}', "not supported: .*not"),
        ("json", '{"type":"array","uniqueItems":true}', "uniqueItems"),
        ("json", '{"type":"string","format":"colour"}', "colour"),
        ("json", '{"type":"strin"}', "strin"),
        ("json", '{"enum":[]}', "empty"),
        ("json", '{"const":1234567890123456789}', "at most 15 digits.*got 1234567890123456789;"),
        ("json", '{"items":{"enum":["a",[{"b":0.40973120234374205}]]}}', "enum may have.*0.409731"),
        ("json", '{"type":"integer","enum":[1,1e20]}', "enum .*got 1e[+]20"),
        ("json", '{"const":1e-40}', "got 1e-40"),
        ("json", '{"type":"object","minProperties":2}', "minProperties must be at most 1, got 2"),
        ("json", '{"$ref":"https://elsewhere.example/schema"}', "not present"),
        ("json", '{"oneOf":[{"type":"string"},{"minLength":3}]}', "use anyOf"),
        ("json", '{"oneOf":[{"type":"null"},{}],"x-guidance":{"coerce_one_of":true}}', "use anyOf"),
        ("regex", "(a", "unclosed"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "(a)\\1", "backreferences"),
        ("grammar", "garbage", "::="),
        ("grammar", "start: other", "unknown name"),
        ("grammar", 'start: a\na[max_tokens=3, temperature=0.1]: "a"', "temperature is not supp"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(vocabulary, kind, text, message):
    with pytest.raises(GrammarError, match=message) as caught:
        Grammar(vocabulary, translate(form(kind, text)))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("required", "bound", "kept"),
    [
        (["a", "b"], {"maxProperties": 2}, True),
        (["a", "b"], {"maxProperties": 3, "additionalProperties": True}, True),
        (["a"], {"maxProperties": 2}, True),  # no output could exceed it
        (["a"], {"maxProperties": 1}, False),
        (["a"], {"maxProperties": 2, "additionalProperties": True}, False),
        ([], {"minProperties": 1}, True),
        ([], {"minProperties": 1, "additionalProperties": True}, False),
        (["a"], {"minProperties": 1, "additionalProperties": True}, True),
    ],
)
def test_a_number_of_properties_is_refused_where_an_optional_one_counts(
    vocabulary, required, bound, kept
):
    """As docs/http.md says."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "required": required,
        "additionalProperties": False,
    }
    translated = translate(form("json", json.dumps(schema | bound)))
    if kept:
        assert any(Grammar(vocabulary, translated).state().mask([]))
        return
    with pytest.raises(GrammarError, match="maxProperties only supported when all keys"):
        Grammar(vocabulary, translated)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "2023-02-29", "1999-12-31"],
         ["2024-02-30", "2024-13-01", "2024-00-10", "2024-04-31", "2024-1-01", "24-01-01", ""]),
        ("time", ["00:00:00Z", "23:59:60Z", "12:30:60z", "12:30:15.25+23:59", "01:02:03-00:00"],
         ["12:30:15", "24:00:00Z", "12:60:00Z", "12:30:61Z", "12:30Z", "12:30:15.Z",
          "12:30:15+24:00", "12:30:15+1:00", "12:30:15 Z"]),
        ("ipv4", ["0.0.0.0", "255.255.255.255", "10.1.2.3"],
         ["256.1.1.1", "1.2.3", "1.2.3.4.5", "01.2.3.4", "1.2.3.4 "]),
    ],
)  # fmt: skip
def test_the_masks_and_the_judge_of_random_forms_agree_on_formats(accepts, name, good, bad):
    asked = form("json", json.dumps({"type": "string", "format": name}))
    for value in good:
        assert accepts(asked, json.dumps(value)), value
        judge(asked, json.dumps(value))
    for value in bad:
        assert not accepts(asked, json.dumps(value)), value
        with pytest.raises(jsonschema.ValidationError, match=name):
            judge(asked, json.dumps(value))


@pytest.mark.parametrize(("kind", "text"), [("json", '{"$ref":"#"}'), ("grammar", "start: start")])
def test_a_form_that_nothing_has_is_found_at_its_first_mask(vocabulary, kind, text):
    grammar = Grammar(vocabulary, translate(form(kind, text)))
    with pytest.raises(GrammarError, match="no output can have this form"):
        grammar.state().mask([])


def test_a_lexer_that_is_full_begins_anew_and_gives_the_same_masks(
    vocabulary, tokenizer, monkeypatch
):
    source = translate(form("regex", "(.*a){3}.*"))
    text = "the quick brown fox jumps over a lazy dog and runs into a garden, a job is a row"
    ids = tokenizer.encode(text)
    roomy = Grammar(vocabulary, source).state()
    expected = [roomy.mask(ids[:i]) for i in range(len(ids))]
    built = []
    monkeypatch.setattr("engine.structured.grammar.LIMITS", LLParserLimits(max_lexer_states=30))
    tight = Grammar(vocabulary, source)
    rebuilt = tight.rebuilt
    monkeypatch.setattr(tight, "rebuilt", lambda: built.append(1) or rebuilt())
    state = tight.state()
    for i in range(len(ids)):
        try:
            mask = state.mask(ids[:i])
        except GrammarError:
            break
        assert mask == expected[i]
    assert built
    assert i > 1


def test_a_tokenizer_that_llguidance_cannot_read_is_an_error_of_the_form(tokenizer):
    spec = json.loads(tokenizer.to_json()) | {"decoder": None}
    with pytest.raises(GrammarError, match="tokenizer"):
        load_vocabulary(json.dumps(spec), 384, {EOS})


def test_an_output_not_begun_is_expected_to_cost_what_others_cost_at_their_beginning(vocabulary):
    """So that a row need not spend the time first, to be told that it was too much."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}
    grammar = Grammar(vocabulary, translate(form("json", json.dumps(wide))))
    assert grammar.state().cost_s == 0.0
    first = grammar.state()
    first.mask([])
    assert grammar.state().cost_s == first.cost_s > 0.0
