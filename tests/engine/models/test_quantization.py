"""Weights in few bits: read from checkpoints as they are, or made so when a model is loaded."""

import json
import secrets

import pytest
import torch

from engine.kernels.packed_weight import pack, quantized_4, quantized_8, quantized_fp8
from engine.kernels.registry import REFERENCE
from engine.layers.linear import Linear, quantized
from engine.models.model import load_model
from engine.step_plan import ScheduledSequence
from engine.weights import Checkpoint, CheckpointError
from tests.engine.kernels.packed_case import check_packed
from tests.engine.kernels.test_draws import draw  # noqa: F401
from tests.engine.models.checkpoints import write_checkpoint
from tests.engine.models.equality import a_runner, a_sequence
from tests.engine.models.quantized_checkpoints import write_quantized

pytestmark = pytest.mark.usefixtures("one_thread")
FORMATS = [
    {"method": "awq"},
    {"method": "gptq"},
    {"method": "gptq", "desc_act": True, "version": 2},
    {"method": "gptq", "bits": 8, "group_size": 64},
]


def logits(folder, **settings):
    runner = a_runner(folder, block_size=16, dtype="float32", **settings)
    sequence = a_sequence(0, [0])
    sequence.token_ids = [5, 9, 300, 42, 17]
    return runner.logits([ScheduledSequence(sequence, 5)])


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_a_quantised_checkpoint_says_what_its_weights_say_in_the_open(tmp_path, stored, kernels):
    seed = secrets.randbelow(2**32)
    print("seed", seed)  # noqa: T201
    packed, whole = write_quantized(tmp_path, seed, **stored)
    found, wanted = (logits(folder, kernels=kernels) for folder in (packed, whole))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"bits": 3}, "3 bits"),
        ({"group_size": 16}, "qzeros must have shape"),
        ({"group_size": 48}, "no multiple of its groups"),
        ({"version": "gemv"}, "gemv"),
        ({"zero_point": False}, "zero_point"),
        ({"bits": "four"}, "bits must be an integer"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(tmp_path, change, named):
    packed, _ = write_quantized(tmp_path, 0, method="awq")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] |= change
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=named):
        a_runner(packed)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_model_made_small_when_it_is_loaded_stays_near_the_whole(tiny_llama_dir, kind):
    def model(quantization):
        with Checkpoint(tiny_llama_dir) as checkpoint:
            return load_model(
                checkpoint,
                dtype=torch.float32,
                device=torch.device("cpu"),
                kernels=REFERENCE,
                quantization=quantization,
            )

    def of(made):
        runner = a_runner(tiny_llama_dir, kernels="reference", dtype="float32")
        runner._model = made
        sequence = a_sequence(0, [0])
        sequence.token_ids = [5, 9, 300, 42]
        return runner.logits([ScheduledSequence(sequence, 4)])

    if kind == "int4":
        with pytest.raises(CheckpointError, match="64 inputs are no multiple of a group of 128"):
            model(kind)
        return
    small, whole = of(model(kind)), of(model("none"))
    assert not torch.equal(small, whole)
    assert torch.cosine_similarity(small, whole).item() > 0.99


def test_experts_are_made_small_too_and_what_they_cannot_be_is_refused_by_name(tmp_path):
    write_checkpoint("qwen3_moe", tmp_path)

    def logits_of(quantization):
        with Checkpoint(tmp_path) as checkpoint:
            runner._model = load_model(
                checkpoint,
                dtype=torch.float32,
                device=torch.device("cpu"),
                kernels=REFERENCE,
                quantization=quantization,
            )
        return runner.logits([ScheduledSequence(sequence, 4)])

    runner = a_runner(tmp_path, kernels="reference", dtype="float32")
    sequence = a_sequence(0, [0])
    sequence.token_ids = [5, 9, 30, 42]
    whole = logits_of("none")
    for kind, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        small = logits_of(kind)
        experts = runner._model.layers[0].mlp
        assert experts.gate_up.bits == experts.down.bits == 8
        assert experts.gate_up.values.dtype == experts.down.values.dtype == dtype
        assert isinstance(experts.router, Linear)
        assert not torch.equal(small, whole)
        assert torch.cosine_similarity(small, whole).item() > 0.99
    with pytest.raises(CheckpointError, match="no multiple of"):
        logits_of("int4")


def test_each_way_to_keep_a_weight_is_near_it():
    weight, x = torch.randn(48, 256), torch.randn(5, 256)
    weight[3] = 0
    wanted = x @ weight.T
    for kind, most in (("int8", 0.01), ("fp8", 0.06), ("int4", 0.12)):
        found = quantized(weight, None, kind, REFERENCE)(x)
        assert ((found - wanted).norm() / wanted.norm()).item() < most, kind
        assert not found[:, 3].any()
    off = (quantized_fp8(weight).dequantized(torch.float32) - weight).abs()
    least = weight.abs().amax(1, keepdim=True) / 448 * 2**-10  # half of what is left below 2**-6
    assert (off <= torch.maximum(weight.abs() / 16, least) * 1.0001).all()
    for packed, step in ((quantized_8(weight), 127), (quantized_4(weight), 15)):
        off = (packed.dequantized(torch.float32) - weight).abs()
        widths = packed.scales.repeat_interleave(packed.group_size, 1)
        assert (off <= 0.5001 * widths + 1e-6).all(), step


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_products_by_plain_pytorch(draw, bits):  # noqa: F811
    check_packed(
        draw, REFERENCE.packed_linear, torch.float16, num_rows=3, has_bias=True,
        bits=bits, num_outputs=20, num_inputs=192, group_size=32, mixed=True,
    )  # fmt: skip


def test_groups_that_fit_no_run_are_refused():
    with pytest.raises(ValueError, match="multiples of 32"):
        pack(torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 4), None)
