"""Draws that stay on a device, in plain PyTorch: the very tokens of the CPU's sampler."""

import random
import secrets

import pytest
import torch

from engine.kernels.registry import REFERENCE
from tests.engine.kernels.draw_case import check_draws, check_penalties


@pytest.fixture(params=[secrets.randbelow(2**32) for _ in range(5)], ids=lambda _: "seed")
def draw(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


@pytest.mark.parametrize("vocab_size", [1, 2, 300, 5000])
def test_the_same_draws(draw, vocab_size):
    check_draws(draw, REFERENCE, num_rows=9, vocab_size=vocab_size)


def test_penalties(draw):
    check_penalties(draw, REFERENCE)
