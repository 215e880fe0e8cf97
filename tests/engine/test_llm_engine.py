"""Requests in, text and statistics out: the engine over a runner that needs no model."""

import bisect
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.outputs import STEP_BOUNDS_S
from engine.sampler import NumericalError
from engine.sampling_params import ParameterError
from engine.sequence import FinishReason
from tests.engine.scripted_runner import Clock, ScriptedRunner, hashed_token

BLOCK_SIZE = 4


@pytest.fixture
def engine_of(tokenizer):
    """Builds an engine whose sequences go on as `next_token` says, or say `texts` in turn."""

    def build(next_token=None, *, texts=None, num_blocks=64, **config):
        if texts is not None:
            scripts = [spell(tokenizer, text) for text in texts]

            def next_token(sequence):
                script = scripts[(sequence.arrival + sequence.sample_index) % len(scripts)]
                return script[sequence.num_generated_tokens]

        runner = ScriptedRunner(
            next_token or hashed_token(tokenizer.vocab_size),
            vocab_size=tokenizer.vocab_size,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
        )
        settings = EngineConfig(model="scripted", block_size=BLOCK_SIZE, **config)
        engine = LLMEngine(settings, clock=Clock(), tokenizer=tokenizer, runner=runner)
        engine.runner = runner
        return engine

    return build


def spell(tokenizer, text):
    """One id a byte, then the end of the sequence for ever."""
    ids = [tokenizer.encode(char) for char in text]
    return [i for group in ids for i in group] + [1] * 200


def params(max_tokens=8, **options):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)


def run(engine):
    """Steps until all is done; the updates of each request."""
    updates = {}
    while engine.has_unfinished:
        for update in engine.step():
            updates.setdefault(update.request_id, []).append(update)
        engine.check()
    return updates


def only_output(engine):
    (updates,) = run(engine).values()
    assert [u.output is not None for u in updates] == [False] * (len(updates) - 1) + [True]
    return updates[-1].output


def test_a_request_comes_back_as_deltas_and_one_output(engine_of, tokenizer):
    engine = engine_of(texts=["hé😀!"])
    engine.add_request("a", "the prompt", params(max_tokens=50))
    updates = run(engine)["a"]
    output = updates[-1].output
    (completion,) = output.completions
    assert completion.text == "hé😀!"
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_reason is None
    assert completion.token_ids[-1] == 1
    deltas = [delta for update in updates for delta in update.deltas]
    assert "".join(delta.text for delta in deltas) == "hé😀!"
    assert [i for delta in deltas for i in delta.token_ids] == list(completion.token_ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in delta.text for delta in deltas)
    assert output.stats.prompt_tokens == len(tokenizer.encode("the prompt"))
    assert output.stats.completion_tokens == len(completion.token_ids)


def test_times_are_in_order(engine_of):
    engine = engine_of(texts=["abc"])
    engine.add_request("a", "x", params())
    stats = only_output(engine).stats
    times = [stats.arrived_at, stats.first_scheduled_at, stats.first_token_at, stats.finished_at]
    assert times == sorted(times)
    assert len(set(times)) == 4


def test_a_prompt_may_be_text_ids_or_messages(engine_of, tokenizer):
    engine = engine_of()
    ids = tokenizer.encode("the")
    messages = [{"role": "user", "content": "the"}]
    engine.add_request("text", "the", params())
    engine.add_request("ids", ids, params())
    engine.add_request("chat", messages=messages, params=params())
    updates = run(engine)
    texts = {name: group[-1].output.completions[0].text for name, group in updates.items()}
    assert texts["text"] == texts["ids"]
    assert updates["chat"][-1].output.stats.prompt_tokens == len(tokenizer.encode_chat(messages))


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [3.0]}, "prompt"),
        ({"prompt": "x" * 200}, "prompt"),
        ({"prompt": "x", "params": params(max_tokens=500)}, "max_tokens"),
        ({"prompt": "x", "params": params(stop_token_ids=(10**6,))}, "stop_token_ids"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "x", "deadline_s": float("nan")}, "deadline_s"),
        ({"prompt": "x", "generated": [[10**6]]}, "generated"),
        ({"prompt": "x", "generated": [[1], [1]]}, "generated"),
        ({"prompt": "x", "request_id": "here"}, "request_id"),
        ({"prompt": "x", "params": {"max_tokens": 3}}, "params"),
        ({"prompt": "x", "params": None}, "params"),
        ({"prompt": "x", "priority": None}, "priority"),
        ({"prompt": "x", "priority": float("nan")}, "priority"),
        ({"prompt": "x" * 20, "cache_salt": "a"}, "cache_salt"),
        ({"prompt": "x" * 20, "cache_salt": None}, "cache_salt"),
    ],
    ids=itertools.count(),
)
def test_a_bad_request_is_refused_by_name_and_leaves_nothing(engine_of, arguments, param):
    engine = engine_of()
    engine.add_request("here", "the", params())
    with pytest.raises(ParameterError) as refused:
        engine.add_request(**{"request_id": "bad", "params": params(), **arguments})
    assert refused.value.param == param
    engine.check()
    assert set(run(engine)) == {"here"}


def test_requests_that_have_ended_leave_no_deadline_behind(engine_of):
    engine = engine_of()
    for index in range(500):
        engine.add_request(str(index), "the", params(max_tokens=1), deadline_s=1e6)
        if index % 2:
            engine.abort(str(index))
        else:
            run(engine)
    assert len(engine._scheduler._deadlines) < 100


def test_a_request_larger_than_the_cache_is_refused_with_both_numbers(engine_of):
    engine = engine_of(num_blocks=4)
    with pytest.raises(ParameterError, match=r"is 18 tokens.* 16 at most"):
        engine.add_request("a", [5] * 10, params(max_tokens=8))


def test_a_stop_string_ends_the_sequence_and_is_no_part_of_the_text(engine_of):
    engine = engine_of(texts=["one END two"])
    engine.add_request("a", "x", params(max_tokens=50, stop=("END", "two")))
    updates = run(engine)["a"]
    (completion,) = updates[-1].output.completions
    assert completion.text == "one "
    assert completion.stop_reason == "END"
    assert completion.finish_reason is FinishReason.STOP
    assert len(completion.token_ids) == 7
    assert "".join(d.text for u in updates for d in u.deltas) == "one "
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_stop_string_completed_by_the_last_token_allowed_is_a_stop(engine_of):
    engine = engine_of(texts=["abEND"])
    engine.add_request("a", "x", params(max_tokens=5, stop=("END",)))
    (completion,) = only_output(engine).completions
    assert (completion.text, completion.finish_reason) == ("ab", FinishReason.STOP)


def test_what_was_held_for_a_stop_string_comes_with_the_end(engine_of):
    engine = engine_of(texts=["abEN"])
    engine.add_request("a", "x", params(max_tokens=4, stop=("END",)))
    (completion,) = only_output(engine).completions
    assert (completion.text, completion.finish_reason) == ("abEN", FinishReason.LENGTH)


def test_a_stop_string_counts_only_after_min_tokens(engine_of):
    engine = engine_of(texts=["END END"])
    engine.add_request("a", "x", params(max_tokens=50, min_tokens=4, stop=("END",)))
    (completion,) = only_output(engine).completions
    assert completion.text == "END "
    assert len(completion.token_ids) == 7


def test_a_stop_id_ends_the_sequence_and_has_no_text(engine_of, tokenizer):
    (z,) = tokenizer.encode("z")
    engine = engine_of(texts=["abzc"])
    engine.add_request("a", "x", params(max_tokens=50, stop_token_ids=(z,)))
    (completion,) = only_output(engine).completions
    assert (completion.text, completion.stop_reason) == ("ab", z)
    assert completion.token_ids[-1] == z


def test_end_of_sequence_may_be_ignored(engine_of):
    engine = engine_of(texts=["ab"])
    engine.add_request("a", "x", params(max_tokens=6, ignore_eos=True))
    (completion,) = only_output(engine).completions
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == 6
    assert completion.text == "ab"


def test_samples_of_one_request_end_together(engine_of):
    engine = engine_of(texts=["a", "bbbb", "cc"])
    engine.add_request("a", "the prompt", params(max_tokens=50, n=3))
    output = only_output(engine)
    assert [c.text for c in output.completions] == ["a", "bbbb", "cc"]
    assert [c.index for c in output.completions] == [0, 1, 2]
    assert output.stats.completion_tokens == 2 + 5 + 3


def test_a_deadline_is_a_reason_of_its_own(engine_of):
    engine = engine_of()
    engine.add_request("a", "x", params(max_tokens=100, ignore_eos=True), deadline_s=0.02)
    engine.add_request("b", "x", params(max_tokens=20, ignore_eos=True))
    updates = run(engine)
    (late,) = updates["a"][-1].output.completions
    assert late.finish_reason is FinishReason.DEADLINE
    assert 0 < len(late.token_ids) < 100
    assert updates["b"][-1].output.completions[0].finish_reason is FinishReason.LENGTH


def test_abort_frees_the_blocks_at_once_and_tells_what_there_was(engine_of):
    engine = engine_of(texts=["abcdefgh"])
    engine.add_request("a", [5] * 30, params(max_tokens=50))
    for _ in range(4):
        engine.step()
    output = engine.abort("a")
    (completion,) = output.completions
    assert (completion.text, completion.finish_reason) == ("abcd", FinishReason.ABORT)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert not engine.has_unfinished
    assert engine.abort("a") is None
    assert engine.step() == []


def test_a_row_without_numbers_fails_alone(engine_of, tokenizer):
    follow = hashed_token(tokenizer.vocab_size)

    def next_token(sequence):
        if sequence.request_id == "3" and sequence.num_generated_tokens == 2:
            return NumericalError("logits are not finite")
        return follow(sequence)

    prompts = [[7, i, i] for i in range(8)]
    healthy = engine_of().generate(prompts, params(ignore_eos=True))
    outputs = engine_of(next_token).generate(prompts, params(ignore_eos=True))
    (failed,) = outputs[3].completions
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error == "numerical_error: logits are not finite"
    assert len(failed.token_ids) == 2
    for i in (0, 1, 2, 4, 5, 6, 7):
        assert outputs[i].completions == healthy[i].completions


class LittleMemory:
    """A device with memory for steps of at most `max_tokens` tokens."""

    def __init__(self, runner, max_tokens):
        self.max_tokens = max_tokens
        self.sizes = []
        self._run = runner.run

    def __call__(self, plan):
        self.sizes.append(plan.num_tokens)
        if plan.num_tokens > self.max_tokens:
            raise torch.OutOfMemoryError("out of memory")
        return self._run(plan)


def test_a_step_too_large_for_memory_is_halved(engine_of):
    prompts = [[7, *range(i, i + 9)] for i in range(4)]
    expected = engine_of().generate(prompts, params(ignore_eos=True))
    engine = engine_of()
    engine.runner.run = memory = LittleMemory(engine.runner, 20)
    outputs = engine.generate(prompts, params(ignore_eos=True))
    assert [o.completions for o in outputs] == [o.completions for o in expected]
    assert memory.sizes[:2] == [40, 20]


def test_when_half_a_step_is_too_large_the_largest_sequence_fails(engine_of):
    prompts = [[7] * 4, [8] * 30, [9] * 4]
    expected = engine_of().generate(prompts, params(ignore_eos=True))
    engine = engine_of()
    engine.runner.run = LittleMemory(engine.runner, 10)
    outputs = engine.generate(prompts, params(ignore_eos=True))
    (failed,) = outputs[1].completions
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error.startswith("resource_exhausted: ")
    assert [outputs[i].completions for i in (0, 2)] == [expected[i].completions for i in (0, 2)]


class NoMemoryToCopy:
    """A device that runs out of memory on its first `times` steps with block copies."""

    def __init__(self, runner, times):
        self.times = times
        self._run = runner.run

    def __call__(self, plan):
        if plan.block_copies and plan.scheduled and self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("out of memory")
        return self._run(plan)


@pytest.mark.parametrize("times", [1, 2])
def test_block_copies_are_made_even_when_a_step_is_cut(engine_of, times):
    """The runner fails when a forked sequence finds its prompt uncopied."""
    options = SamplingParams(max_tokens=8, ignore_eos=True, seed=5, n=3)
    (expected,) = engine_of().generate([[7] * 6], options)
    engine = engine_of()
    engine.runner.run = memory = NoMemoryToCopy(engine.runner, times)
    (output,) = engine.generate([[7] * 6], options)
    assert memory.times == 0
    healthy = [c for c in output.completions if c.finish_reason is not FinishReason.ERROR]
    assert len(healthy) == (3 if times == 1 else 2)
    assert all(c == expected.completions[c.index] for c in healthy)


def test_another_error_in_a_step_is_not_hidden(engine_of):
    def next_token(sequence):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine_of(next_token).generate(["x"], params())


def test_unseeded_requests_get_their_seeds_from_the_engines_stream(engine_of):
    def texts(seed):
        engine = engine_of(seed=seed)
        options = SamplingParams(max_tokens=8, ignore_eos=True)
        outputs = engine.generate(["x", "x"], options)
        return [o.completions[0].token_ids for o in outputs]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert texts(1)[0] != texts(1)[1]


def test_a_seed_fixes_the_output_whatever_runs_beside_it(engine_of):
    seeded = SamplingParams(max_tokens=8, ignore_eos=True, seed=5, n=2)
    alone = engine_of().generate(["the"], seeded)
    crowd = engine_of(max_num_seqs=3).generate(
        ["x", "the", "y"], [params(), seeded, SamplingParams(max_tokens=3)]
    )
    assert crowd[1].completions == alone[0].completions


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_resumed_request_ends_as_if_nothing_had_happened(tokenizer, data):
    """Cut at any number of tokens, stop strings and ids inside the checkpoint included."""
    cut = data.draw(st.integers(0, 14))
    n = data.draw(st.integers(1, 3))
    text = data.draw(st.text(alphabet="abEND é", min_size=1, max_size=12))
    script = spell(tokenizer, text)

    def build():
        runner = ScriptedRunner(
            lambda sequence: script[sequence.num_generated_tokens],
            vocab_size=tokenizer.vocab_size,
            block_size=BLOCK_SIZE,
        )
        config = EngineConfig(model="scripted", block_size=BLOCK_SIZE)
        return LLMEngine(config, clock=Clock(), tokenizer=tokenizer, runner=runner)

    options = params(max_tokens=14, stop=("END", "Da"), min_tokens=2, n=n)
    whole = build()
    whole.add_request("a", "the", options)
    expected = only_output(whole)
    first = build()
    first.add_request("a", "the", options)
    checkpoint = first.checkpoint("a")
    for _ in range(cut):
        if first.has_unfinished:
            checkpoint = first.checkpoint("a")
            first.step()
    second = build()
    second.add_request("a", "the", options, generated=checkpoint)
    output = only_output(second)
    assert output.completions == expected.completions
    assert output.stats.completion_tokens == expected.stats.completion_tokens


def test_a_checkpoint_that_is_complete_ends_without_computing(engine_of, tokenizer):
    engine = engine_of(texts=["never"])
    done = spell(tokenizer, "ab END")[:6]
    engine.add_request("a", "x", params(max_tokens=50, stop=("END",)), generated=[done])
    (completion,) = only_output(engine).completions
    assert completion.text == "ab "
    assert engine.runner.plans == []


def test_statistics_count_what_happened(engine_of):
    engine = engine_of(num_blocks=32, max_num_seqs=4)
    idle = engine.stats()
    assert (idle.free_seqs, idle.free_tokens) == (4, 32 * BLOCK_SIZE)
    engine.add_request("a", [5] * 10, params(max_tokens=6, ignore_eos=True))
    assert engine.stats().free_seqs == 3
    assert engine.stats().free_tokens == 32 * BLOCK_SIZE - 16
    engine.step()
    assert engine.stats().free_tokens == 32 * BLOCK_SIZE - 16
    run(engine)
    engine.add_request("b", [5] * 10, params(max_tokens=6, ignore_eos=True))
    output = only_output(engine)
    stats = engine.stats()
    assert output.stats.cached_tokens == 8
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (20, 8, 12)
    assert stats.num_steps == 12
    assert (stats.scheduled_tokens, stats.scheduled_seqs) == (10 + 5 + 2 + 5, 12)
    assert (stats.last_step_seqs, stats.last_step_tokens, stats.peak_step_seqs) == (1, 1, 1)
    assert stats.free_tokens == 32 * BLOCK_SIZE
    assert 0 < stats.run_s < stats.step_s
    assert sum(stats.steps_by_time) == stats.num_steps


def test_steps_are_counted_by_the_time_they_took(engine_of):
    engine = engine_of()
    engine.add_request("a", [5] * 10, params(max_tokens=6, ignore_eos=True))
    engine.step()
    before = engine.stats()
    for _ in range(4):
        engine.step()
    stats = engine.stats()
    step_s = (stats.step_s - before.step_s) / 4  # by a clock that ticks evenly
    at = bisect.bisect_left(STEP_BOUNDS_S, step_s)
    assert stats.steps_by_time[at] - before.steps_by_time[at] == 4
    assert sum(stats.steps_by_time) == stats.num_steps == 5


def test_outputs_of_generate_are_in_the_order_of_the_prompts(engine_of):
    prompts = [[7, i] for i in range(20)]
    options = [params(max_tokens=1 + (7 * i) % 5, ignore_eos=True) for i in range(20)]
    outputs = engine_of(max_num_seqs=3).generate(prompts, options)
    assert [len(o.completions[0].token_ids) for o in outputs] == [o.max_tokens for o in options]


def test_generate_takes_all_prompts_or_none(engine_of):
    engine = engine_of()
    with pytest.raises(ParameterError):
        engine.generate(["fine", ""], params())
    assert not engine.has_unfinished
    engine.check()


def test_generate_takes_no_text_for_a_list_of_letters(engine_of):
    engine = engine_of()
    with pytest.raises(ParameterError, match="a list of prompts"):
        engine.generate("the", params())
    assert not engine.has_unfinished


def test_few_blocks_change_no_output(engine_of):
    prompts = [[7, i, i, i, i] for i in range(6)]
    options = params(max_tokens=20, ignore_eos=True)
    roomy, tight = engine_of(), engine_of(num_blocks=12)
    expected, got = roomy.generate(prompts, options), tight.generate(prompts, options)
    assert [o.completions for o in got] == [o.completions for o in expected]
    assert tight.stats().num_preemptions > 0
    assert sum(o.stats.num_preemptions for o in got) == tight.stats().num_preemptions


@settings(max_examples=150, deadline=None)
@given(
    acts=st.lists(
        st.one_of(
            st.just("step"),
            st.tuples(st.just("abort"), st.integers(0, 12)),
            st.tuples(st.just("add"), st.integers(1, 12), st.integers(1, 3), st.integers(0, 2)),
        ),
        max_size=40,
    )
)
def test_however_requests_come_and_go_each_ends_once_and_no_block_is_lost(tokenizer, acts):
    runner = ScriptedRunner(
        hashed_token(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        num_blocks=14,
        block_size=BLOCK_SIZE,
    )
    config = EngineConfig(
        model="scripted", block_size=BLOCK_SIZE, max_num_seqs=5, max_num_batched_tokens=9
    )
    engine = LLMEngine(config, clock=Clock(), tokenizer=tokenizer, runner=runner)
    added, ended, text = [], [], {}

    def take(updates):
        for update in updates:
            for delta in update.deltas:
                key = (update.request_id, delta.sample_index)
                text[key] = text.get(key, "") + delta.text
            if update.output is not None:
                ended.append(update.output)
                for c in update.output.completions:
                    assert c.text == text.get((update.request_id, c.index), "")

    for act in acts:
        match act:
            case "step":
                take(engine.step())
            case ("abort", which):
                output = engine.abort(str(which))
                if output is not None:
                    ended.append(output)
            case ("add", length, n, priority):
                added.append(str(len(added)))
                options = SamplingParams(max_tokens=9, n=n, stop=("e", "th"))
                prompt = [5, 6, 7, *range(8, 8 + length)]
                engine.add_request(added[-1], prompt, options, priority=priority)
        engine.check()
    for _ in range(2000):
        if not engine.has_unfinished:
            break
        take(engine.step())
        engine.check()
    assert sorted(output.request_id for output in ended) == sorted(added)
    assert all(len(c.token_ids) <= 9 for output in ended for c in output.completions)
    assert engine.stats().num_free_blocks == 14
    assert engine.step() == []
