"""The compiled draw from whole rows of logits against the plain one."""

import numba
import numpy as np
import pytest
import torch

from engine.kernels.cpu.draw import argmax, gumbel_argmax, promising
from engine.kernels.cpu.emit import WIDTH
from engine.kernels.philox import philox_4x32_10
from engine.sampler import CompiledDraws, SampledRow, sample
from engine.sampling_params import SamplingParams


@pytest.mark.parametrize("spread", [0.0, 1.0, 12.0])
@pytest.mark.parametrize("vocab_size", [1, 50, 4099])
def test_it_draws_what_the_plain_sampler_draws(vocab_size, spread):
    seed = int(torch.seed())
    print("seed", seed)  # noqa: T201
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed % 2**63)
    for _ in range(30):
        logits = torch.randn(5, vocab_size) * spread
        if vocab_size > 1:
            logits[1, : vocab_size // 2] = -torch.inf
        rows = [
            SampledRow(
                params=SamplingParams(max_tokens=1, temperature=temperature),
                seed=int(draw.integers(2**64, dtype=np.uint64)),
                position=int(draw.integers(2**20)),
            )
            for temperature in (1e-3, 0.3, 1.0, 1.7, 2.0)
        ]
        compiled = CompiledDraws(argmax, gumbel_argmax)
        assert sample(logits.clone(), rows, compiled) == sample(logits.clone(), rows)


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 50, 4099])
def test_the_likeliest_token_is_the_first_of_the_largest(vocab_size):
    seed = int(torch.seed())
    print("seed", seed)  # noqa: T201
    torch.manual_seed(seed)
    # few levels: the largest is there more than once
    logits = torch.randint(-3, 3, (40, vocab_size)).float()
    logits[0] = -torch.inf
    logits[0, -1] = -5.0
    logits[1] = 0.0
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert argmax(logits) == expected
    wider = torch.full((40, vocab_size + 7), 9.0)  # of which the rows are a part
    wider[:, :vocab_size] = logits
    assert argmax(wider[:, :vocab_size]) == expected


@numba.njit
def _promising(logits, best, first):
    zero = np.uint64(0)
    return promising(
        logits.ctypes.data, np.float32(0), np.float32(1), np.float32(best), np.uint64(first), zero,
        zero, zero,
    )  # fmt: skip


def test_the_bound_of_noise_is_none_too_low_and_hardly_too_high():
    """Of a million tokens whose noise is known: whether it lifts them above some bar."""
    tokens = np.arange(2**20, dtype=np.uint64)
    nothing = np.zeros(1, np.uint64)
    word = philox_4x32_10((tokens, nothing, nothing, nothing), (nothing, nothing))[0]
    noise = -np.log(-np.log((word.astype(np.float64) + 0.5) * 2.0**-32))
    flat = np.zeros(WIDTH, np.float32)
    for bar in (2.0, 4.0, 9.0, float(noise.max()) - 1e-4):
        found = [_promising(flat, bar, first) for first in range(0, len(tokens), WIDTH)]
        lanes = np.arange(WIDTH, dtype=np.int64)
        bits = (np.array(found, np.int64)[:, None] >> lanes & 1).astype(bool).reshape(-1)
        assert bits[noise > bar].all()
        # right to a factor of 2 in 1 - u, and -log u is another 0.37 where u is a half
        assert not bits[noise < bar - 1.8].any()
