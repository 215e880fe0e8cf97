"""A request whose form is being compiled holds up nobody, and can be ended like any other."""

import time

import pytest

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.sampling_params import ParameterError
from engine.sequence import FinishReason
from engine.structured_outputs import StructuredOutputs
from tests.engine.structured.test_compiler import slow_form

FREE = SamplingParams(max_tokens=5, seed=1)


@pytest.fixture
def engine(tiny_llama_dir):
    return LLMEngine(EngineConfig(model=str(tiny_llama_dir), num_threads=1, num_blocks=64))


def asking(form, **options):
    return SamplingParams(structured_outputs=form, **({"max_tokens": 20, "seed": 2} | options))


def regex(text):
    return StructuredOutputs(kind="regex", text=text, param="structured_outputs.regex")


def run(engine):
    ended, refused = {}, {}
    while engine.has_unfinished:
        engine.check()
        for update in engine.step():
            if update.output is not None:
                ended[update.request_id] = update.output
            if update.refusal is not None:
                refused[update.request_id] = update.refusal
    return ended, refused


def test_others_go_on_while_a_form_is_compiled(engine):
    engine.add_request("slow", "the quick", asking(slow_form()))
    engine.add_request("free", "the quick", FREE)
    assert engine.stats().num_waiting == 2
    ended = set()
    while "free" not in ended:
        ended |= {update.request_id for update in engine.step() if update.output is not None}
    assert engine.has_unfinished
    _, refused = run(engine)
    assert refused["slow"].param == "structured_outputs.grammar"


def test_a_form_that_cannot_be_used_ends_its_request_alone(engine):
    engine.add_request("bad", "the quick", asking(regex("(a")))
    engine.add_request("good", "the quick", asking(regex("[0-9]{4}")))
    engine.add_request("free", "the quick", FREE)
    ended, refused = run(engine)
    assert set(ended) == {"good", "free"}
    assert set(refused) == {"bad"}
    assert "unclosed" in str(refused["bad"])
    with pytest.raises(ParameterError, match="unclosed"):  # known by now
        engine.add_request("bad", "the quick", asking(regex("(a")))
    assert not engine.has_unfinished


def test_a_request_can_be_aborted_while_its_form_is_compiled(engine):
    engine.add_request("slow", "the quick", asking(slow_form(), n=2))
    with pytest.raises(ParameterError, match="already here"):
        engine.add_request("slow", "the quick", FREE)
    output = engine.abort("slow")
    assert [each.finish_reason for each in output.completions] == [FinishReason.ABORT] * 2
    assert not engine.has_unfinished
    engine.check()


def test_a_deadline_counts_while_a_form_is_compiled(engine):
    engine.add_request("late", "the quick", asking(regex("a{30}")), deadline_s=1e-9)
    ended, _ = run(engine)
    assert ended["late"].completions[0].finish_reason is FinishReason.DEADLINE


def test_what_can_never_fit_is_refused_before_its_form_is_compiled(engine):
    with pytest.raises(ParameterError, match="at most") as caught:
        engine.add_request("large", "the quick", asking(slow_form(), max_tokens=5000))
    assert caught.value.param == "max_tokens"
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("request_id", "generated", "param"),
    [
        ("here", (), "request_id"),
        ("new", [[5], [6]], "generated"),
        ("new", [[5] * 21], "generated"),
    ],
)
def test_what_the_scheduler_would_refuse_is_refused_at_once(engine, request_id, generated, param):
    """Later it would end a request that runs under the same name, or break an abort."""
    engine.add_request("here", "the quick", FREE)
    with pytest.raises(ParameterError) as caught:
        engine.add_request(request_id, "the quick", asking(regex("ab")), generated=generated)
    assert caught.value.param == param
    ended, refused = run(engine)
    assert (set(ended), refused) == ({"here"}, {})


def test_generate_computes_nothing_when_a_form_cannot_be_used(engine):
    with pytest.raises(ParameterError, match="unclosed"):
        engine.generate(["the quick"] * 2, [FREE, asking(regex("(a"))])
    assert not engine.has_unfinished
    assert engine.stats().num_steps == 0


def test_a_step_with_nothing_but_a_form_to_wait_for_does_not_spin(engine):
    engine.add_request("slow", "the quick", asking(slow_form()))
    began, num_turns = time.monotonic(), 0
    while engine.has_unfinished and time.monotonic() - began < 0.3:
        assert engine.step() == []
        num_turns += 1
    assert 1 <= num_turns <= 40
    engine.abort("slow")
