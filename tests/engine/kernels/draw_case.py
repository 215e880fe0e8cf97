"""Rows of every kind to draw for, and what the CPU's sampler draws for them."""

import torch

from engine.sampler import NumericalError, SampledRow, draw_on_device, sample
from engine.sampling_params import SamplingParams


def some_options(draw, vocab_size):
    options = {"temperature": draw.choice((0.0, 0.3, 1.0, 1.7))}
    for choice in draw.sample(
        (
            {"top_k": draw.choice((1, 2, 40, vocab_size, vocab_size + 3))},
            {"top_p": draw.choice((1e-3, 0.3, 0.9, 0.999))},
            {"min_p": draw.choice((1e-3, 0.1, 1.0))},
        ),
        draw.choice((0, 0, 1, 2, 3)),
    ):
        options |= choice
    return options


def some_rows(draw, num_rows, vocab_size):
    return [
        SampledRow(
            params=SamplingParams(max_tokens=1, **some_options(draw, vocab_size)),
            seed=draw.randrange(2**64),
            position=draw.randrange(2**20),
        )
        for _ in range(num_rows)
    ]


def some_logits(draw, num_rows, vocab_size):
    """Some far apart and some close; with banned tokens, equals and broken rows."""
    logits = torch.randn(num_rows, vocab_size) * torch.tensor(
        [draw.choice((0.0, 1.0, 3.0, 12.0)) for _ in range(num_rows)]
    ).unsqueeze(1)
    logits[0, : vocab_size // 2] = -torch.inf
    logits[1] = logits[1].round()
    logits[2, draw.randrange(vocab_size)] = draw.choice((torch.nan, torch.inf))
    logits[3] = -torch.inf
    return logits


def check_draws(draw, kernels, *, num_rows, vocab_size):
    logits = some_logits(draw, num_rows, vocab_size)
    rows = some_rows(draw, num_rows, vocab_size)
    wanted = sample(logits.clone(), rows)
    found = draw_on_device(logits, rows, kernels).tolist()
    for row, token, expected, values in zip(rows, found, wanted, logits, strict=True):
        if isinstance(expected, NumericalError):
            assert token == -1, row
        elif row.params.greedy:  # of equals PyTorch's argmax takes any
            assert token == values.tolist().index(values.max().item()), row
        else:
            assert token == expected, row


def check_cuts(draw, kernels, *, num_rows=16, vocab_size=40):
    """Of a dozen tokens nearly alike, each that should not be kept would often be drawn."""
    logits = torch.full((num_rows, vocab_size), -20.0)
    places = draw.sample(range(vocab_size), 12)
    logits[:, places] = 5.0 - 0.05 * torch.arange(12.0)
    for options in (
        {"top_k": 1}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.87},
        {"top_k": 3, "top_p": 0.6}, {"top_k": 5, "top_p": 0.5, "min_p": 0.94},
    ):  # fmt: skip
        rows = [
            SampledRow(
                params=SamplingParams(max_tokens=1, temperature=1.0, **options),
                seed=draw.randrange(2**64),
                position=n,
            )
            for n in range(num_rows)
        ]
        wanted = sample(logits.clone(), rows)
        assert draw_on_device(logits, rows, kernels).tolist() == wanted, options


def check_penalties(draw, kernels, dtype=torch.float32):
    logits = torch.randn(3, 50) * 4
    logits[0, 7], logits[1, 3] = -torch.inf, torch.finfo(dtype).max
    places = torch.tensor(sorted({7, 53, *draw.sample(range(150), 20)}))
    terms = torch.stack(
        (
            torch.randint(0, 3, places.shape).float(),
            torch.rand(places.shape) * 2 + 1e-3,
            torch.randn(places.shape),
            torch.randn(places.shape),
        )
    )
    terms[1, list(places).index(53)] = 1e-38  # beyond float32: stays finite
    wanted = logits.double().view(-1)
    count, repetition, frequency, presence = terms.double()
    before = wanted[places]
    after = torch.where(before > 0, before / repetition, before * repetition)
    after -= frequency * count + presence * (count > 0)
    huge = torch.finfo(dtype).max
    wanted[places] = torch.where(before.isfinite(), after.clamp(-huge, huge), after)
    kernels.penalize(logits, places, terms)
    torch.testing.assert_close(logits.view(-1).double(), wanted, rtol=1e-6, atol=1e-5)
