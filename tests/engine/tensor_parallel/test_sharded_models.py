"""A model in parts is the whole model, for every family of tier 1: ranks are threads here."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import Qwen3Config

from engine.kernels.registry import REFERENCE
from engine.kv_cache import KVCache, KVCacheShape
from engine.layers.attention import AttentionMetadata
from engine.models.decoder import Decoder
from engine.models.model import load_model
from engine.models.settings import DecoderSettings
from engine.shards import Shard
from engine.weights import Checkpoint, UnsupportedModelError
from tests.engine.models import checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
BLOCK_SIZE = 4
ONE_KV_HEAD = {"num_attention_heads": 4, "num_key_value_heads": 1}
CONFIGS = checkpoints.CONFIGS | {
    "qwen3, one KV head": lambda: Qwen3Config(**checkpoints.SIZE | ONE_KV_HEAD, head_dim=8),
}


class Meeting:
    """What the threads of one model have to say to each other."""

    def __init__(self, num_ranks):
        self.said = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=60)

    def exchange(self, rank, what):
        self.said[rank] = what
        self.barrier.wait()
        said = list(self.said)
        self.barrier.wait()
        return said


class Thread:
    """A rank of a group of threads."""

    def __init__(self, meeting, rank):
        self.meeting = meeting
        self.shard = Shard(rank, len(meeting.said))

    def sum(self, part):
        return torch.stack(self.meeting.exchange(self.shard.rank, part)).sum(dim=0)

    def columns(self, part):
        return torch.cat(self.meeting.exchange(self.shard.rank, part), dim=1)


@torch.inference_mode()
def logits_of(model):
    """Of all tokens of two sequences, the second in a second step."""
    shape = KVCacheShape(layers=model.kv_layers, block_size=BLOCK_SIZE, dtype=torch.float32)
    cache = KVCache(shape, 16, CPU)
    found = []
    for first_block, length in ((0, 13), (4, 22)):
        token_ids = (torch.arange(length) * 7 + first_block) % 200
        positions = torch.arange(length)
        metadata = AttentionMetadata(
            cu_query_lens=torch.tensor([0, length], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            slot_mapping=first_block * BLOCK_SIZE + positions,
            block_tables=torch.arange(first_block, first_block + 6, dtype=torch.int32)[None],
        )
        found.append(model.forward(token_ids, positions, metadata, cache.layers, positions))
    return torch.cat(found)


def decoder(checkpoint, **group):
    settings = DecoderSettings.from_config(checkpoint.config)
    return Decoder(
        checkpoint, settings, dtype=torch.float32, device=CPU, kernels=REFERENCE, **group
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_compute_what_one_does(name, tmp_path, monkeypatch):
    monkeypatch.setitem(checkpoints.CONFIGS, name, CONFIGS[name])
    checkpoints.write_checkpoint(name, tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        whole = decoder(checkpoint)
        meeting = Meeting(2)
        ranks = [decoder(checkpoint, group=Thread(meeting, rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(logits_of, ranks))
    torch.testing.assert_close(found[0], logits_of(whole), rtol=1e-4, atol=1e-4)
    kv_heads = whole.kv_layers[0].num_kv_heads
    assert all(rank.kv_layers[0].num_kv_heads == max(1, kv_heads // 2) for rank in ranks)


def test_a_model_that_transformers_computes_is_refused_by_name(tmp_path):
    tmp_path.joinpath("config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    checkpoints.write_checkpoint("llama", tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(
        UnsupportedModelError, match=r"tensor_parallel is 2, but transformers.*GPT2LMHeadModel"
    ):  # fmt: skip
        load_model(
            checkpoint,
            dtype=torch.float32,
            device=CPU,
            kernels=REFERENCE,
            group=Thread(Meeting(2), 0),
        )
