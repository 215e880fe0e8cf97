"""Captured steps without a GPU: a stand-in replays the same function on the same memory.

What is proven is all but CUDA's own part: that a padded step gives what an eager one gives, that
what is padded is stored nowhere, and that nothing but the inputs' memory is read.
"""

import itertools
import random
import secrets

import pytest
import torch

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.cuda_graphs import DecodeGraphs, sizes_for
from engine.step_batch import Stretch, flat_arrays
from tests.engine.models.equality import a_runner

BLOCK_SIZE, NUM_BLOCKS = 4, 40
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


def forward(runner):
    return lambda batch: runner._forward(batch, runner.kv_cache.layers)


def decodes(draw, num_sequences):
    """One token of each of some sequences, in blocks of their own."""
    free = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    stretches = []
    for _ in range(num_sequences):
        first = draw.randrange(0, 5 * BLOCK_SIZE)
        table = [free.pop() for _ in range(first // BLOCK_SIZE + 1)]
        stretches.append(Stretch([draw.randrange(384)], first, table))
    rows = torch.arange(num_sequences).numpy()
    return flat_arrays(stretches, rows, BLOCK_SIZE)


@torch.inference_mode()
def test_a_replayed_step_is_an_eager_one(runner, draw):
    graphs = DecodeGraphs(
        forward(runner), capture, sizes=[1, 2, 4, 6], max_blocks=8, device=runner.device
    )
    for layer in runner.kv_cache.layers:
        layer.copy_(torch.randn(layer.shape))
    for _ in range(6):
        arrays = decodes(draw, draw.randint(1, 6))
        kept = [layer.clone() for layer in runner.kv_cache.layers]
        wanted = forward(runner)(arrays.to(runner.device))
        stored = [layer.clone() for layer in runner.kv_cache.layers]
        for layer, before in zip(runner.kv_cache.layers, kept, strict=True):
            layer.copy_(before)
        assert graphs.takes(arrays)
        graphs.inputs(arrays)
        found = graphs.replay(len(arrays.seq_lens))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        for layer, expected in zip(runner.kv_cache.layers, stored, strict=True):
            torch.testing.assert_close(layer, expected, rtol=1e-4, atol=1e-5)


def test_only_steps_of_decodes_that_all_draw_are_taken(runner, draw):
    with torch.inference_mode():
        graphs = DecodeGraphs(
            forward(runner), capture, sizes=[1, 3], max_blocks=8, device=runner.device
        )
    assert graphs.takes(decodes(draw, 3))
    assert not graphs.takes(decodes(draw, 4))
    rows = torch.arange(2).numpy()
    prompt = Stretch([5, 6], 0, [1])
    decode = Stretch([5], 2, [2])
    for stretches, wanted in (
        ([prompt, decode], rows + 1),
        ([decode, decode], rows[:1]),
        ([decode, decode], rows[::-1]),
    ):
        assert not graphs.takes(flat_arrays(stretches, wanted.copy(), BLOCK_SIZE))


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 130, 512, 4096])
def test_sizes_ascend_to_the_most_and_pad_little(most):
    sizes = sizes_for(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 512)
    assert len(sizes) <= 32
    for before, size in itertools.pairwise(sizes):
        assert size - before <= max(8, before // 4)


@torch.inference_mode()
def test_a_whole_engine_says_the_same_with_captured_steps_beside_each_other(
    tiny_llama_dir, monkeypatch
):
    def texts(changed):
        runner = a_runner(
            tiny_llama_dir, kernels="reference", dtype="float32", block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
        )  # fmt: skip
        replays = []
        if changed:
            runner.overlaps = True
            runner._graphs = DecodeGraphs(
                forward(runner), capture, sizes=[1, 2, 4], max_blocks=16, device=runner.device
            )
            replay = runner._graphs.replay
            monkeypatch.setattr(
                runner._graphs, "replay", lambda size: replays.append(size) or replay(size)
            )
        engine = LLMEngine(
            EngineConfig(model=str(tiny_llama_dir), block_size=BLOCK_SIZE), runner=runner
        )
        prompts = [[5, 6, 7], [8] * 9, [300], [5, 6]]
        options = [
            SamplingParams(max_tokens=5 + i, temperature=i / 3, seed=i, ignore_eos=True)
            for i in range(4)
        ]
        outputs = engine.generate(prompts, options)
        return [output.completions for output in outputs], replays

    wanted, _ = texts(False)
    found, replays = texts(True)
    assert found == wanted
    assert set(replays) >= {1, 2, 4} or len(replays) > 4
