"""Steps made beside a running one: the same texts as in turn, whatever ends, leaves or joins."""

import random
import secrets

import pytest

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.sampler import NumericalError
from engine.sequence import FinishReason
from engine.structured_outputs import StructuredOutputs
from tests.engine.delayed_runner import DelayedRunner
from tests.engine.mixes import (
    TinyModel,
    some_options,
    some_prompt,
    some_sampling,
    words,
    write_model,
)
from tests.engine.scripted_runner import Clock, ScriptedRunner, hashed_token

BLOCK_SIZE = 4


@pytest.fixture(params=[secrets.randbelow(2**32) for _ in range(12)], ids=lambda _: "seed")
def draw(request):
    return random.Random(request.param)


def an_engine(tokenizer, kind, *, num_blocks=64, next_token=None, runner_settings=(), **config):
    runner = kind(
        next_token or hashed_token(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        **dict(runner_settings),
    )
    settings = EngineConfig(model="scripted", block_size=BLOCK_SIZE, **config)
    return LLMEngine(settings, clock=Clock(), tokenizer=tokenizer, runner=runner), runner


def some_request(draw, vocab_size):
    """Prompts that share beginnings; ends by length, by a likely stop id, samples that fork."""
    shared = [(7 * i) % vocab_size for i in range(draw.choice((0, 4, 9, 16)))]
    prompt = shared + [draw.randrange(vocab_size) for _ in range(draw.randint(1, 6))]
    stops = draw.sample(range(vocab_size), draw.choice((0, vocab_size // 8)))
    params = SamplingParams(
        max_tokens=draw.randint(1, 20),
        temperature=draw.choice((0.0, 1.0)),
        seed=draw.randrange(2**32),
        n=draw.choice((1, 1, 1, 3)),
        stop_token_ids=tuple(stops),
        min_tokens=draw.choice((0, 0, 1)),
        presence_penalty=draw.choice((0.0, 0.0, 0.0, 1.0)),  # rules out the overlap while it runs
    )
    return prompt, params, draw.choice((0, 0, 1))


def alone(tokenizer, prompt, params):
    engine, _ = an_engine(tokenizer, ScriptedRunner)
    (output,) = engine.generate([prompt], params)
    return output


def test_texts_are_those_of_steps_in_turn(tokenizer, draw):
    requests = [some_request(draw, tokenizer.vocab_size) for _ in range(draw.randint(2, 10))]
    engine, _ = an_engine(
        tokenizer,
        DelayedRunner,
        num_blocks=draw.choice((24, 30, 64)),  # few make preemptions
        max_num_seqs=draw.choice((3, 16)),
        max_num_batched_tokens=draw.choice((8, 64)),
        enable_prefix_caching=draw.random() < 0.7,
    )
    waiting, outputs = list(enumerate(requests)), {}
    while waiting or engine.has_unfinished:
        while waiting and draw.random() < 0.5:
            i, (prompt, params, priority) = waiting.pop(0)
            engine.add_request(str(i), prompt, params, priority=priority)
        for update in engine.step():
            if update.output is not None:
                outputs[int(update.request_id)] = update.output
        if draw.random() < 0.05:
            i = draw.randrange(len(requests))
            output = engine.abort(str(i))
            if output is not None:
                outputs[i] = output
        engine.check()
    assert len(outputs) == len(requests)
    for i, (prompt, params, _) in enumerate(requests):
        wanted = alone(tokenizer, prompt, params)
        for found, expected in zip(outputs[i].completions, wanted.completions, strict=True):
            if found.finish_reason is FinishReason.ABORT:
                assert found.token_ids == expected.token_ids[: len(found.token_ids)]
            else:
                assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
                assert found.finish_reason == expected.finish_reason
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_decodes_overlap_and_others_do_not(tokenizer):
    plain = SamplingParams(max_tokens=20, ignore_eos=True)
    for params, least, most in (
        (plain, 18, 20),
        (SamplingParams(max_tokens=20, ignore_eos=True, presence_penalty=1.0), 0, 0),
        (SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1), 0, 0),
        (SamplingParams(max_tokens=20, ignore_eos=True, bad_words=("x",)), 0, 0),
    ):
        engine, runner = an_engine(tokenizer, DelayedRunner)
        engine.generate([[3, 4, 5], [6]], params)
        assert least <= runner.num_overlapped <= most, params
    engine, runner = an_engine(tokenizer, DelayedRunner)
    engine.generate([[3, 4, 5]], [SamplingParams(max_tokens=4, n=3, ignore_eos=True)])
    assert runner.num_overlapped > 0  # once they have forked


def test_a_row_without_numbers_fails_alone_and_one_step_late(tokenizer):
    def next_token(sequence):
        if sequence.arrival == 1 and sequence.num_generated_tokens >= 3:
            return NumericalError("the logits are not finite numbers")
        return hashed_token(tokenizer.vocab_size)(sequence)

    engine, _ = an_engine(tokenizer, DelayedRunner, next_token=next_token)
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0)
    outputs = engine.generate([[3, 4], [3, 4, 5], [6, 7]], params)
    reasons = [output.completions[0].finish_reason for output in outputs]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert len(outputs[1].completions[0].token_ids) == 3
    assert outputs[0].completions == alone(tokenizer, [3, 4], params).completions


@pytest.mark.parametrize(("most", "failed"), [(12, set()), (5, {1})])
def test_a_lack_of_memory_is_survived_beside_a_running_step(tokenizer, most, failed):
    fail = {"fail": lambda num_tokens: num_tokens > most}
    engine, runner = an_engine(tokenizer, DelayedRunner, runner_settings=fail.items())
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)
    prompts = [[3], [4] * 13, [5]]
    engine.add_request("0", prompts[0], params)
    outputs = {}
    for _ in range(2):
        engine.step()
    for i in (1, 2):
        engine.add_request(str(i), prompts[i], params)
    while engine.has_unfinished:
        for update in engine.step():
            if update.output is not None:
                outputs[int(update.request_id)] = update.output.completions
        engine.check()
    assert runner.num_overlapped
    for i, prompt in enumerate(prompts):
        if i in failed:
            assert outputs[i][0].error.startswith("resource_exhausted: ")
        else:
            assert outputs[i] == alone(tokenizer, prompt, params).completions


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TinyModel(write_model(tmp_path_factory.mktemp("overlap")))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [secrets.randbelow(2**32) for _ in range(2)], ids=lambda _: "seed")
def test_a_model_says_the_same_with_all_options_mixed(model, monkeypatch, seed):
    """Tokens stay where the model draws them, on a CPU by plain PyTorch."""
    draw = random.Random(seed)
    requests = []
    chosen = StructuredOutputs(kind="choice", text='["the quick", "a job"]')
    requests.append((some_prompt(draw), SamplingParams(max_tokens=8, structured_outputs=chosen)))
    for _ in range(6):
        options = some_options(draw, 8) | some_sampling(draw, 8)
        if draw.random() < 0.4:
            options = {"temperature": draw.choice((0.0, 1.0)), "top_p": 0.9, "min_tokens": 2}
        requests.append(
            (some_prompt(draw), SamplingParams(max_tokens=8, seed=seed % 997, **options))
        )

    def texts(overlaps):
        monkeypatch.setattr(model.runner, "overlaps", overlaps)
        engine, outputs = model.engine(), {}

        def step():
            for update in engine.step():
                if update.output is not None:
                    outputs[update.request_id] = words(update.output)
            engine.check()

        for i, (prompt, params) in enumerate(requests):
            engine.add_request(str(i), list(prompt), params)
            step()
        while engine.has_unfinished:
            step()
        assert len(outputs) == len(requests)
        return outputs

    launched = []
    launch = model.runner.launch
    monkeypatch.setattr(
        model.runner, "launch", lambda *step: launched.append(type(made := launch(*step))) or made
    )
    assert texts(True) == texts(False)
    assert launched
