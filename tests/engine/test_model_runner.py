"""Setting up a model on a device, and a step from plan to tokens."""

import copy
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.kernels.registry import REFERENCE
from engine.model_runner import ModelRunner, device_of
from engine.sampler import NumericalError, SampledRow, sample
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.shards import Shard
from engine.step_plan import ScheduledSequence, StepPlan

pytestmark = pytest.mark.usefixtures("one_thread")


def build(folder, **settings):
    return ModelRunner(
        EngineConfig(**{"model": str(folder), "device": "cpu", "num_blocks": 64} | settings)
    )


@pytest.fixture(scope="module")
def runner(tiny_llama_dir):
    return build(tiny_llama_dir)


def a_sequence(token_ids, block_table, **options):
    return Sequence(
        seq_id=0,
        request_id="a",
        sample_index=0,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(**{"max_tokens": 1, "temperature": 0.0} | options),
        seed=3,
        block_table=block_table,
    )


def whole(*sequences, copies=()):
    """A plan that computes all that is left of each sequence."""
    rows = (ScheduledSequence(s, s.num_uncomputed_tokens) for s in sequences)
    return StepPlan(tuple(rows), tuple(copies))


def test_the_model_says_what_it_is(runner, tiny_llama_dir):
    assert (runner.vocab_size, runner.max_model_len) == (384, 512)
    assert runner.eos_token_ids == {2}
    assert runner.num_blocks == 64
    assert runner.model_id == build(tiny_llama_dir, num_blocks=1).model_id
    assert runner.model_id != build(tiny_llama_dir, dtype="bfloat16").model_id


def test_the_cache_takes_the_bytes_it_is_given(tiny_llama_dir):
    runner = build(tiny_llama_dir, num_blocks=None, kv_cache_bytes=1_000_000)
    block_bytes = sum(layer[0].nbytes for layer in runner.kv_cache.layers)
    assert runner.num_blocks == 1_000_000 // block_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "device.*'tpu'"),
        ({"device": "cpu:x"}, "device.*'cpu:x'"),
        ({"max_model_len": 513}, "max_model_len.*512.*513"),
        ({"num_blocks": None, "kv_cache_bytes": 10}, "10"),
    ],
)
def test_settings_that_cannot_be_met_are_named(tiny_llama_dir, settings, message):
    with pytest.raises(ValueError, match=message):
        build(tiny_llama_dir, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_named(tiny_llama_dir):
    with pytest.raises(ValueError, match="cuda:0"):
        build(tiny_llama_dir, device="cuda:0")


def test_more_ranks_than_gpus_are_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks = {count: EngineConfig(model="m", tensor_parallel=count) for count in (1, 2, 3)}
    with pytest.raises(ValueError, match="tensor_parallel is 3, but there are 2 CUDA devices"):
        device_of(ranks[3], 0)
    assert [device_of(ranks[2], rank) for rank in range(2)] == [
        torch.device("cuda:0"), torch.device("cuda:1"),
    ]  # fmt: skip
    assert device_of(ranks[1], 0) == torch.device("cuda")


@pytest.fixture(scope="module")
def plain_runner(tiny_llama_dir):
    """Whose model is computed by kernels that could stand for a GPU's."""
    return build(tiny_llama_dir, kernels="reference")


@pytest.mark.parametrize(
    ("changed", "overlaps", "captures"),
    [
        ({}, True, True),
        ({"num_ranks": 2}, False, False),
        ({"device": "cpu"}, False, True),  # of which `_captured` makes nothing
        ({"kernels": REFERENCE}, True, False),  # they read lengths back to the host
        ({"model": object()}, True, False),  # as transformers' code may
        ({"overlap_steps": False}, False, True),
        ({"cuda_graphs": False}, True, False),
    ],
    ids=lambda value: ", ".join(value) or "a GPU" if isinstance(value, dict) else None,
)
def test_steps_overlap_and_are_captured_where_they_can_be_and_are_to(
    plain_runner, changed, overlaps, captures
):
    asked = {name: changed.get(name, True) for name in ("overlap_steps", "cuda_graphs")}
    runner = copy.copy(plain_runner)
    runner._config = EngineConfig(model="m", max_num_seqs=4, **asked)
    runner.device = torch.device(changed.get("device", "cuda"))
    runner._group = SimpleNamespace(shard=Shard(0, changed.get("num_ranks", 1)))
    runner._kernels = changed.get("kernels") or replace(REFERENCE)
    runner._model = changed.get("model", runner._model)
    assert runner._overlaps() is overlaps
    assert bool(runner._shapes()) is captures
    if runner.device.type == "cpu":
        assert runner._captured() is None


def test_max_model_len_may_be_less_than_the_models(tiny_llama_dir):
    assert build(tiny_llama_dir, max_model_len=100).max_model_len == 100


def test_an_empty_plan_does_nothing(runner):
    assert runner.run(StepPlan((), ())).tokens == []


def test_a_row_that_is_not_at_its_end_gives_no_token(runner):
    sequence = a_sequence(range(10, 30), [5, 9])
    plan = StepPlan((ScheduledSequence(sequence, 13),), ())
    assert runner.run(plan).tokens == [None]
    sequence.num_computed_tokens = 13
    (token,) = runner.run(whole(sequence)).tokens
    assert [token] == runner.run(whole(a_sequence(range(10, 30), [1, 2]))).tokens


def test_copied_blocks_stand_before_the_step_reads_them(runner):
    original = a_sequence(range(10, 30), [5, 9])
    (token,) = runner.run(whole(original)).tokens
    fork = a_sequence(range(10, 30), [5, 7])
    fork.num_computed_tokens = 19
    assert runner.run(whole(fork, copies=[(9, 7)])).tokens == [token]


def test_half_precision_gives_nearly_the_same_logits(tiny_llama_dir, runner):
    sequence = a_sequence(range(10, 50), [0, 1, 2])
    exact = runner.logits(whole(sequence).scheduled)
    for dtype, bound in (("bfloat16", 0.15), ("float16", 0.02)):
        found = build(tiny_llama_dir, dtype=dtype).logits(whole(sequence).scheduled)
        assert found.dtype == torch.float32
        assert 0 < (found - exact).abs().max() < bound


def test_a_row_of_nan_fails_alone_and_leaves_its_neighbours_their_bytes(tiny_llama_dir):
    runner = build(tiny_llama_dir)
    sequences = [a_sequence(range(10 + n, 30), [2 * n, 2 * n + 1]) for n in range(8)]
    healthy = runner.run(whole(*sequences)).tokens
    assert None not in healthy
    sick = sequences[3]
    sick.token_ids.append(7)
    for layer in runner.kv_cache.layers:
        layer[sick.block_table[0]] = torch.nan
    sick.num_computed_tokens = sick.num_tokens - 1
    results = runner.run(whole(*sequences)).tokens
    assert isinstance(results[3], NumericalError)
    assert re.search(r"token \d+", str(results[3]))
    assert results[:3] + results[4:] == healthy[:3] + healthy[4:]


def test_what_a_step_leaves_in_free_slots_never_reaches_another_sequence(runner):
    expected = runner.run(whole(a_sequence(range(40, 59), [3, 4]))).tokens
    for layer in runner.kv_cache.layers:
        layer.fill_(torch.nan)
    assert runner.run(whole(a_sequence(range(40, 59), [3, 4]))).tokens == expected
    for layer in runner.kv_cache.layers:
        layer.zero_()


def test_a_draw_is_keyed_by_seed_and_place_in_the_sequence(runner):
    for length in range(5, 25):
        sequence = a_sequence(range(length), [0, 1], temperature=2.0)
        sequence.num_prompt_tokens = 4
        sequence.sample_index = length % 3  # changes nothing
        row = SampledRow(params=sequence.params, seed=3, position=length)
        expected = sample(runner.logits(whole(sequence).scheduled), [row])
        assert runner.run(whole(sequence)).tokens == expected


def test_draws_do_not_depend_on_the_company_or_the_cuts(runner):
    params = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, ignore_eos=True)

    def generate(num_batched_tokens, company):
        scheduler = Scheduler(
            num_blocks=64,
            block_size=16,
            max_num_seqs=8,
            max_num_batched_tokens=num_batched_tokens,
            max_model_len=512,
        )
        (sequence,) = scheduler.add("mine", list(range(20, 77)), params, seed=12345)
        for n in range(company):
            scheduler.add(str(n), list(range(30, 40 + n)), params, seed=n)
        while scheduler.unfinished:
            plan = scheduler.schedule(0.0)
            scheduler.update(plan, runner.run(plan).tokens, 0.0)
        return sequence.generated_ids

    alone = generate(512, 0)
    assert generate(9, 3) == alone
    assert generate(200, 6) == alone
