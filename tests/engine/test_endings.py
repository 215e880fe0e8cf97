"""Loops, timeouts, and what of an ending stands in the text."""

import pytest

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.sampling_params import RepetitionDetection
from engine.sequence import FinishReason
from engine.tokenizer import Tokenizer
from tests.engine.scripted_runner import ScriptedRunner
from tests.engine.tokenizers_on_disk import byte_fallback, byte_level, write

LOOP = RepetitionDetection(max_pattern_size=3, min_count=3)


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=["bytes", "pieces"])
def tokenizer(request, tmp_path_factory):
    return Tokenizer.load(write(tmp_path_factory.mktemp("tokenizer"), request.param()))


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def engine_saying(tokenizer):
    def build(text):
        (end,) = tokenizer.eos_token_ids
        script = [i for char in text for i in tokenizer.encode_word(char)[-1:]] + [end] * 50
        runner = ScriptedRunner(
            lambda sequence: script[sequence.num_generated_tokens],
            vocab_size=tokenizer.vocab_size,
            block_size=4,
        )
        config = EngineConfig(model="scripted", block_size=4)
        clock = Clock()
        engine = LLMEngine(config, clock=clock, tokenizer=tokenizer, runner=runner)
        engine.clock = clock
        return engine

    return build


def completion_of(engine, generated=(), **options):
    params = SamplingParams(**{"max_tokens": 40, "temperature": 0.0} | options)
    engine.add_request("a", [7], params, generated=generated)
    output, text = None, ""
    while engine.has_unfinished:
        for update in engine.step():
            text += "".join(delta.text for delta in update.deltas)
            output = update.output
        engine.check()
    (completion,) = output.completions
    assert text == completion.text or generated
    return completion


def test_a_loop_ends_with_a_reason_of_its_own(engine_saying):
    completion = completion_of(engine_saying("to ehehehehe"), repetition_detection=LOOP)
    assert (completion.finish_reason, completion.text) == (FinishReason.REPETITION, "to eheheh")
    assert completion.stop_reason is None


def test_without_asking_a_loop_goes_on(engine_saying):
    completion = completion_of(engine_saying("ehehehehehe"))
    assert completion.finish_reason is FinishReason.STOP


def test_a_loop_counts_only_after_min_tokens(engine_saying):
    completion = completion_of(
        engine_saying("ehehehehehe"), repetition_detection=LOOP, min_tokens=8
    )
    assert completion.finish_reason is FinishReason.REPETITION
    assert len(completion.token_ids) == 9


@pytest.mark.parametrize("cut", [1, 4, 5, 6])
def test_a_loop_is_found_where_a_checkpoint_was_cut(engine_saying, cut):
    whole = completion_of(engine_saying("hehehehehe"), repetition_detection=LOOP)
    assert len(whole.token_ids) == 6
    resumed = completion_of(
        engine_saying("hehehehehe"),
        repetition_detection=LOOP,
        generated=[list(whole.token_ids[:cut])],
    )
    assert resumed == whole


def test_a_stop_string_in_what_the_end_shows_counts_only_after_min_tokens(tokenizer):
    """A character that stays half is shown at the end, as U+FFFD."""
    half = tokenizer.encode_word("😀")[-1]
    runner = ScriptedRunner(lambda _: half, vocab_size=tokenizer.vocab_size, block_size=4)
    config = EngineConfig(model="scripted", block_size=4)
    engine = LLMEngine(config, tokenizer=tokenizer, runner=runner)
    reasons = [
        completion_of(
            engine, max_tokens=1, min_tokens=num, stop=("\N{REPLACEMENT CHARACTER}",)
        ).finish_reason
        for num in (0, 1)
    ]
    assert reasons == [FinishReason.STOP, FinishReason.LENGTH]


def test_a_stop_string_goes_before_a_loop(engine_saying):
    completion = completion_of(engine_saying("eeeee"), repetition_detection=LOOP, stop=("eee",))
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, "eee")


def test_a_stop_string_may_stand_in_the_text(engine_saying):
    options = {"stop": ("nor", "sos"), "include_stop_str_in_output": True}
    completion = completion_of(engine_saying("he is nos"), **options)
    assert (completion.text, completion.finish_reason) == ("he is nos", FinishReason.STOP)
    completion = completion_of(engine_saying("the senor says"), **options)
    assert (completion.text, completion.stop_reason) == ("the senor", "nor")


def test_a_stop_id_may_stand_in_the_text(engine_saying, tokenizer):
    stop = tokenizer.encode_word("s")[-1]
    options = {"stop_token_ids": (stop,)}
    assert completion_of(engine_saying("hesh"), **options).text == "he"
    completion = completion_of(engine_saying("hesh"), **options, include_stop_str_in_output=True)
    assert (completion.text, completion.stop_reason) == ("hes", stop)


def test_special_tokens_may_stand_in_the_text(engine_saying):
    options = {"ignore_eos": True, "max_tokens": 4}
    assert completion_of(engine_saying("he"), **options).text == "he"
    shown = completion_of(engine_saying("he"), **options, skip_special_tokens=False)
    assert shown.text == "he</s></s>"
    ended = completion_of(
        engine_saying("he"), skip_special_tokens=False, include_stop_str_in_output=True
    )
    assert (ended.text, ended.finish_reason) == ("he</s>", FinishReason.STOP)


@pytest.mark.parametrize(
    ("timeout_s", "deadline_s", "timed_out"),
    [(5.0, None, True), (5.0, 60.0, True), (60.0, 5.0, False), (None, 5.0, False)],
)
def test_the_nearer_of_timeout_and_deadline_ends_it_and_is_told_apart(
    engine_saying, timeout_s, deadline_s, timed_out
):
    engine = engine_saying("hhhhhhhh")
    params = SamplingParams(max_tokens=8, timeout_s=timeout_s)
    engine.add_request("a", [7], params, deadline_s=deadline_s)
    for _ in range(3):
        assert engine.step()[0].output is None
    engine.clock.now += 5.0
    (update,) = engine.step()
    (completion,) = update.output.completions
    assert completion.finish_reason is FinishReason.DEADLINE
    assert completion.timed_out == timed_out
    assert completion.text == "hhh"


def test_what_ends_in_time_has_not_timed_out(engine_saying):
    completion = completion_of(engine_saying("he"), timeout_s=5.0)
    assert (completion.finish_reason, completion.timed_out) == (FinishReason.STOP, False)
