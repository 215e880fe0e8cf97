"""The compiled draw from whole rows of logits against the plain one."""

import numpy as np
import pytest
import torch

from engine.kernels.cpu.draw import bound_of_noise, gumbel_argmax
from engine.sampler import SampledRow, sample
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
                sample_index=i,
                position=int(draw.integers(2**20)),
            )
            for i, temperature in enumerate((1e-3, 0.3, 1.0, 1.7, 2.0))
        ]
        assert sample(logits.clone(), rows, gumbel_argmax) == sample(logits.clone(), rows)


def test_the_bound_of_noise_is_none_too_low():
    words = np.concatenate(
        (np.arange(2000), 2**32 - 1 - np.arange(2000), 2 ** np.arange(32), 2 ** np.arange(33) - 1)
    ).astype(np.uint64)
    noise = -np.log(-np.log((words + 0.5) * 2.0**-32))
    bounds = np.array([bound_of_noise(word) for word in words])
    assert (bounds >= noise).all()
    # and so near that half of those it lets through are worth a logarithm
    assert (bounds[words > 2**31] - noise[words > 2**31] < 1.4).all()
