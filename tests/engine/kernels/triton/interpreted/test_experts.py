"""Experts against float64, token by token, on shapes drawn afresh."""

import random
import secrets

import pytest
import torch

from engine.kernels.triton import experts
from tests.engine.kernels import oracle

SEEDS = [secrets.randbelow(2**32) for _ in range(2)]


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
        draw.randint(1, num_experts),
        draw.choice((False, True)),
    )


@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "crowded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_experts_equal_float64(draw, dtype, num_tokens, crowded):
    case = experts_case(
        draw,
        dtype,
        num_tokens=num_tokens,
        num_experts=draw.choice((1, 3, 8)),
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


def test_no_token_is_no_work(draw):
    case = experts_case(draw, torch.float16, num_tokens=1, num_experts=2, hidden=16, width=16)
    found = experts.moe(case[0][:0], case[1][:0], *case[2:])
    assert found.shape == (0, 16)
