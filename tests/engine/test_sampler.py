"""Draws against a naive sampler, the same tokens in any company, and the distribution itself."""

import math
import random
from collections import Counter

import pytest
import torch

from engine.sampler import NumericalError, SampledRow, sample
from engine.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


def row(position=0, seed=1, **options):
    return SampledRow(
        params=SamplingParams(max_tokens=1, **options),
        seed=seed,
        position=position,
    )


def philox_word(token_id, position, seed):
    """First word of Philox4x32-10, on Python's integers."""
    counter, key = [token_id, position, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (right >> 32) ^ counter[1] ^ key[0],
            right & 0xFFFFFFFF,
            (left >> 32) ^ counter[3] ^ key[1],
            left & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter[0]


def probabilities_left(logits, params):
    """What top_k, then top_p, then min_p leave: token -> weight, by sorting everything."""
    peak = max(logits)
    weights = {v: math.exp((x - peak) / params.temperature) for v, x in enumerate(logits)}
    falling = sorted(weights, key=lambda v: -weights[v])
    if 0 < params.top_k < len(falling):
        kth = weights[falling[params.top_k - 1]]
        falling = [v for v in falling if weights[v] >= kth]
    total, likelier, nucleus, lowest = sum(weights[v] for v in falling), 0.0, [], math.inf
    for v in falling:
        if params.top_p < 1 and likelier >= params.top_p * total and weights[v] < lowest:
            break
        nucleus.append(v)
        lowest = weights[v]
        likelier += lowest
    return {v: weights[v] for v in nucleus if weights[v] >= params.min_p * weights[falling[0]]}


def naive_sample(logits, row):
    left = probabilities_left(logits, row.params)

    def score(v):
        u = (philox_word(v, row.position, row.seed) + 0.5) / 2**32
        return math.log(left[v]) - math.log(-math.log(u)) if left[v] > 0 else -math.inf

    return max(left, key=score)


def random_row(draw, **fixed):
    options = {
        "temperature": draw.choice((0.3, 1.0, 1.7)),
        "top_k": draw.choice((0, -1, 1, 5, 64, 65, 300, 10**6)),
        "top_p": draw.choice((1.0, 0.999, 0.9, 0.5, 1e-9)),
        "min_p": draw.choice((0.0, 1e-6, 0.01, 0.3, 1.0)),
    }
    return row(
        position=draw.randrange(10**5),
        seed=draw.randrange(2**64),
        **options | fixed,
    )


@pytest.mark.parametrize("vocab_size", [1, 2, 64, 65, 700])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_draws_are_those_of_a_sampler_that_sorts_everything(vocab_size, spread):
    draw = random.Random(vocab_size)
    torch.manual_seed(vocab_size)
    logits = torch.randn(25, vocab_size) * spread
    rows = [random_row(draw) for _ in range(25)]
    expected = [naive_sample(x.tolist(), r) for x, r in zip(logits, rows, strict=True)]
    assert sample(logits, rows) == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_probability_says(options):
    draws = 6_000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    rows = [row(position, seed=20, **options) for position in range(draws)]
    counts = Counter(sample(logits.expand(draws, -1), rows))
    left = probabilities_left(logits.tolist(), rows[0].params)
    assert counts.keys() <= left.keys()
    total = sum(left.values())
    expected = {v: draws * weight / total for v, weight in left.items()}
    chi_square = sum((counts[v] - e) ** 2 / e for v, e in expected.items())
    # beyond 40 with probability below 1e-5 for 7 degrees of freedom, less for fewer
    assert chi_square < 40


def test_samples_of_one_request_are_independent():
    draws = 4_000
    rows = [row(p, seed=7 + i) for p in range(draws) for i in range(2)]  # as a request has them
    tokens = sample(torch.zeros(2 * draws, 4), rows)
    pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    expected = draws / 16
    assert sum((pairs[a, b] - expected) ** 2 / expected for a in range(4) for b in range(4)) < 60


def test_a_row_draws_the_same_token_alone_and_in_any_batch():
    draw = random.Random(5)
    torch.manual_seed(5)
    logits = torch.randn(40, 3000) * 2
    rows = [random_row(draw, temperature=draw.choice((0.0, 0.7, 1.0))) for _ in range(40)]
    alone = [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(rows)]
    assert sample(logits, rows) == alone
    order = draw.sample(range(40), 40)
    assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    pairs = [sample(logits[[i, 39 - i]], [rows[i], rows[39 - i]]) for i in range(40)]
    assert [pair[0] for pair in pairs] == alone


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 7.0, 7.0, 7.0]])
    assert sample(logits, [row(temperature=0.0), row(temperature=5e-5)]) == [1, 0]


def test_the_smallest_temperature_that_is_not_greedy_overflows_nothing():
    logits = torch.tensor([[3e4, -3e4, 2.9e4], [-1e30, -1e30, -2e30]])
    tokens = sample(logits, [row(temperature=1e-4), row(temperature=1e-4, top_p=0.9)])
    assert tokens[0] == 0
    assert tokens[1] in (0, 1)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("poison", ["one nan", "all nan", "inf", "all -inf"])
def test_a_broken_row_fails_alone(options, poison):
    torch.manual_seed(1)
    logits = torch.randn(8, 200)
    rows = [row(position, **options) for position in range(8)]
    healthy = sample(logits, rows)
    value = math.nan if "nan" in poison else math.inf if poison == "inf" else -math.inf
    logits[3, slice(None) if "all" in poison else 77] = value
    tokens = sample(logits, rows)
    assert isinstance(tokens[3], NumericalError)
    assert "token 3" in str(tokens[3])
    del tokens[3], healthy[3]
    assert tokens == healthy


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.999}, {"min_p": 1e-9}])
def test_a_token_at_minus_infinity_is_never_drawn(options):
    logits = torch.zeros(500, 100)
    logits[:, 2:] = -math.inf
    tokens = sample(logits, [row(position, **options) for position in range(500)])
    assert set(tokens) == {0, 1}


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, 10), []) == []
