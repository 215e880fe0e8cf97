"""Ranks share a model without gap or overlap, and a step's input reaches them whole."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.kernels.registry import REFERENCE
from engine.models.model import load_model
from engine.models.packing import packing_of
from engine.models.settings import DecoderSettings
from engine.shards import Shard, size
from engine.step_batch import Stretch, flat_arrays
from engine.step_message import FIELDS, decode_step, encode_step
from engine.weights import Checkpoint, UnsupportedModelError
from tests.engine.models.families import write
from tests.engine.models.quantized_checkpoints import write_quantized

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@given(st.integers(1, 8), st.integers(1, 50))
def test_parts_cover_the_whole_once(num_ranks, each):
    ranks = [Shard(rank, num_ranks) for rank in range(num_ranks)]
    covered = [i for rank in ranks for i in range(num_ranks * each)[rank.part(num_ranks * each)]]
    assert covered == list(range(num_ranks * each))
    filled = [i for rank in ranks for i in range(each)[rank.filled_part(each)]]
    assert filled == list(range(each))
    assert all(size(rank.filled_part(each)) <= rank.width(each) for rank in ranks)


@pytest.mark.parametrize(("num_ranks", "num_kv_heads"), [(2, 1), (4, 2), (4, 4), (2, 8), (8, 2)])
def test_each_query_head_finds_its_kv_head_on_its_rank(num_ranks, num_kv_heads):
    num_heads = 8
    for rank in range(num_ranks):
        shard = Shard(rank, num_ranks)
        heads = range(num_heads)[shard.part(num_heads)]
        kept = range(num_kv_heads)[shard.kv_heads(num_kv_heads)]
        ratio = len(heads) // len(kept)
        for place, head in enumerate(heads):
            assert kept[place // ratio] == head * num_kv_heads // num_heads


@pytest.mark.parametrize(
    ("config", "num_ranks", "message"),
    [
        ({}, 5, "does not divide the model's attention heads: 12"),
        ({}, 3, "no multiple of the model's 2 KV heads"),
        ({"intermediate_size": 97}, 2, "intermediate size: 97"),
        ({"num_key_value_heads": 3}, 2, "KV heads: 3"),
    ],
)
def test_a_model_that_cannot_be_shared_is_refused_with_the_number(config, num_ranks, message):
    settings = DecoderSettings.from_config(LLAMA | config)
    settings.check_split(1)
    with pytest.raises(UnsupportedModelError, match=message):
        settings.check_split(num_ranks)


@pytest.mark.parametrize(
    ("write_model", "message"),
    [
        (
            lambda folder: write_quantized(folder, 0, method="gptq")[0],
            "tensor_parallel is 2, but weights stored in few bits are not cut",
        ),
        (
            lambda folder: write("gpt2", folder) and folder,
            "tensor_parallel is 2, but transformers computes this model, whole: .*GPT2LMHeadModel",
        ),
    ],
    ids=["few bits", "transformers"],
)
def test_what_is_not_cut_is_refused_by_name(tmp_path, write_model, message):
    with Checkpoint(write_model(tmp_path)) as checkpoint:
        options = {"dtype": torch.float32, "device": torch.device("cpu"), "kernels": REFERENCE}
        load_model(checkpoint, **options)
        ranks = SimpleNamespace(shard=Shard(1, 2))
        with pytest.raises(UnsupportedModelError, match=message):
            load_model(checkpoint, **options, group=ranks)


def test_compiled_kernels_compute_no_part_of_a_model(tiny_llama_dir):
    cpu = torch.device("cpu")
    with Checkpoint(tiny_llama_dir) as checkpoint:
        alone, shared = (
            packing_of(
                EngineConfig(model="m", tensor_parallel=count), cpu, checkpoint, torch.float32
            )
            for count in (1, 2)
        )
    assert alone is not None
    assert shared is None


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 9)), max_size=3),
)
def test_a_step_arrives_as_it_was_sent(lengths, copies):
    stretches = [
        Stretch(list(range(count)), first, [2**31 // 4 - 1 - i for i in range(10)])
        for count, first in lengths
    ]
    sent = flat_arrays(stretches, np.array([0, 0, 2], dtype=np.int64), block_size=4)
    received_copies, received = decode_step(encode_step(copies, sent))
    assert received_copies == copies
    for name in FIELDS:
        array = getattr(received, name)
        assert array.dtype == np.int64
        np.testing.assert_array_equal(array, getattr(sent, name))
    assert decode_step(encode_step(copies, None)) == (copies, None)
