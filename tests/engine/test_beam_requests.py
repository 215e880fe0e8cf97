"""A search as a request: its choices, their text, and what is told of it while it runs."""

import pytest

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.model_runner import ModelRunner
from engine.sampler import NumericalError
from engine.sampling_params import ParameterError
from engine.tokenizer import Tokenizer
from tests.tiny_llama import write_tiny_llama

EOS = 2
SEARCH = SamplingParams(max_tokens=10, num_beams=4, n=3, logit_bias=((EOS, 4.0),))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(model=str(folder), block_size=4, num_blocks=128, max_num_seqs=8)
    return config, Tokenizer.load(folder), ModelRunner(config)


@pytest.fixture
def engine(model):
    config, tokenizer, runner = model
    return LLMEngine(config, tokenizer=tokenizer, runner=runner)


def run(engine):
    updates = []
    while engine.has_unfinished:
        updates += engine.step()
        engine.check()
    return updates


def test_its_choices_are_told_at_its_end_with_their_text(engine):
    engine.add_request("search", "the quick", SEARCH)
    (update,) = run(engine)
    output = update.output
    assert [choice.index for choice in output.completions] == [0, 1, 2]
    assert len({choice.token_ids for choice in output.completions}) == 3
    for choice, delta in zip(output.completions, update.deltas, strict=True):
        assert delta.token_ids == choice.token_ids
        assert delta.text == choice.text
        stopped = choice.token_ids[-1] == EOS
        assert choice.finish_reason == ("stop" if stopped else "length")
        spoken = choice.token_ids[:-1] if stopped else choice.token_ids
        assert choice.text == engine.tokenizer.decode(list(spoken))
    assert output.stats.completion_tokens == sum(len(c.token_ids) for c in output.completions)
    assert engine.stats().generated_tokens == output.stats.completion_tokens
    assert engine.stats().num_free_blocks == 128


def test_it_is_the_same_beside_samples_and_greedy_rows(engine):
    prompts = ["the quick", "a job is", "once upon", "what is"]
    sampled = SamplingParams(max_tokens=9, n=2, seed=5)
    options = [SEARCH, sampled, SamplingParams(max_tokens=9, temperature=0.0), SEARCH]
    together = engine.generate(prompts, options)
    for prompt, params, output in zip(prompts, options, together, strict=True):
        (alone,) = engine.generate([prompt], params)
        assert alone.completions == output.completions


def test_an_end_of_its_own_is_told_by_its_id(engine):
    params = SamplingParams(
        max_tokens=10, num_beams=3, n=3, stop_token_ids=(40,), logit_bias=((40, 9.0),)
    )
    (output,) = engine.generate(["the quick"], params)
    assert output.completions[0].stop_reason == 40
    assert output.completions[0].finish_reason == "stop"


def test_an_aborted_search_leaves_nothing(engine):
    params = SamplingParams(max_tokens=10, num_beams=4, n=3, ignore_eos=True)
    engine.add_request("search", "the quick", params)
    for _ in range(4):
        engine.step()
    assert engine.checkpoint("search") == ((), (), ())
    output = engine.abort("search")
    assert {choice.finish_reason for choice in output.completions} == {"abort"}
    assert [len(choice.token_ids) for choice in output.completions] == [4, 4, 4]
    engine.check()
    assert not engine.has_unfinished
    assert engine.stats().num_free_blocks == 128


def test_logits_that_are_no_numbers_fail_the_search_alone(model, engine, monkeypatch):
    *_, runner = model
    real = runner.run

    def run_broken(plan):
        result = real(plan)
        for i, row in enumerate(plan.scheduled):
            if row.sequence.request_id == "broken" and row.sequence.sample_index == 2:
                result.tokens[i] = NumericalError("no number")
        return result

    monkeypatch.setattr(runner, "run", run_broken)
    engine.add_request("broken", "the quick", SEARCH)
    engine.add_request("whole", "the quick", SEARCH)
    ends = {update.request_id: update.output for update in run(engine) if update.output}
    assert [(c.finish_reason, c.error) for c in ends["broken"].completions] == [
        ("error", "numerical_error: no number")
    ] * 3
    assert {c.finish_reason for c in ends["whole"].completions} <= {"stop", "length"}


def test_too_many_beams_for_the_engine_are_refused(engine):
    with pytest.raises(ParameterError, match="num_beams must be at most the 8 sequences"):
        engine.add_request("wide", "the quick", SamplingParams(max_tokens=4, num_beams=9))
    assert not engine.has_unfinished
