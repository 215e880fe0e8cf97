"""What is left for the KV cache beside the largest steps, on a GPU that only keeps account."""

from types import SimpleNamespace

import pytest
import torch

from engine import model_runner
from engine.config import EngineConfig
from engine.cuda_graphs import Shape
from engine.kernels.registry import REFERENCE
from engine.kv_cache import KVCacheShape, LayerShape
from engine.model_runner import ModelRunner
from engine.step_memory import StepMemory, max_num_scored_tokens

SHAPE = KVCacheShape(
    layers=(LayerShape(num_kv_heads=1, head_dim=4),), block_size=4, dtype=torch.float32
)
CPU = torch.device("cpu")
TOTAL, FREE, HELD, WEIGHTS = 100_000, 60_000, 25_000, 20_000


class Account:
    """Of a device's memory: each step takes ten bytes a token and four for each wanted logit."""

    def __init__(self, monkeypatch):
        self.batches, self.scored, self.drawn = [], [], []
        self._peak = 0
        for name, call in (
            ("reset_peak_memory_stats", lambda _: setattr(self, "_peak", WEIGHTS)),
            ("synchronize", lambda _: None),
            ("mem_get_info", lambda _: (FREE, TOTAL)),
            ("memory_reserved", lambda _: HELD),
            ("memory_allocated", lambda _: WEIGHTS),
            ("max_memory_allocated", lambda _: self._peak),
            ("empty_cache", lambda: None),
        ):
            monkeypatch.setattr(torch.cuda, name, call)
        monkeypatch.setattr(
            "engine.step_memory.sample", lambda logits, rows, *_: self.drawn.append(len(rows))
        )
        monkeypatch.setattr(
            "engine.step_memory.token_logprobs",
            lambda logits, ids, num_top: self.scored.append((len(logits), max(num_top))),
        )

    def forward(self, batch, layers):
        self.batches.append(batch)
        taken = 10 * len(batch.token_ids) + 4 * len(batch.logit_rows)
        self._peak = max(self._peak, WEIGHTS + taken)
        return torch.empty(len(batch.logit_rows), 8)


def a_memory(account, **settings):
    return StepMemory(
        **{
            "forward": account.forward, "device": CPU, "shape": SHAPE, "vocab_size": 1 << 24,
            "max_model_len": 300, "max_num_tokens": 200, "max_num_draws": 12, "graphs": [],
            "kernels": REFERENCE,
        }
        | settings
    )  # fmt: skip


def test_the_largest_step_has_all_a_plan_may_have(monkeypatch):
    account = Account(monkeypatch)
    a_memory(account).run_largest()
    [batch] = account.batches
    assert len(batch.token_ids) == 200
    assert batch.metadata.seq_lens.tolist() == [200], "one prompt: the longest attention"
    assert batch.metadata.slot_mapping.max() < 50 * SHAPE.block_size
    rows = 12 + max_num_scored_tokens(1 << 24)
    assert len(batch.logit_rows) == rows
    assert account.drawn == [12]
    assert account.scored == [(rows, 20)]


def test_a_rank_that_draws_nothing_scores_nothing(monkeypatch):
    account = Account(monkeypatch)
    a_memory(account, kernels=None, max_model_len=30).run_largest()
    assert len(account.batches[0].token_ids) == 30
    assert not account.drawn
    assert not account.scored


def test_the_cache_gets_what_the_share_leaves_beside_steps_captures_and_others(monkeypatch):
    account = Account(monkeypatch)
    peak = WEIGHTS + 10 * 200 + 4 * (12 + 2)
    others = TOTAL - FREE - HELD
    left = int(TOTAL * 0.9) - others - peak
    assert a_memory(account).left(0.9) == left
    graphs = [Shape(3, 1), Shape(2, 5)]
    assert a_memory(account, graphs=graphs).left(0.9) == left - (10 * 10 + 4 * 10)
    assert len(account.batches[-1].token_ids) == 10, "the largest capture"
    assert account.batches[-1].metadata.slot_mapping.max() < 0, "which stores nothing"


@pytest.mark.parametrize(
    ("settings", "drafts", "num_draws", "width"),
    [
        ({}, False, 6, 1),
        ({"speculation": "ngram", "num_draft_tokens": 3}, False, 24, 4),
        ({}, True, 12, 2),
    ],
)
def test_drafts_and_their_logits_are_counted(
    tiny_llama_dir, monkeypatch, settings, drafts, num_draws, width
):
    monkeypatch.setattr(ModelRunner, "_captures", lambda self: True)
    config = EngineConfig(
        model=str(tiny_llama_dir), device="cpu", num_blocks=8, max_num_seqs=6, **settings
    )
    memory = ModelRunner(config, drafts=drafts)._memory()
    assert memory.max_num_draws == num_draws
    assert {shape.width for shape in memory.graphs} == {1, width}


def test_a_gpu_s_cache_is_what_is_left_and_a_cpu_s_what_the_settings_say(
    tiny_llama_dir, monkeypatch
):
    config = EngineConfig(
        model=str(tiny_llama_dir), device="cpu", kv_cache_bytes=1 << 20, gpu_memory_utilization=0.7
    )
    runner = ModelRunner(config)
    asked = []
    left = SimpleNamespace(left=lambda share: asked.append(share) or 1 << 19)
    monkeypatch.setattr(model_runner.ModelRunner, "_memory", lambda self: left)
    assert runner._num_blocks(None) == runner.num_blocks
    runner.device = torch.device("cuda")
    assert runner._num_blocks(None) == runner.num_blocks // 2
    assert asked == [0.7]
