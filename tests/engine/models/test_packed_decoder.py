"""How compiled kernels keep a model, and that company changes no bit of a row's logits."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.kernels.cpu import step
from engine.models.packed_decoder import PackedDecoder
from engine.step_plan import ScheduledSequence
from tests.engine.models.checkpoints import write_checkpoint
from tests.engine.models.equality import (
    NUM_BLOCKS,
    a_runner,
    a_sequence,
    check_logits_in_any_packing,
    logits_of,
    prompts,
)

GEMMA = "gemma3, windows of 9 in two of three layers"


@pytest.fixture(params=["llama, tied, with biases and wide heads", "qwen3", "phi3", GEMMA])
def checkpoint(request, tmp_path):
    """A folder and the model in transformers that wrote it."""
    return tmp_path, write_checkpoint(request.param, tmp_path)


@pytest.mark.parametrize("name", ["llama", GEMMA])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_stay_as_the_checkpoint_has_them_and_nothing_is_lost(tmp_path, name, dtype):
    kept = getattr(torch, dtype)
    write_checkpoint(name, tmp_path).to(kept).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    runner = a_runner(tmp_path, block_size=16)
    assert runner._model.weight_dtype == kept
    assert runner.kv_cache.layers[0].dtype == torch.float32
    assert not runner._model.cost_key["in_pairs"]
    check_logits_in_any_packing(model, runner, 100)


def test_keys_and_values_are_kept_in_the_type_that_is_asked_for(tmp_path):
    model = write_checkpoint("llama", tmp_path)
    text = prompts(1)[4]
    for settings, dtype, tolerance in (
        ({"dtype": "float16"}, torch.float16, 0.02),
        ({"dtype": "bfloat16"}, torch.bfloat16, 0.2),
        ({"kv_cache_dtype": "float16"}, torch.float16, 0.01),
        ({"kv_cache_dtype": "bfloat16"}, torch.bfloat16, 0.1),
        ({"kv_cache_dtype": "int8"}, torch.int8, 0.1),
    ):
        runner = a_runner(tmp_path, block_size=16, **settings)
        assert runner.kv_cache.layers[0].dtype == dtype
        expected = logits_of(model, text)[-1]
        assert not torch.equal(logits_alone(runner, text), expected)
        torch.testing.assert_close(logits_alone(runner, text), expected, rtol=0, atol=tolerance)


def test_in_8_bits_weights_and_inputs_are_those_rounded_group_by_group(checkpoint):
    folder, model = checkpoint
    runner = a_runner(folder, block_size=16, quantization="int8", kv_cache_dtype="float32")
    assert isinstance(runner._model, PackedDecoder)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            continue
        part = head_dim if name.endswith("o_proj") else module.weight.shape[1]
        weight = in_8_bits(module.weight.data, part, torch.bfloat16)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, given, part=part: (in_8_bits(given[0], part, torch.float32),)
            )
    # an input next to the middle of two levels may fall to either side
    check_logits_in_any_packing(model, runner, 100, atol=2e-2)


def in_8_bits(x, part, scale_dtype):
    """Each 32 numbers as multiples, up to 127, of a scale; parts (heads) begin at every 16th."""
    parts = x.unflatten(-1, (-1, part))
    filled = torch.nn.functional.pad(parts, (0, -part % 16)).flatten(-2)
    groups = torch.nn.functional.pad(filled, (0, -filled.shape[-1] % 32)).unflatten(-1, (-1, 32))
    scales = (groups.abs().amax(dim=-1, keepdim=True) / 127).to(scale_dtype).float()
    rounded = (groups / scales.where(scales > 0, 1.0)).round().clamp(-127, 127) * scales
    parts = rounded.flatten(-2)[..., : filled.shape[-1]].unflatten(-1, (-1, part + -part % 16))
    return parts[..., :part].flatten(-2)


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
@pytest.mark.parametrize(
    "kept", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}, {"dtype": "float16"}], ids=str
)
def test_a_row_of_logits_is_the_same_bits_in_any_company(checkpoint, kept, kv_cache_dtype):
    folder, _ = checkpoint
    runner = a_runner(folder, block_size=16, kv_cache_dtype=kv_cache_dtype, **kept)
    texts = prompts(7)
    alone = [logits_alone(runner, text) for text in texts]
    draw = random.Random(7)
    free = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sequences = [
        a_sequence(n, [free.pop() for _ in range(-(-len(text) // 16))])
        for n, text in enumerate(texts)
    ]
    found = {}
    while len(found) < len(texts):
        scheduled = []
        for n in draw.sample(range(len(texts)), draw.randint(1, len(texts))):
            sequence, text = sequences[n], texts[n]
            left = len(text) - sequence.num_computed_tokens
            if left:
                chunk = draw.randint(1, left)
                sequence.token_ids = text[: sequence.num_computed_tokens + chunk]
                scheduled.append(ScheduledSequence(sequence, chunk))
        if not scheduled:
            continue
        for row, logits in zip(scheduled, runner.logits(scheduled), strict=True):
            row.sequence.num_computed_tokens += row.num_scheduled_tokens
            if row.sequence.num_tokens == len(texts[row.sequence.seq_id]):
                found[row.sequence.seq_id] = logits.clone()
    for n, expected in enumerate(alone):
        assert torch.equal(found[n], expected)


def test_8_bit_weights_without_compiled_kernels_are_refused(tmp_path):
    write_checkpoint("llama", tmp_path)
    with pytest.raises(ValueError, match="needs compiled CPU kernels: kernels is reference"):
        a_runner(tmp_path, block_size=16, quantization="int8", kernels="reference")
    with pytest.raises(ValueError, match="block_size is no multiple of 16: 4"):
        a_runner(tmp_path, block_size=4, quantization="int8")


def logits_alone(runner, text):
    sequence = a_sequence(0, list(range(-(-len(text) // 16))))
    sequence.token_ids = list(text)
    return runner.logits([ScheduledSequence(sequence, len(text))])[0].clone()


@pytest.mark.parametrize("num_tokens", [1, 40])  # one is placed by one worker alone
def test_a_step_in_which_a_kernel_fails_raises_and_ends(tmp_path, num_tokens):
    """Whichever worker it is: the others do not wait for it, and no logits are handed out."""
    write_checkpoint("llama", tmp_path)
    runner = a_runner(tmp_path, block_size=16)
    text = range(3, 3 + num_tokens)
    expected = logits_alone(runner, text)
    table = runner._model._table
    right = table[step.BLOCK_SIZE]
    for _ in range(3):
        table[step.BLOCK_SIZE] = 0  # that a slot is divided by
        with pytest.raises(step.KernelError, match="failed in this step"):
            logits_alone(runner, text)
        table[step.BLOCK_SIZE] = right
        assert torch.equal(logits_alone(runner, text), expected)
