"""A reply's text becomes thought, content and calls: nothing half, nothing lost, for any cut."""

import json
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.reply
from engine.reply import (
    END_CALL,
    PLAIN,
    Reply,
    ReplyForm,
    ReplyParser,
    ToolCall,
    ToolFormat,
    num_reasoning_tokens,
    parse_reply,
)

NAMES = frozenset({"f", "get_weather"})
TAGGED = ReplyForm(tool_format=ToolFormat.TAGGED_JSON, tool_names=NAMES)
BARE = ReplyForm(tool_format=ToolFormat.BARE_JSON, tool_names=NAMES)
THINKING = ReplyForm(thinks=True)
FORMS = [
    PLAIN,
    THINKING,
    TAGGED,
    BARE,
    replace(TAGGED, thinks=True, max_calls=1),
    replace(TAGGED, thinks=True, in_thought=True),
    replace(BARE, thinks=True),
]
CALL_F = '{"name": "f", "arguments": {"a": "<b> } \\" ü", "n": [1, {}]}}'
F = ToolCall("f", '{"a": "<b> } \\" ü", "n": [1, {}]}')
PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", f"<tool_call>\n{CALL_F}\n</tool_call>",
    CALL_F, '{"name": "f", "parameters": {}}', '{"name": "g", "arguments": {}}', '{"name": "f"',
    "<", "<t", "</thi", "</tool", ";", " ", "\n\n", "text", "{", "}", '"', "\\", "日",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)


def in_pieces(text, form, cuts):
    """The deltas of a text that comes cut at these places."""
    parser = ReplyParser(form)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    deltas = [parser.add(text[a:b]) for a, b in pairwise(places)]
    return [*deltas, parser.end()]


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.sampled_from(FORMS), st.lists(st.integers(0, 500), max_size=8), st.booleans())
def test_deltas_add_up_to_the_whole_for_every_cut(text, form, cuts, by_character):
    deltas = in_pieces(text, form, range(len(text)) if by_character else cuts)
    assert sum(deltas, Reply()) == parse_reply(text, form)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from(FORMS))
def test_every_visible_character_is_somewhere(text, form):
    reply = parse_reply(text, form)
    kept = reply.content + reply.reasoning
    for call in reply.calls:
        key = "arguments" if "arg" in text and call == F else "parameters"
        kept += f'{{"name":"{call.name}","{key}":{call.arguments}}}'
    lost = Counter("".join(text.split())) - Counter("".join(kept.split()))
    tags = Counter("<think>" + "</think>" + (END_CALL + "<tool_call>;") * len(reply.calls))
    assert lost <= tags
    assert Counter("".join(kept.split())) <= Counter("".join(text.split()))


@given(st.text(alphabet=" \n<>/think{}a", max_size=30))
def test_plain_text_is_content_as_it_stands(text):
    assert parse_reply(text, PLAIN) == Reply(text)
    assert parse_reply("a" + text, THINKING) == Reply("a" + text)


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("<think>\nhm\n</think>\n\nso", Reply("so", "hm")),
        ("\n<think>a</think>b</think>c", Reply("b</think>c", "a")),
        ("<think>\n\n</think>\n\nso ", Reply("so ", "")),
        ("<think>cut sh", Reply("", "cut sh")),
        ("<think>cut </thi", Reply("", "cut </thi")),
        ("a <think>b</think>", Reply("a <think>b</think>")),
        ("<thin", Reply("<thin")),
        ("<", Reply("<")),
        ("", Reply()),
        ("  ", Reply("  ")),
    ],
)
def test_a_thought_opens_the_reply_or_is_none(text, reply):
    assert parse_reply(text, THINKING) == reply


def test_a_thought_that_the_prompt_opened_is_one_without_a_tag():
    form = ReplyForm(thinks=True, in_thought=True)
    assert parse_reply("hm\n</think>\n\nso", form) == Reply("so", "hm")
    assert parse_reply("\n<think>\nhm</think>so", form) == Reply("so", "hm")
    assert parse_reply("cut short", form) == Reply("", "cut short")
    assert parse_reply("</think>so", form) == Reply("so", "")


def tagged(body, **changes):
    return parse_reply(f"<tool_call>{body}</tool_call>", replace(TAGGED, **changes))


def test_calls_and_the_text_around_them():
    call = f"<tool_call>\n{CALL_F}\n</tool_call>"
    assert parse_reply(call, TAGGED) == Reply(calls=(F,))
    assert parse_reply(f"Look:\n{call}\n{call}\n", TAGGED) == Reply("Look:", calls=(F, F))
    assert parse_reply(f"one\n{call} two", TAGGED) == Reply("one\n two", calls=(F,))
    assert parse_reply(f"\n{call}\ntwo\n", TAGGED) == Reply("two\n", calls=(F,))
    assert parse_reply(f"<tool_call>{CALL_F}\n", TAGGED) == Reply(calls=(F,))  # no closing tag
    both = parse_reply(f"<think>hm</think>\n\nso\n{call}", replace(TAGGED, thinks=True))
    assert both == Reply("so", "hm", (F,))
    inside = parse_reply(f"<think>{call}</think>so", replace(TAGGED, thinks=True))
    assert inside == Reply("so", call)


def test_arguments_are_the_models_own_text():
    numbers = '{ "big": 1' + "0" * 1000 + ', "x": 1e400, "s": "\\ud800\\u0000</tool_call>" }'
    assert tagged(f'{{"arguments": {numbers}, "name": "f"}}').calls == (ToolCall("f", numbers),)
    assert tagged('{"type": "function", "name": "f", "parameters": {}}').calls[0].arguments == "{}"


@pytest.mark.parametrize(
    "body",
    [
        "", "{}", "f(1)", "null", '["f"]', '{"name": "f"}', '{"arguments": {}}',
        '{"name": "unknown", "arguments": {}}', '{"name": ["f"], "arguments": {}}',
        '{"name": f, "arguments": {}}', '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": {}, "parameters": {}}',
        '{"name": "f", "arguments": {}, "id": 1}', '{"type": "x", "name": "f", "arguments": {}}',
        '{"name": "f", "name": "f", "arguments": {}}', '{"name": "f", "arguments": {"a": "\n"}}',
        '{"name": "f", "arguments": {}} {}', '{"name": "f", "arguments": {}', "<tool_call>",
        '{"name": ' + "9" * 5000 + ', "arguments": {}}', '{"name": "f", "arguments": {"a": "',
    ],
)  # fmt: skip
def test_what_is_no_call_stays_content_and_the_next_one_is_found(body):
    text = f"<tool_call>{body}</tool_call>"
    assert parse_reply(text, TAGGED) == Reply(text)
    followed = parse_reply(f"{text}\n<tool_call>{CALL_F}</tool_call>", TAGGED)
    assert followed == Reply(text, calls=(F,))


def test_bare_json_is_a_call_at_the_beginning_of_a_reply_only():
    assert parse_reply(CALL_F, BARE) == Reply(calls=(F,))
    assert parse_reply(f"\n{CALL_F}; {CALL_F}\n", BARE) == Reply(calls=(F, F))
    assert parse_reply(f"{CALL_F} done", BARE) == Reply("done", calls=(F,))
    assert parse_reply(f"{CALL_F}; done;", BARE) == Reply("; done;", calls=(F,))
    for text in (f"Sure: {CALL_F}", '{"name": "Ada", "parameters": {}}', '{"a": 1}\n' + CALL_F):
        assert parse_reply(text, BARE) == Reply(text)
    for text in (" {", CALL_F[:-1], "{ not JSON }"):
        assert parse_reply(text, BARE) == Reply(text)


def test_calls_beyond_the_limit_are_content():
    call = f"<tool_call>{CALL_F}</tool_call>"
    assert parse_reply(call + call, replace(TAGGED, max_calls=1)) == Reply(call, calls=(F,))
    one = replace(BARE, max_calls=1)
    assert parse_reply(f"{CALL_F};{CALL_F}", one) == Reply(f";{CALL_F}", calls=(F,))


def test_a_hostile_text_takes_no_longer_than_its_length(monkeypatch):
    for piece in ("<tool_call>", '<tool_call>{"', '<tool_call>{" , ":1,":["', "<tool_cal", "{"):
        text = piece * (400_000 // len(piece))
        for form in (TAGGED, BARE):
            began = time.monotonic()
            assert parse_reply(text, form) == Reply(text)
            assert time.monotonic() - began < 10
    monkeypatch.setattr(engine.reply, "MAX_OPENINGS", 2)
    call = f"<tool_call>{CALL_F}</tool_call>"
    assert parse_reply(f"<tool_call>{call}{call}", TAGGED) == Reply(
        "<tool_call>" + call, calls=(F,)
    )


@pytest.mark.parametrize(
    ("token_ids", "count"),
    [
        ([8, 1, 5, 6, 7, 2, 9], 3),
        ([1, 5, 6], 2),  # cut short
        ([5, 6, 2, 9, 2], 2),  # the prompt has the opening tag
        ([1, 5, 2, 9, 1], 1),
        ([1, 2], 0),
    ],
)
def test_the_tokens_of_a_thought_are_counted_between_its_tags(token_ids, count):
    assert num_reasoning_tokens(token_ids, (1, 2)) == count


def test_a_delta_comes_as_soon_as_it_is_certain():
    parser = ReplyParser(replace(TAGGED, thinks=True))
    shown = [parser.add(piece) for piece in ("<think>a ", "b</th", "ink>\nc", " <tool", "box>")]
    assert shown == [
        Reply("", "a"), Reply("", " b"), Reply("c"), Reply(), Reply(" <toolbox>"),
    ]  # fmt: skip
    assert parser.add("<tool_call>" + CALL_F) == Reply()
    assert parser.add("</tool_call>") == Reply(calls=(F,))
    assert json.loads(F.arguments)["n"] == [1, {}]
