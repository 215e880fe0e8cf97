"""Steps made beside a running one: the same texts as in turn, whatever ends, leaves or joins."""

import random
import secrets
from collections import Counter

import pytest
import torch

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.sampler import NumericalError
from engine.sequence import FinishReason
from engine.token_rules import TokenRules
from tests.engine import test_all_features as all_features
from tests.engine.delayed_runner import DelayedRunner
from tests.engine.mixes import TinyModel, write_model
from tests.engine.scripted_runner import Clock, ScriptedRunner, hashed_token

BLOCK_SIZE = 4


# in the first, who was preempted comes back in the plan that has it so, with a token unknown
SEEDS = [374, *(secrets.randbelow(2**32) for _ in range(11))]


@pytest.fixture(params=SEEDS, ids=lambda _: "seed")
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
        presence_penalty=draw.choice((0.0, 0.0, 1.0)),  # its draws wait for the step before
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
        num_blocks=draw.choice((11, 12, 24, 64)),  # few make preemptions
        max_num_seqs=draw.choice((3, 16)),
        max_num_batched_tokens=draw.choice((4, 8, 64)),
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


def test_decodes_overlap_whatever_their_options_and_beams_do_not(tokenizer):
    def options(**asked):
        return SamplingParams(max_tokens=20, ignore_eos=True, **asked)

    for params, least, most in (
        (options(), 18, 20),
        (options(presence_penalty=1.0), 18, 20),
        (options(logprobs=1), 18, 20),
        (options(bad_words=("x",)), 18, 20),
        (options(allowed_token_ids=(3, 4)), 18, 20),
        (options(prompt_logprobs=1), 18, 20),
    ):
        engine, runner = an_engine(tokenizer, DelayedRunner)
        engine.generate([[3, 4, 5], [6]], params)
        assert least <= runner.num_overlapped <= most, params
    engine, runner = an_engine(tokenizer, DelayedRunner)
    engine.generate([[3, 4, 5]], [SamplingParams(max_tokens=4, n=3, ignore_eos=True)])
    assert runner.num_overlapped > 0  # once they have forked


def test_one_row_with_a_penalty_holds_up_none_of_the_others(tokenizer):
    engine, runner = an_engine(tokenizer, DelayedRunner)
    plain = SamplingParams(max_tokens=20, ignore_eos=True)
    penalized = SamplingParams(max_tokens=20, ignore_eos=True, presence_penalty=1.0)
    outputs = engine.generate([[3, 4, 5], [6], [7, 8]], [plain, penalized, plain])
    assert all(len(output.completions[0].token_ids) == 20 for output in outputs)
    assert runner.num_overlapped >= 18
    assert engine.stats().num_steps <= 22, "nobody sat out a step"


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
    return TinyModel(write_model(tmp_path_factory.mktemp("overlap"), num_layers=1))


@pytest.fixture
def launched(model, monkeypatch):
    """How steps were begun: (whether beside another, what their draws waited for)."""
    counts, launch = Counter(), model.runner.launch

    def counted(plan, before):
        step = launch(plan, before)
        counts[before is not None, type(step).__name__] += 1
        return step

    monkeypatch.setattr(model.runner, "launch", counted)
    monkeypatch.setattr(model.runner, "overlaps", True)
    return counts


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("num_steps", "seed"),
    [(500, 497564220), (500, None), pytest.param(6000, None, marks=pytest.mark.long)],
)
def test_every_row_among_all_others_is_as_it_is_alone(
    model, launched, monkeypatch, num_steps, seed
):
    """Forms, penalties, scores, beams, forks, stops; what joins, leaves, comes back, is preempted.

    Tokens stay where the model draws them, on a CPU by plain PyTorch.
    """
    # that one has a deadline which passes while no step is on its way
    seed = secrets.randbelow(2**32) if seed is None else seed
    print("seed", seed)  # noqa: T201
    monkeypatch.setattr(all_features, "NUM_ASKS", 40)
    monkeypatch.setattr(model.runner, "overlaps", False)
    crowd = all_features.Crowd(model, random.Random(seed))
    # beams hold up all others: few of them, or hardly a step would be beside another
    beams = [pair for pair in crowd.pairs if pair[0].params.num_beams > 1]
    crowd.pairs = [pair for pair in crowd.pairs if pair not in beams[1:]]
    monkeypatch.setattr(model.runner, "overlaps", True)
    done = 0
    while done < num_steps or crowd.engine.has_unfinished:
        crowd.step(more=done < num_steps)
        done = crowd.engine.stats().num_steps
    stats = crowd.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert crowd.drawn["like alone"] > num_steps / 10
    assert launched[True, "Undrawn"] > num_steps / 4, launched
    # hardly a step has no row that hangs on the token before
    assert num_steps < 1000 or launched[True, "OnDevice"] > 0, launched


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "options",
    [{"presence_penalty": 2.0}, {"frequency_penalty": -2.0}, {"repetition_penalty": 2.0}],
    ids=lambda options: next(iter(options)),
)
def test_a_penalty_counts_the_token_before(model, launched, monkeypatch, options):
    prompts = [[9, 30], [9, 31]]
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0, **options)
    found = model.engine().generate(prompts, params)
    assert launched[True, "Undrawn"] > 20
    monkeypatch.setattr(model.runner, "overlaps", False)
    wanted = model.engine().generate(prompts, params)
    assert [f.completions for f in found] == [w.completions for w in wanted]


@pytest.mark.usefixtures("one_thread")
def test_a_row_that_can_draw_nothing_is_told_why_and_alone(model, launched, monkeypatch):
    """One step late its place in the next step holds no token: what is there must harm nobody."""
    forward = model.runner._model.forward

    def forward_tokens(token_ids, *args, **kwargs):
        assert token_ids.min() >= 0, "no token of the vocabulary"
        return forward(token_ids, *args, **kwargs)

    monkeypatch.setattr(model.runner._model, "forward", forward_tokens)
    engine = model.engine()
    plain = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0)
    banned = SamplingParams(
        max_tokens=9, ignore_eos=True, allowed_token_ids=(40,), bad_words=("x",), temperature=0.0
    )
    wanted = engine.generate([[9, 30], [9, 31]], plain)
    rules = TokenRules(bad_words=((40, 40, 40),))
    engine.add_request("0", [9, 30], plain)
    engine.add_request("1", [9, 31], plain)
    engine.add_request("2", [9, 32], banned)
    engine.add_request("3", [9, 33], plain)
    engine._requests["2"].samples[0].sequence.token_rules = rules
    outputs = {}
    while engine.has_unfinished:
        running = engine._scheduler._running
        sick = [s for s in running if s.request_id == "3" and s.num_generated_tokens == 3]
        for layer in model.runner.kv_cache.layers if sick else ():
            layer[sick[0].block_table[0]] = torch.nan
        for update in engine.step():
            if update.output is not None:
                outputs[update.request_id] = update.output.completions[0]
        engine.check()
    for layer in model.runner.kv_cache.layers:
        layer.zero_()
    assert [outputs[i].token_ids for i in "01"] == [w.completions[0].token_ids for w in wanted]
    assert outputs["2"].token_ids == (40, 40)
    assert outputs["2"].error.startswith("invalid_request: the options allow no token at place 4")
    assert outputs["3"].error.startswith("numerical_error: the logits for token ")
    assert len(outputs["3"].token_ids) in (3, 4)
    assert launched[True, "Undrawn"] > 1


@pytest.mark.usefixtures("one_thread")
def test_what_made_a_step_wait_may_be_aborted_before_the_step_is_read(model, launched):
    engine = model.engine()
    plain = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0)
    [wanted] = engine.generate([[9, 30]], plain)
    engine.add_request("beams", [9, 31], SamplingParams(max_tokens=9, num_beams=2, n=1))
    engine.add_request("plain", [9, 30], plain)
    for _ in range(3):
        engine.step()
    engine.abort("beams")
    outputs = []
    while engine.has_unfinished:
        outputs += [update.output for update in engine.step() if update.output is not None]
    assert outputs[0].completions == wanted.completions
