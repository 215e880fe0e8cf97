"""Compiling beside the steps: tried under limits, kept within bounds, replaced when killed."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest

from engine.parameter_error import ParameterError
from engine.structured import compiler as compiling
from engine.structured import grammar
from engine.structured.compiler import CompilerBusyError, GrammarCompiler
from engine.structured.trial_process import TrialProcess
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


def slow_forms(number):
    slow = slow_form()
    return [replace(slow, text=slow.text.replace('"a"', f'"{i}"')) for i in range(number)]


def unhurried(monkeypatch, *cpu_s):
    """Limits on processor time alone, for machines on which little of it can be had."""
    monkeypatch.setattr(compiling, "ANSWER_LIMIT_S", 2 * ANSWER_S)
    limits = [replace(compiling.LIMITS[0], cpu_s=each, clock_s=ANSWER_S) for each in cpu_s]
    monkeypatch.setattr(compiling, "LIMITS", tuple(limits))


def test_a_form_that_takes_too_long_is_refused_for_good_and_the_next_one_works(
    compiler, monkeypatch
):
    unhurried(monkeypatch, 0.2, 0.1, 0.1)
    compiler.open(regex("a"), (), 1).result(ANSWER_S)
    pid = compiler.trial_pid
    with pytest.raises(ParameterError, match="takes more than 2 seconds to compile") as caught:
        compiler.open(slow_form(), (), 1).result(ANSWER_S)
    assert not isinstance(caught.value, CompilerBusyError)
    assert caught.value.param == "structured_outputs.grammar"
    assert compiler.open(slow_form(), (), 1).done()
    assert compiler.open(regex("b"), (), 1).result(ANSWER_S)
    assert compiler.trial_pid == pid


def test_a_form_that_there_was_no_time_for_may_be_asked_again(compiler, monkeypatch):
    """As when many come that take long: whether this one does is not known."""
    unhurried(monkeypatch, 0.2, 60.0, 60.0)
    monkeypatch.setattr(compiling, "ANSWER_LIMIT_S", 0.3)
    first, second = slow_forms(2)
    opened = [compiler.open(form, (), 1) for form in (first, first, second)]
    for each in opened:
        with pytest.raises(CompilerBusyError, match="try again later") as caught:
            each.result(ANSWER_S)
        assert caught.value.param == "structured_outputs.grammar"
    assert compiler.num_cached == 0
    assert not compiler.open(first, (), 1).done()


def chains(number):
    """As hopeless, and short."""
    rules = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40))
    texts = [f'root ::= r0\n{rules}\nr40 ::= "a{i}"' for i in range(number)]
    return [StructuredOutputs(kind="grammar", text=text) for text in texts]


def test_whatever_the_crowd_each_form_is_answered_within_the_limit_and_a_cheap_one_made(compiler):
    """Also those that had no first trial by then."""
    compiler.open(regex("a"), (), 1).result(ANSWER_S)
    took = {}
    opened = []
    for form in (*chains(150), regex("[0-9]{3}")):
        asked_at = time.monotonic()
        opened.append(compiler.open(form, (), 1))
        opened[-1].add_done_callback(
            lambda _, at=asked_at, text=form.text: took.update({text: time.monotonic() - at})
        )
    assert opened.pop().result(ANSWER_S)
    for each in opened:
        with pytest.raises(ParameterError):
            each.result(ANSWER_S)
    assert max(took.values()) < compiling.ANSWER_LIMIT_S + 1.0  # another process may have had one
    assert took["[0-9]{3}"] < compiling.ANSWER_LIMIT_S


def test_a_form_that_waits_for_its_first_trial_in_vain_may_be_asked_again(compiler, monkeypatch):
    unhurried(monkeypatch, 60.0, 60.0, 60.0)
    compiler.open(regex("a"), (), 1).result(ANSWER_S)
    monkeypatch.setattr(compiling, "ANSWER_LIMIT_S", 0.5)
    opened = [compiler.open(form, (), 1) for form in slow_forms(5)]
    for each in opened:
        with pytest.raises(CompilerBusyError, match="no time for it"):
            each.result(ANSWER_S)
    monkeypatch.undo()
    assert compiler.open(regex("b"), (), 1).result(ANSWER_S)


def test_the_limit_counts_from_when_the_trial_process_was_there(compiler, monkeypatch):
    """A first form waits for a vocabulary to be loaded; that is no crowd."""
    verdict = TrialProcess.verdict

    def late(self, form, limits):
        time.sleep(2.0)
        return verdict(self, form, limits)

    monkeypatch.setattr(TrialProcess, "verdict", late)
    monkeypatch.setattr(compiling, "ANSWER_LIMIT_S", 1.5)
    monkeypatch.setattr(compiling, "STARTING_S", 0.01)
    assert compiler.open(regex("a"), (), 1).result(ANSWER_S)
    with pytest.raises(CompilerBusyError):
        compiler.open(regex("b"), (), 1).result(ANSWER_S)


def test_a_quick_form_passes_those_that_take_long(compiler, monkeypatch):
    unhurried(monkeypatch, 0.2, 60.0, 60.0)
    doomed = [compiler.open(form, (), 1) for form in slow_forms(3)]
    assert compiler.open(regex("b"), (), 1).result(ANSWER_S)
    assert not any(each.done() for each in doomed)


def test_a_large_form_passes_those_that_take_very_long(compiler, monkeypatch):
    unhurried(monkeypatch, 0.1, 0.3, 60.0)
    hopeless = [compiler.open(form, (), 1) for form in slow_forms(3)]
    large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(800)}}
    form = StructuredOutputs(kind="json", text=json.dumps(large))
    assert compiler.open(form, (), 1).result(ANSWER_S)
    assert not any(each.done() for each in hopeless)


def test_trials_run_at_a_lower_priority_and_are_few(compiler, monkeypatch):
    """So that many cannot take the processor from the engine's steps."""
    assert sum(compiling.NUM_THREADS) <= 4
    assert [each.niceness for each in compiling.LIMITS] == [10, 15, 19]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr(compiling, "ANSWER_LIMIT_S", 12.0)
    compiler.open(regex("a"), (), 1).result(ANSWER_S)
    opened = [compiler.open(form, (), 1) for form in slow_forms(5)]
    seen, most = set(), 0
    while not all(each.done() for each in opened):
        lowered = [nice for nice in nicenesses(compiler.trial_pid) if nice > own]
        seen.update(lowered)
        most = max(most, len(lowered))
    # of a test that is at a lower priority itself, those are seen that are lower still
    first, second, last = (max(own, each.niceness) for each in compiling.LIMITS)
    assert {first, second} - {own} <= seen <= {first, second, last}
    assert most <= 4
    threads = [each for each in threading.enumerate() if each.name.startswith("grammar-")]
    assert threads
    for each in threads:
        assert os.getpriority(os.PRIO_PROCESS, each.native_id) == max(
            own, compiling.BUILDING_NICENESS
        )
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def nicenesses(pid):
    """Of the trials that run now: they come and go while one looks."""
    found = []
    try:
        for each in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(each.nice())
    except psutil.NoSuchProcess:
        pass
    return found


def test_requests_with_one_form_compile_it_once(compiler, monkeypatch):
    tried = []
    verdict = GrammarCompiler._verdict
    monkeypatch.setattr(
        GrammarCompiler,
        "_verdict",
        lambda self, form, index: tried.append(form.form.text) or verdict(self, form, index),
    )
    opened = [compiler.open(regex("[ab]{3}"), (), 1) for _ in range(20)]
    assert len({each.result(ANSWER_S)[0].mask([]) for each in opened}) == 1
    assert tried == ["[ab]{3}"]


def test_requests_with_one_slow_form_take_one_place_among_the_others(compiler, monkeypatch):
    unhurried(monkeypatch, 60.0, 60.0, 60.0)
    same = [compiler.open(slow_form(), (), 1) for _ in range(20)]
    assert compiler.open(regex("b"), (), 1).result(ANSWER_S)
    assert not any(each.done() for each in same)


def test_a_form_that_nobody_waits_for_any_more_is_not_tried(compiler, monkeypatch):
    tried = []
    verdict = GrammarCompiler._verdict
    monkeypatch.setattr(
        GrammarCompiler,
        "_verdict",
        lambda self, form, index: tried.append(form.form.text) or verdict(self, form, index),
    )
    unhurried(monkeypatch, 1.0, 0.1, 0.1)
    before = [compiler.open(form, (), 1) for form in slow_forms(2)]  # both threads are busy
    dropped = [compiler.open(regex("dropped"), (), 1) for _ in range(2)]
    wanted = [compiler.open(regex("wanted"), (), 1) for _ in range(2)]
    assert all(each.cancel() for each in (*dropped, wanted[0]))
    assert wanted[1].result(ANSWER_S)
    for each in before:
        with pytest.raises(ParameterError):
            each.result(ANSWER_S)
    assert "wanted" in tried
    assert "dropped" not in tried
    assert compiler.open(regex("dropped"), (), 1).result(ANSWER_S)


def test_a_fault_of_ours_reaches_who_waits(compiler, monkeypatch):
    monkeypatch.setattr(GrammarCompiler, "_built", lambda self, verdict: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compiler.open(regex("a"), (), 1).result(ANSWER_S)


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


def test_however_many_forms_come_memory_is_bounded(compiler, monkeypatch):
    """5,000 of them once took no more: 256 kept, 32 MiB by the estimate, 32 MiB of the process."""
    process = psutil.Process()
    names = [f"field{i}" for i in range(compiling.MAX_CACHED + 100)]
    schemas = [
        {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
        for name in names
    ]
    before = process.memory_info().rss
    monkeypatch.setattr(compiling, "ANSWER_LIMIT_S", 10 * ANSWER_S)
    opened = [
        compiler.open(StructuredOutputs(kind="json", text=json.dumps(each)), (), 1)
        for each in schemas
    ]
    while opened:
        assert opened.pop(0).result(ANSWER_S)
        assert compiler.num_cached <= compiling.MAX_CACHED
        assert compiler.cached_bytes <= compiling.MAX_CACHED_BYTES
    assert compiler.num_cached == compiling.MAX_CACHED
    assert process.memory_info().rss - before < 128 << 20


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
