"""Which of the decoders computes a checkpoint, and what is said where compiled kernels do not."""

import pytest
import torch

from engine.models.decoder import Decoder
from engine.models.hf_decoder import HFDecoder
from engine.models.packed_decoder import PackedDecoder
from engine.weights import UnsupportedModelError
from tests.engine.models.checkpoints import write_checkpoint
from tests.engine.models.equality import a_runner, check_logits_in_any_packing
from tests.engine.models.families import write

pytestmark = pytest.mark.usefixtures("one_thread")

UNPACKED = "slow kernels in use, no compiled ones: "


def write_gpt2(folder):
    return write("gpt2", folder)


def write_experts(folder):
    return write_checkpoint("qwen3_moe", folder)


@pytest.mark.parametrize(
    ("write_model", "computed_by", "reason"),
    [
        (write_experts, Decoder, "they have no experts"),
        (write_gpt2, HFDecoder, "transformers computes the model"),
    ],
)
def test_what_compiled_kernels_do_not_compute_is_computed_without_and_said(
    write_model, computed_by, reason, tmp_path, caplog
):
    model = write_model(tmp_path)
    runner = a_runner(tmp_path, block_size=16)
    assert isinstance(runner._model, computed_by)
    assert UNPACKED + reason in caplog.text
    check_logits_in_any_packing(model, runner, largest_chunk=13)
    with pytest.raises(UnsupportedModelError, match=f"quantization int8 needs.*: {reason}"):
        a_runner(tmp_path, block_size=16, quantization="int8")
    caplog.clear()
    a_runner(tmp_path, block_size=16, kernels="reference")
    assert UNPACKED not in caplog.text


def test_experts_keep_keys_and_values_in_the_type_that_is_asked_for(tmp_path):
    model = write_experts(tmp_path)
    runner = a_runner(tmp_path, block_size=16, kv_cache_dtype="float16")
    assert runner.kv_cache.layers[0].dtype == torch.float16
    check_logits_in_any_packing(model, runner, largest_chunk=13, atol=0.02)


def test_a_gemma_on_compiled_kernels_says_nothing_of_slow_ones(tmp_path, caplog):
    write_checkpoint("gemma3, windows of 9 in two of three layers", tmp_path)
    assert isinstance(a_runner(tmp_path, block_size=16)._model, PackedDecoder)
    assert UNPACKED not in caplog.text
