"""Experts against float64, token by token, on shapes drawn afresh."""

import itertools
import random
import secrets

import pytest
import torch

from engine.kernels import reference
from engine.kernels.packed_weight import quantized_4, quantized_8, quantized_fp8
from engine.kernels.triton import experts
from tests.engine.kernels import oracle

SEEDS = [secrets.randbelow(2**32) for _ in range(2)]
# in turn, not drawn: tests that begin with one seed would all draw the same
COUNTS = itertools.cycle((3, 8, 1))
NORMALIZED = itertools.cycle((True, False))


@pytest.fixture(params=SEEDS, ids=str)
def draw(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


def experts_case(draw, dtype, *, num_tokens, num_experts, hidden, width, crowded=False):
    """Scores apart by more than float32's rounding, so that the choice is sure."""
    scores = torch.stack([torch.randperm(num_experts) / 2 for _ in range(num_tokens)])
    if crowded:  # all of them choose the same: one expert has all tiles, others none
        scores = scores[:1].expand(num_tokens, -1).contiguous()
    x = torch.randn(num_tokens, hidden + 3)[:, :hidden]
    gate_up = torch.randn(num_experts, 2 * width, hidden) / hidden**0.5
    down = torch.randn(num_experts, hidden, width) / width**0.5
    return (
        x.to(dtype),
        scores.to(dtype),
        gate_up.to(dtype),
        down.to(dtype),
        draw.randint(1, max(1, num_experts - 1)),
        next(NORMALIZED),
    )


@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "crowded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_experts_equal_float64(draw, dtype, num_tokens, crowded):
    case = experts_case(
        draw,
        dtype,
        num_tokens=num_tokens,
        num_experts=next(COUNTS),
        hidden=draw.randint(20, 70),
        width=draw.randint(1, 40),
        crowded=crowded,
    )
    found = experts.moe(*case)
    assert found.dtype == dtype
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        found.double(), oracle.moe(*case), rtol=rounding + 1e-5, atol=rounding + 1e-5
    )


@pytest.mark.parametrize(
    "tiles", [experts.FEW, experts.SOME, experts.MANY], ids=["16", "64", "128"]
)
def test_each_size_of_tiles(draw, monkeypatch, tiles):
    monkeypatch.setattr(experts, "_choose_tiles", lambda *_: tiles)
    case = experts_case(
        draw, torch.float16, num_tokens=140, num_experts=2, hidden=40, width=33, crowded=True
    )
    rounding = 4 * torch.finfo(torch.float16).eps
    torch.testing.assert_close(
        experts.moe(*case).double(), oracle.moe(*case), rtol=rounding, atol=rounding
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "crowded"),
    [("int4", torch.float32, False), ("int8", torch.float32, True), ("int4", torch.float16, True),
     ("int8", torch.float16, False), ("fp8", torch.float32, False), ("fp8", torch.float16, True)],
    ids=str,
)  # fmt: skip
def test_experts_in_few_bits_are_those_of_the_rounded_weights(draw, dtype, kind, crowded):
    case = experts_case(
        draw, dtype, num_tokens=draw.choice((1, 7, 40)), num_experts=3, hidden=128, width=64,
        crowded=crowded,
    )  # fmt: skip
    small = {"int4": lambda w: quantized_4(w, 64), "int8": quantized_8, "fp8": quantized_fp8}[kind]
    packed = [small(weight.flatten(0, 1)) for weight in case[2:4]]
    found = experts.moe(*case[:2], *packed, *case[4:])
    rounded = [weight.dequantized(dtype).view(3, -1, weight.num_inputs) for weight in packed]
    wanted = oracle.moe(*case[:2], *rounded, *case[4:])
    rounding = 4 * torch.finfo(dtype).eps
    assert (wanted - oracle.moe(*case)).abs().max() > rounding
    torch.testing.assert_close(found.double(), wanted, rtol=rounding + 1e-5, atol=rounding + 1e-5)
    slow = reference.moe(*case[:2], *packed, *case[4:])
    torch.testing.assert_close(slow.double(), wanted, rtol=rounding + 1e-5, atol=rounding + 1e-5)


def test_no_token_is_no_work(draw):
    case = experts_case(draw, torch.float16, num_tokens=1, num_experts=2, hidden=16, width=16)
    found = experts.moe(case[0][:0], case[1][:0], *case[2:])
    assert found.shape == (0, 16)
