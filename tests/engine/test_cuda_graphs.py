"""Captured steps without a GPU: a stand-in replays the same function on the same memory.

What is proven is all but CUDA's own part: that a padded step gives what an eager one gives, that
what is padded is stored nowhere, and that nothing but the inputs' memory is read.
"""

import itertools
import random
import secrets
from collections import Counter

import numpy as np
import pytest
import torch

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.cuda_graphs import Shape, StepGraphs, shapes_for
from engine.model_runner import ModelRunner
from engine.step_batch import Stretch, flat_arrays
from tests.engine.mixes import write_model
from tests.engine.models.equality import a_runner

BLOCK_SIZE, NUM_BLOCKS = 4, 40
SHAPES = [Shape(*shape) for shape in ((1, 1), (2, 1), (4, 1), (6, 1), (1, 4), (3, 4), (5, 4))]
pytestmark = pytest.mark.usefixtures("one_thread")


class Replayed:
    """Writes a function's result to where the first one lies, as a graph does."""

    def __init__(self, run):
        self._run = run
        self.result = run()

    def replay(self):
        self.result.copy_(self._run())


def capture(run):
    graph = Replayed(run)
    return graph, graph.result


def captured(runner, shapes, max_blocks=16):
    with torch.inference_mode():
        return StepGraphs(
            lambda batch: runner._forward(batch, runner.kv_cache.layers),
            capture, shapes=shapes, max_blocks=max_blocks, device=runner.device,
        )  # fmt: skip


@pytest.fixture(params=[secrets.randbelow(2**32) for _ in range(4)], ids=lambda _: "seed")
def draw(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


@pytest.fixture(scope="module")
def runner(tiny_llama_dir):
    return a_runner(
        tiny_llama_dir, kernels="reference", dtype="float32", block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
    )  # fmt: skip


def some_step(draw, lengths):
    """So many tokens of each of some sequences, in blocks of their own; some logits are wanted."""
    free = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    stretches = []
    for length in lengths:
        first = draw.randrange(0, 5 * BLOCK_SIZE)
        table = [free.pop() for _ in range((first + length - 1) // BLOCK_SIZE + 1)]
        stretches.append(Stretch([draw.randrange(384) for _ in range(length)], first, table))
    count = sum(lengths)
    rows = draw.choice((range(count), sorted(draw.sample(range(count), draw.randint(1, count)))))
    return flat_arrays(stretches, np.array(rows), BLOCK_SIZE)


@torch.inference_mode()
def test_a_replayed_step_is_an_eager_one(runner, draw):
    graphs = captured(runner, SHAPES, max_blocks=8)
    for layer in runner.kv_cache.layers:
        layer.copy_(torch.randn(layer.shape))
    for width in (1, 2, 4, 1, 4, 3):
        arrays = some_step(draw, [draw.randint(1, width) for _ in range(draw.randint(1, 5))])
        kept = [layer.clone() for layer in runner.kv_cache.layers]
        wanted = runner._forward(arrays.to(runner.device), runner.kv_cache.layers)
        stored = [layer.clone() for layer in runner.kv_cache.layers]
        for layer, before in zip(runner.kv_cache.layers, kept, strict=True):
            layer.copy_(before)
        shape = graphs.shape_for(arrays)
        graphs.inputs(arrays, shape)
        found = graphs.replay(shape, len(arrays.logit_rows))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        for layer, expected in zip(runner.kv_cache.layers, stored, strict=True):
            torch.testing.assert_close(layer, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([1, 1, 1], (4, 1)),
        ([1] * 6, (6, 1)),
        ([1] * 7, None),
        ([2], (1, 4)),
        ([1, 4, 2], (3, 4)),
        ([1, 1, 1, 2], (5, 4)),
        ([4] * 6, None),
        ([1, 5], None),
    ],
)
def test_a_step_takes_the_shape_that_pads_it_least(runner, draw, lengths, shape):
    graphs = captured(runner, SHAPES, max_blocks=8)
    assert graphs.shape_for(some_step(draw, lengths)) == shape


def test_a_step_with_more_logits_than_tokens_is_computed_without(runner):
    graphs = captured(runner, [Shape(2, 1)], max_blocks=8)
    decode = Stretch([5], 2, [2])
    assert graphs.shape_for(flat_arrays([decode], np.array([0, 0, 0]), BLOCK_SIZE)) is None


@pytest.mark.parametrize("width", [1, 2, 5, 33])
@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 130, 512, 4096])
def test_shapes_ascend_to_the_most_and_pad_little(most, width):
    shapes = shapes_for(most, width)
    assert len(set(shapes)) == len(shapes)
    for each in {1, width}:
        sizes = [shape.num_sequences for shape in shapes if shape.width == each]
        assert sizes == sorted(sizes)
        assert sizes[-1] == min(most, 512 // each)
        assert len(sizes) <= 32
        for before, size in itertools.pairwise(sizes):
            assert size - before <= max(8, before // 4)
    assert {shape.width for shape in shapes} == {1, width}


def count_replays(graphs, monkeypatch):
    """How often each width was replayed, from here on."""
    replays, replay = Counter(), graphs.replay

    def counted(shape, num_rows):
        replays[shape.width] += 1
        return replay(shape, num_rows)

    monkeypatch.setattr(graphs, "replay", counted)
    return replays


def test_a_whole_engine_says_the_same_with_captured_steps_beside_each_other(
    tiny_llama_dir, monkeypatch
):
    def texts(changed):
        runner = a_runner(
            tiny_llama_dir, kernels="reference", dtype="float32", block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
        )  # fmt: skip
        replays = Counter()
        if changed:
            runner.overlaps = True
            runner._graphs = captured(runner, shapes_for(4, 1))
            replays = count_replays(runner._graphs, monkeypatch)
        engine = LLMEngine(
            EngineConfig(model=str(tiny_llama_dir), block_size=BLOCK_SIZE), runner=runner
        )
        prompts = [[5, 6, 7], [8] * 9, [300], [5, 6]]
        options = [
            SamplingParams(max_tokens=5 + i, temperature=i / 3, seed=i, ignore_eos=True)
            for i in range(4)
        ]
        outputs = engine.generate(prompts, options)
        return [output.completions for output in outputs], replays[1]

    wanted, _ = texts(False)
    found, num_replays = texts(True)
    assert found == wanted
    assert num_replays > 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and another that shares a layer with it."""
    return [
        write_model(tmp_path_factory.mktemp(f"layers-{count}"), num_layers=count)
        for count in (1, 2)
    ]


@pytest.mark.parametrize("speculation", ["ngram", "draft"])
def test_verified_drafts_and_a_draft_model_s_steps_are_replayed(folders, monkeypatch, speculation):
    """The captures are those that a GPU's runners would ask for."""
    model, draft_model = map(str, folders)
    told = {
        "model": model, "device": "cpu", "kernels": "reference", "dtype": "float32",
        "block_size": BLOCK_SIZE, "num_blocks": 60, "max_num_seqs": 4,
    }  # fmt: skip
    guessing = {
        "speculation": speculation, "num_draft_tokens": 3,
        "draft_model": draft_model if speculation == "draft" else "",
    }  # fmt: skip
    prompts = [[9, 30, 77, 9, 30, 77, 9, 30], [8] * 9, [300, 301], [5, 6, 5, 6, 5]]
    options = [  # of few tokens, so that texts repeat themselves
        SamplingParams(
            max_tokens=24, temperature=i / 4, seed=i, ignore_eos=True, allowed_token_ids=(9, 30, 77)
        )
        for i in range(4)
    ]
    outputs = LLMEngine(EngineConfig(**told)).generate(prompts, options)
    monkeypatch.setattr(ModelRunner, "_captures", lambda self: True)
    engine = LLMEngine(EngineConfig(**told | guessing))
    engine._stepper.speculator._gate.pays = lambda **_: True
    runners = [engine._runner]
    if speculation == "draft":
        runners.append(engine._stepper.speculator.proposer._runner)
    counts = []
    for runner in runners:
        runner._graphs = captured(runner, runner._shapes())
        counts.append(count_replays(runner._graphs, monkeypatch))
    found = engine.generate(prompts, options)
    assert [f.completions for f in found] == [o.completions for o in outputs]
    stats = engine.stats()
    assert stats.confirmed_tokens > 0
    assert counts[0][4] > 3
    if speculation == "draft":
        # it catches up with what was confirmed, then guesses token by token
        assert counts[1].keys() == {1, 2}
        assert counts[1][1] > counts[0][4]
