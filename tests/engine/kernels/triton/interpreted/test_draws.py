"""The fused draw chooses what the CPU's sampler chooses, for rows of every kind in one batch."""

import random
import secrets

import pytest
import torch

from engine.kernels import triton
from engine.kernels.registry import REFERENCE
from engine.kernels.triton import draws
from tests.engine.kernels.draw_case import check_cuts, check_draws, check_penalties

SEEDS = [secrets.randbelow(2**32) for _ in range(3)]
KERNELS = triton.provide(REFERENCE)


@pytest.fixture(params=SEEDS, ids=str)
def draw(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


@pytest.mark.parametrize("vocab_size", [1, 300, 2500])
def test_the_same_draws(draw, monkeypatch, vocab_size):
    monkeypatch.setattr(draws, "CHUNK", 1024)  # so that rows have several
    check_draws(draw, KERNELS, num_rows=7, vocab_size=vocab_size)


def test_what_the_options_keep_is_kept_and_nothing_else(draw):
    check_cuts(draw, KERNELS)


@pytest.mark.filterwarnings("ignore:overflow")  # a GPU divides to an infinity without a word
def test_penalties(draw):
    check_penalties(draw, KERNELS)


def test_nothing_to_draw(draw):
    empty = torch.empty(0, 3, dtype=torch.float64)
    assert draws.draw(torch.empty(0, 30), empty, empty.long()).shape == (0,)
