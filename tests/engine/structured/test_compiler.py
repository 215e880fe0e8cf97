"""Compiling beside the steps: tried under limits, kept within bounds, replaced when killed."""

import os
import signal
import sys
import time
from dataclasses import replace

import pytest

from engine.parameter_error import ParameterError
from engine.structured import compiler as compiling
from engine.structured import grammar
from engine.structured.compiler import GrammarCompiler
from engine.structured_outputs import StructuredOutputs
from engine.tokenizer import Tokenizer

ANSWER_S = 30.0


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir):
    return Tokenizer.load(tiny_llama_dir)


@pytest.fixture
def compiler(tokenizer):
    made = GrammarCompiler(
        tokenizer.to_json(), tokenizer.vocab_size, frozenset(tokenizer.eos_token_ids)
    )
    yield made
    made.close()


def regex(text, **options):
    return StructuredOutputs(kind="regex", text=text, **options)


def slow_form():
    """Each rule is twice the next: what a reader that follows references never comes back from."""
    rules = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(3000)]
    return StructuredOutputs(
        kind="grammar",
        text="\n".join([*rules, 'r3000 ::= "a"', "root ::= r0"]),
        param="structured_outputs.grammar",
    )


def test_a_known_form_is_there_at_once_with_a_state_for_each_sample(compiler):
    first = compiler.open(regex("[ab]+"), (), 1).result(ANSWER_S)
    again = compiler.open(regex("[ab]+"), (), 3)
    assert again.done()
    states = again.result()
    assert len({id(state) for state in states}) == 3
    assert {state.mask([]) for state in states} == {first[0].mask([])}


def test_states_come_advanced_by_what_was_generated(compiler, tokenizer):
    ids = tokenizer.encode("ab")
    (state,) = compiler.open(regex("ab|cd"), [ids], 1).result(ANSWER_S)
    assert [token for token in range(8) if state.mask(ids)[0] >> token & 1] == [2]


def test_a_refusal_names_the_field_and_is_remembered(compiler):
    bad = regex("(a", param="structured_outputs.regex")
    for _ in range(2):
        with pytest.raises(ParameterError, match="unclosed") as caught:
            compiler.open(bad, (), 1).result(ANSWER_S)
        assert caught.value.param == "structured_outputs.regex"
    assert compiler.open(bad, (), 1).done()
    assert compiler.open(regex("(a)"), (), 1).result(ANSWER_S)


def test_a_form_that_takes_too_long_ends_in_time_and_the_next_one_works(compiler):
    compiler.open(regex("a"), (), 1).result(ANSWER_S)
    pid = compiler.trial_pid
    began = time.monotonic()
    with pytest.raises(ParameterError, match="takes more than 2 seconds") as caught:
        compiler.open(slow_form(), (), 1).result(ANSWER_S)
    assert time.monotonic() - began < 10  # 5 where nobody else wants the processor
    assert caught.value.param == "structured_outputs.grammar"
    assert compiler.open(regex("b"), (), 1).result(ANSWER_S)
    assert compiler.trial_pid == pid


def test_slow_forms_hold_up_neither_each_other_nor_a_quick_one(compiler):
    compiler.open(regex("a"), (), 1).result(ANSWER_S)
    slow = slow_form()
    doomed = [
        compiler.open(replace(slow, text=slow.text.replace('"a"', f'"{i}"')), (), 1)
        for i in range(3)
    ]
    assert compiler.open(regex("b"), (), 1).result(ANSWER_S)
    assert not any(each.done() for each in doomed)
    for each in doomed:
        with pytest.raises(ParameterError, match="takes more than 2 seconds"):
            each.result(ANSWER_S)
    assert compiler.open(regex("c"), (), 1).result(ANSWER_S)


def test_requests_with_one_form_compile_it_once(compiler, monkeypatch):
    compiled = []
    compile_form = GrammarCompiler._compile
    monkeypatch.setattr(
        GrammarCompiler,
        "_compile",
        lambda self, form: compiled.append(form.text) or compile_form(self, form),
    )
    opened = [compiler.open(regex("[ab]{3}"), (), 1) for _ in range(20)]
    assert len({each.result(ANSWER_S)[0].mask([]) for each in opened}) == 1
    assert compiled == ["[ab]{3}"]


def test_a_trial_process_that_dies_is_replaced(compiler):
    compiler.open(regex("a"), (), 1).result(ANSWER_S)
    pid = compiler.trial_pid
    os.kill(pid, signal.SIGKILL)
    assert compiler.open(regex("b"), (), 1).result(ANSWER_S)
    assert compiler.trial_pid not in (pid, None)


def test_without_an_answer_the_form_is_refused_and_may_be_asked_again(compiler, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ParameterError, match="did not answer"):
            compiler.open(regex("a"), (), 1).result(ANSWER_S)
    assert compiler.open(regex("a"), (), 1).result(ANSWER_S)


def test_the_cache_forgets_what_was_used_least_lately(compiler, monkeypatch):
    monkeypatch.setattr(compiling, "MAX_CACHED", 3)
    for text in ("a", "b", "c", "a", "d"):
        compiler.open(regex(text), (), 1).result(ANSWER_S)
    assert compiler.num_cached == 3
    assert [compiler.open(regex(text), (), 1).done() for text in ("a", "d", "c")] == [True] * 3
    assert not compiler.open(regex("b"), (), 1).done()


def test_the_cache_is_bounded_in_bytes(compiler, monkeypatch):
    compiler.open(regex("x"), (), 1).result(ANSWER_S)
    limit = 4 * compiler.cached_bytes
    assert limit >= 4 * compiling.ENTRY_BYTES
    monkeypatch.setattr(compiling, "MAX_CACHED_BYTES", limit)
    for number in range(12):
        compiler.open(regex(f"x{number}"), (), 1).result(ANSWER_S)
        assert compiler.cached_bytes <= limit
    assert 1 <= compiler.num_cached <= 8


def test_what_a_lexer_learns_counts_too(compiler, tokenizer, monkeypatch):
    (state,) = compiler.open(regex(".*a.{30}"), (), 1).result(ANSWER_S)
    monkeypatch.setattr(grammar, "KNOWN_MASK_S", 0.0)  # every mask teaches it something
    before = compiler.cached_bytes
    ids = tokenizer.encode("a quick brown fox jumps over a lazy dog")
    for i in range(len(ids)):
        state.mask(ids[:i])
    learnt = compiler.cached_bytes - before
    assert learnt > 0
    monkeypatch.setattr(grammar, "LEARNT_BYTES_PER_S", 1e15)
    state.mask(ids)
    assert compiler.cached_bytes - before == grammar.MAX_LEARNT_BYTES


def test_closing_ends_the_trial_process(tokenizer):
    compiler = GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, frozenset({2}))
    compiler.open(regex("a"), (), 1).result(ANSWER_S)
    pid = compiler.trial_pid
    compiler.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
