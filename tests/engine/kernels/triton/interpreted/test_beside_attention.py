"""Norms, gated activation, rotary, stores and copies against float64, on shapes drawn afresh."""

import random
import secrets

import numpy as np
import pytest
import torch

from engine.kernels.reference import NO_SLOT
from engine.kernels.triton import copy, gates, norm, store
from tests.engine.kernels import oracle

SEEDS = [secrets.randbelow(2**32) for _ in range(2)]
DTYPES = [torch.float32, torch.float16]
FP8 = torch.float8_e4m3fn

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=SEEDS, ids=str)
def draw(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


def close(found, wanted, dtype):
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, **oracle.tolerance(dtype))


@pytest.mark.parametrize("shape", [(1,), (5, 64), (3, 576), (2, 3, 80), (2, 1, 1, 7), (1, 3000)])
def test_rms_norm(draw, dtype, shape):
    x = (torch.randn(shape) * 10 ** draw.uniform(-2, 2)).to(dtype)
    weight, eps = torch.randn(shape[-1]).to(dtype), 10 ** draw.uniform(-6, -4)
    close(norm.rms_norm(x, weight, eps), oracle.rms_norm(x, weight, eps), dtype)


def test_rms_norm_of_some_heads_of_a_wider_tensor(draw, dtype):
    fused = torch.randn(draw.randint(1, 5), 7, 64).to(dtype)
    weight = torch.randn(64).to(dtype)
    for heads in (fused[:, :4], fused[:, 4:6], fused[:, 6:]):
        close(norm.rms_norm(heads, weight, 1e-6), oracle.rms_norm(heads, weight, 1e-6), dtype)


def test_rms_norm_of_nothing(draw, dtype):
    weight = torch.ones(64, dtype=dtype)
    assert norm.rms_norm(torch.empty(0, 64, dtype=dtype), weight, 1e-6).shape == (0, 64)


@pytest.mark.parametrize("size", [1, 100, 2048])
def test_add_rms_norm_changes_the_residual_and_norms_it(draw, dtype, size):
    x, residual = torch.randn(2, draw.randint(1, 6), size).to(dtype)
    total = x + residual
    weight = torch.randn(size).to(dtype)
    found = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    close(found, oracle.rms_norm(total, weight, 1e-5), dtype)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("size", [1, 100, 1025])
def test_gates(draw, dtype, size, name):
    gate_up = torch.randn(draw.randint(1, 4), 2 * size).to(dtype) * 4
    close(getattr(gates, name)(gate_up), getattr(oracle, name)(gate_up), dtype)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gates_far_out(draw, dtype, name):
    gate_up = torch.tensor([[-60.0, -1e4, 60.0, 1.0, 1.0, 1.0]]).to(dtype)
    close(getattr(gates, name)(gate_up), gate_up.double().new_tensor([[0, 0, 60]]), dtype)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size"),
    [
        (9, 3, 64, 64, 16), (4, 4, 80, 80, 8), (5, 1, 96, 72, 32), (8, 1, 128, 128, 16),
        (2, 2, 256, 64, 16), (6, 6, 20, 2, 3),
    ],
)  # fmt: skip
def test_queries_are_turned_and_keys_and_values_stored(
    draw, dtype, num_heads, num_kv_heads, head_dim, rotary_dim, block_size
):
    num_tokens = draw.randint(1, 7)
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    before = fused.clone()
    query, key, value = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    slots = torch.tensor(draw.sample(range(3 * block_size), num_tokens))
    angle = torch.rand(num_tokens, rotary_dim // 2) * 100
    cache = torch.randn(3, num_kv_heads, 2, block_size, head_dim).to(dtype)
    wanted, kept = before.double(), cache.double()
    turned = before[:, : num_heads + num_kv_heads, :rotary_dim]
    wanted[:, : num_heads + num_kv_heads, :rotary_dim] = oracle.rotary(
        turned, angle.cos(), angle.sin()
    )
    for token, slot in enumerate(slots.tolist()):
        block, place = divmod(slot, block_size)
        kept[block, :, 0, place], kept[block, :, 1, place] = wanted[token, num_heads:].chunk(2)
    store.rotary_store_kv(query, key, value, angle.cos(), angle.sin(), cache, slots)
    close(query, wanted[:, :num_heads], dtype)
    close(cache, kept, dtype)
    assert torch.equal(fused[:, num_heads:], before[:, num_heads:])


def test_keys_and_values_go_to_their_slots_and_nowhere_else(draw, dtype):
    fused = torch.randn(5, 7, 64).to(dtype)
    key, value = fused[:, 1:4], fused[:, 4:]
    slots = torch.tensor(draw.sample(range(4 * 16), 5))
    slots[draw.randrange(5)] = NO_SLOT
    cache = torch.randn(4, 3, 2, 16, 64).to(dtype)
    expected = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot != NO_SLOT:
            expected[slot // 16, :, 0, slot % 16] = key[token]
            expected[slot // 16, :, 1, slot % 16] = value[token]
    store.store_kv(key, value, cache, slots)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("kept", "num_kv_heads", "head_dim", "rotary_dim", "block_size"),
    [
        (torch.int8, 3, 64, 64, 16), (torch.int8, 1, 80, 80, 8), (torch.int8, 5, 96, 72, 32),
        (torch.int8, 2, 128, 0, 16), (FP8, 3, 64, 64, 16), (FP8, 1, 80, 20, 8),
        (FP8, 2, 128, 0, 32),
    ],
    ids=str,
)  # fmt: skip
def test_a_cache_of_8_bits_keeps_the_nearest_to_what_float64_turns(
    draw, dtype, kept, num_kv_heads, head_dim, rotary_dim, block_size
):
    num_tokens, num_heads = 6, 2 * num_kv_heads
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    # tokens of all sizes, and in each head numbers far below its largest
    fused *= 10.0 ** torch.randint(-2, 3, (num_tokens, 1, 1))
    fused *= 10.0 ** torch.randint(-5, 1, fused.shape)
    before = fused.to(dtype)
    query, key, value = before.clone().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cache = torch.full((3, num_kv_heads, 2, block_size, head_dim + 4), -1, dtype=torch.int8)
    slots = torch.tensor(draw.sample(range(3 * block_size), num_tokens))
    slots[draw.randrange(num_tokens)] = NO_SLOT
    angle = torch.rand(num_tokens, rotary_dim // 2) * 100
    if rotary_dim:
        store.rotary_store_kv(query, key, value, angle.cos(), angle.sin(), cache.view(kept), slots)
    else:
        store.store_kv(key, value, cache.view(kept), slots)
    wanted = before.double()
    wanted[..., :rotary_dim] = oracle.rotary(before[..., :rotary_dim], angle.cos(), angle.sin())
    wanted[:, -num_kv_heads:] = value.double()
    close(query, (wanted if rotary_dim else before.double())[:, :num_heads], dtype)
    numbers, scales = oracle.in_8_bits(cache.view(kept))
    stored = torch.zeros(3, block_size, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot != NO_SLOT:
            block, place = divmod(slot, block_size)
            stored[block, place] = True
            expected = torch.stack(wanted[token, num_heads:].split(num_kv_heads), dim=1)
            scale = scales[block, :, :, place]
            largest = expected.abs().amax(-1, keepdim=True)
            end = 127.0 if kept == torch.int8 else 448.0
            torch.testing.assert_close(scale, largest / end, rtol=1e-5, atol=0)
            off = (numbers[block, :, :, place] - expected / scale).abs()
            # turned in float32: what is far below the largest is off by a little of that
            assert (off <= oracle.spacing_in_8_bits(expected / scale, kept) / 2 + 3e-4).all()
    for untouched in (numbers, scales):
        free = untouched.permute(0, 3, 1, 2, 4)[~stored]
        assert ((free == -1) | free.isnan()).all()


def test_float8_is_rounded_to_the_nearest_to_even_down_to_nothing(draw, dtype):
    given, wanted = oracle.edges_of_float8()
    x = given.to(dtype).view(1, 1, -1)
    cache = torch.zeros(1, 1, 2, 16, x.shape[2] + 4, dtype=torch.int8).view(FP8)
    store.store_kv(x, -x, cache, torch.tensor([5]))
    numbers, scales = oracle.in_8_bits(cache)
    assert scales[0, 0, :, 5].flatten().tolist() == [1, 1]
    assert numbers[0, 0, 0, 5].tolist() == wanted.tolist()
    assert numbers[0, 0, 1, 5].tolist() == (-wanted).tolist()


@pytest.mark.parametrize("kept", [torch.int8, FP8], ids=str)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf, 0.0, 1e-36])
@pytest.mark.parametrize("at", [0, 20, 50])
def test_what_8_bits_cannot_keep_is_no_number_or_nothing(draw, dtype, kept, broken, at):
    x = torch.zeros(1, 1, 64, dtype=dtype)
    x[..., at] = broken
    cache = torch.zeros(1, 1, 2, 16, 68, dtype=torch.int8).view(kept)
    ones, zeros = torch.ones(1, 20), torch.zeros(1, 20)  # turned by nothing
    with np.errstate(invalid="ignore"):  # the interpreter's: a device has no warnings
        store.rotary_store_kv(x.clone(), x, x, ones, zeros, cache, torch.tensor([2]))
    numbers, scales = oracle.in_8_bits(cache)
    assert not numbers.any()
    scale = scales[0, 0, :, 2]
    assert scale.isnan().all() if not abs(broken) < 1 else not scale.any()


@pytest.mark.parametrize("num_copies", [1, 15, 17, 1025])
def test_blocks_are_copied_as_they_were_before_the_first_copy(draw, dtype, num_copies):
    num_blocks = num_copies + draw.randint(1, 3)
    cache = torch.randn(num_blocks, 2, 2, 3, 5).to(dtype)
    destinations = torch.tensor(draw.sample(range(num_blocks), num_copies))
    sources = torch.tensor([draw.randrange(num_blocks) for _ in range(num_copies)])
    expected = cache.clone()
    expected[destinations] = cache[sources]
    copy.copy_blocks(cache, sources, destinations)
    assert torch.equal(cache, expected)
