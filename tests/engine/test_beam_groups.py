"""Beams among other requests: whatever is shared, preempted or aborted, the texts are the same."""

import random
from collections import Counter
from contextlib import suppress

import pytest

from engine.beam_search import BeamSearch
from engine.capacity import CapacityError
from engine.sampling_params import ParameterError, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import FinishReason
from tests.engine.scheduler_driver import EOS, LIMITS
from tests.engine.scripted_runner import ScriptedRunner

VOCAB_SIZE = 40


def candidates_after(token_ids, count):
    """Log-probabilities that depend on every known token."""
    draw = random.Random(hash(tuple(token_ids)))
    logits = [(token_id, -8 * draw.random()) for token_id in range(VOCAB_SIZE)]
    return tuple(sorted(logits, key=lambda pair: -pair[1])[:count])


def next_of(sequence):
    if sequence.params.num_beams > 1:
        return candidates_after(sequence.token_ids, VOCAB_SIZE)
    return candidates_after(sequence.token_ids, 1)[0][0]


def texts_alone(prompt, params):
    """The search with nothing around it: ids of each text, and whether it stopped."""
    search = BeamSearch(params, params.stop_ids(frozenset({EOS})))
    while search.live:
        search.advance({
            beam: candidates_after([*prompt, *beam.generated_ids], VOCAB_SIZE)
            for beam in search.live
        })  # fmt: skip
    return [
        (each.beam.generated_ids, FinishReason.STOP if each.stopped else FinishReason.LENGTH)
        for each in search.best()[: params.n]
    ]


def some_params(draw):
    max_tokens = draw.randint(1, 10)
    if draw.random() < 0.4:
        return SamplingParams(max_tokens=max_tokens, n=draw.randint(1, 3))
    num_beams = draw.choice((2, 3, 4, 6))
    groups = draw.choice([g for g in (1, 2, 3) if num_beams % g == 0])
    return SamplingParams(
        max_tokens=max_tokens,
        num_beams=num_beams,
        n=draw.randint(1, num_beams),
        length_penalty=draw.choice((-1.0, 0.0, 1.0, 2.0)),
        early_stopping=draw.choice((True, False, "never")),
        num_beam_groups=groups,
        diversity_penalty=1.5 if groups > 1 else 0.0,
        stop_token_ids=draw.choice(((), (3,), (3, 5))),
    )


class World:
    """A scheduler and a runner that remembers what lies in each slot of each block."""

    def __init__(self, **limits):
        limits = LIMITS | limits
        self.scheduler = Scheduler(**limits)
        self.runner = ScriptedRunner(
            next_of,
            vocab_size=VOCAB_SIZE,
            num_blocks=limits["num_blocks"],
            block_size=limits["block_size"],
        )
        self.requests = {}  # name -> (prompt, params, sequences)
        self.now = 0.0

    def add(self, prompt, params, **options):
        name = str(len(self.requests))
        sequences = self.scheduler.add(name, prompt, params, seed=0, **options)
        self.requests[name] = (prompt, params, sequences)
        return name

    def step(self):
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check()
        assert not plan.empty or not self.scheduler.num_running
        self.scheduler.update(plan, self.runner.run(plan).tokens, self.now)
        self.scheduler.check()

    def drain(self, max_steps=3000):
        for _ in range(max_steps):
            if not self.scheduler.unfinished:
                return
            self.step()
        raise AssertionError("a search does not end")

    def check_texts(self, name):
        prompt, params, sequences = self.requests[name]
        found = [(s.generated_ids, s.finish_reason) for s in sequences[: params.n]]
        assert found == texts_alone(prompt, params)
        assert all(not s.generated_ids for s in sequences[params.n :])


@pytest.mark.parametrize("seed", range(60))
def test_texts_do_not_depend_on_what_happens_around(seed):
    draw = random.Random(seed)
    world = World(
        num_blocks=draw.choice((42, 60, 120)),
        block_size=draw.choice((1, 3, 4)) if seed % 3 else 4,
        max_num_seqs=draw.choice((6, 8, 16)),
        max_num_batched_tokens=draw.choice((7, 12, 64)),
        enable_prefix_caching=draw.random() < 0.7,
    )
    shared = [draw.randrange(1, VOCAB_SIZE) for _ in range(9)]
    aborted = set()
    for _ in range(40):
        if draw.random() < 0.35:
            prompt = [*shared[: draw.randint(0, 9)], draw.randrange(1, VOCAB_SIZE)]
            try:
                world.add(prompt, some_params(draw), priority=draw.choice((0, 0, 0, 1)))
            except CapacityError:
                continue
        if world.requests and draw.random() < 0.08:
            name = draw.choice(list(world.requests))
            aborted |= {name} if world.scheduler.abort(name) else set()
            world.scheduler.check()
        world.step()
    world.drain()
    assert world.scheduler.num_free_blocks == world.scheduler.num_blocks
    for name, (_, params, sequences) in world.requests.items():
        if name in aborted:
            assert FinishReason.ABORT in {s.finish_reason for s in sequences}
        elif params.num_beams > 1:
            world.check_texts(name)


@pytest.mark.parametrize("num_before", [2, 3, 4, 5, 6])
def test_beams_are_preempted_and_computed_again_from_their_tokens(num_before):
    """A search takes all blocks; others of higher priority take some or all of them away."""
    params = SamplingParams(
        max_tokens=17, num_beams=4, n=4, early_stopping="never", ignore_eos=True
    )
    world = World(num_blocks=24, max_num_batched_tokens=7, enable_prefix_caching=False)
    names = [world.add([1] * 7, params)]
    for _ in range(num_before):
        world.step()
    world.add([2] * 7, SamplingParams(max_tokens=3, n=2), priority=1)
    for _ in range(num_before):
        world.step()
    names.append(world.add([3] * 7, params, priority=1))
    world.drain()
    assert world.scheduler.num_preemptions > 0
    for name in names:
        world.check_texts(name)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_beams", [2, 3])
@pytest.mark.parametrize("early", [1, 2, 3, 4])
def test_beams_behind_one_that_waits_for_their_blocks_let_it_go_first(
    early, num_beams, enable_prefix_caching
):
    """What came before holds too much for the search, then waits for what the search holds."""
    world = World(
        num_blocks=6, block_size=16, max_num_seqs=4, enable_prefix_caching=enable_prefix_caching
    )
    world.add([5] * 68, SamplingParams(max_tokens=3, n=2, ignore_eos=True))
    for _ in range(early):
        world.step()
    params = SamplingParams(max_tokens=14, num_beams=num_beams, n=2, ignore_eos=True)
    names = [world.add([7] * 10, params), world.add([9], SamplingParams(max_tokens=4))]
    world.drain(300)
    world.check_texts(names[0])


@pytest.mark.parametrize("first_seed", range(0, 400, 40))
def test_every_search_ends_where_there_is_hardly_room(first_seed):
    for seed in range(first_seed, first_seed + 40):
        draw = random.Random(seed)
        world = World(
            num_blocks=draw.choice((5, 6, 8, 11, 16, 24)),
            block_size=draw.choice((1, 3, 4, 8)),
            max_num_seqs=draw.choice((2, 3, 4, 6, 16)),
            max_num_batched_tokens=draw.choice((3, 7, 12, 64)),
            enable_prefix_caching=draw.random() < 0.6,
        )
        for _ in range(30):
            if draw.random() < 0.4:
                prompt = [draw.randrange(1, VOCAB_SIZE) for _ in range(draw.choice((1, 4, 12, 19)))]
                with suppress(ParameterError):
                    world.add(prompt, some_params(draw), priority=draw.choice((0, 0, 0, 1)))
            world.step()
        world.drain()


def test_beams_share_the_blocks_of_what_they_have_in_common():
    params = SamplingParams(max_tokens=9, num_beams=4, ignore_eos=True)
    world = World(num_blocks=64)
    prompt = list(range(1, 33))  # 8 blocks
    world.add(prompt, params)
    for _ in range(4):
        world.step()
    holders = Counter(block for s in world.scheduler._running for block in s.block_table[:8])
    assert len(holders) == 8
    assert set(holders.values()) == {4}
    assert world.scheduler.num_blocks - world.scheduler.num_free_blocks <= 8 + 4


def test_a_search_that_is_cut_short_gives_its_best_beams():
    params = SamplingParams(max_tokens=50, num_beams=4, n=2, ignore_eos=True)
    world = World()
    name = world.add([5, 6], params, deadline=4.5)
    world.drain()
    *_, sequences = world.requests[name]
    assert {s.finish_reason for s in sequences} == {FinishReason.DEADLINE}
    assert [s.num_generated_tokens for s in sequences] == [4, 4, 0, 0]


def test_a_beam_without_numbers_ends_its_search_and_nothing_else():
    params = SamplingParams(max_tokens=6, num_beams=3, n=2)
    world = World()
    broken, whole = world.add([5, 6], params), world.add([7], params)
    for _ in range(3):
        world.step()
    *_, sequences = world.requests[broken]
    running = next(s for s in sequences if s.block_table)
    world.scheduler.finish(running, FinishReason.ERROR, error="numerical_error: no")
    world.scheduler.check()
    assert {(s.finish_reason, s.error) for s in sequences} == {
        (FinishReason.ERROR, "numerical_error: no")
    }
    world.drain()
    world.check_texts(whole)


def test_fewer_texts_than_asked_for_are_an_error_of_the_rest():
    params = SamplingParams(max_tokens=3, num_beams=4, n=3)
    world = World()
    world.runner._next_token = lambda _: ((7, -1.0),)
    name = world.add([5], params)
    world.drain()
    *_, sequences = world.requests[name]
    assert sequences[0].generated_ids == [7, 7, 7]
    assert [s.finish_reason for s in sequences[:3]] == ["length", "error", "error"]
    assert sequences[1].error == ("invalid_request: the options allow 1 different outputs, n is 3")


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"max_num_seqs": 3}, "num_beams must be at most the 3 sequences of a step here, got 4"),
        (
            {"num_blocks": 11},  # of 4 tokens each; 3 for each beam
            "prompt + max_tokens is 10 tokens, the KV cache takes with 4 beams 8 at most",
        ),
    ],
)
def test_beams_that_can_never_run_together_are_refused(limits, error):
    with pytest.raises(ParameterError, match=f"^{error.replace('+', '[+]')}$") as caught:
        World(**limits).add([5] * 4, SamplingParams(max_tokens=6, num_beams=4))
    assert caught.value.param == "num_beams"


def test_a_search_begins_at_the_prompt():
    params = SamplingParams(max_tokens=6, num_beams=4, n=2)
    World().add([5], params, generated=((), ()))
    with pytest.raises(ParameterError, match="generated must have 2 samples of at most 0 tokens"):
        World().add([5], params, generated=((7,), ()))
