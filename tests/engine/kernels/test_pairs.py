"""Products of bfloat16 numbers by pairs, against float64 of the rounded numbers."""

import pytest
import torch

from engine.kernels.cpu.matmul import stored_as
from engine.kernels.cpu.pairs import HAS_PAIRS, pack_pairs, pair_row, pair_words
from tests.engine.kernels import product_case
from tests.engine.kernels.attention_case import Case, assert_near

pytestmark = pytest.mark.skipif(not HAS_PAIRS, reason="needs AVX512-BF16")


def rounded(x):
    return product_case.rounded(x, pair_row, pair_words)


def product(x, weight, out, **how):
    stored = stored_as(torch.bfloat16, in_pairs=True)
    return product_case.product(x, rounded(x), pack_pairs(weight), out, stored, **how)


@pytest.mark.parametrize("num_inputs", [1, 2, 15, 16, 17, 90, 577, 1536])
@pytest.mark.parametrize("num_rows", [1, 2, 11, 12, 13, 109])
def test_products_are_those_of_the_rounded_numbers(num_rows, num_inputs):
    seed = int(torch.seed())
    print("seed", seed)  # noqa: T201
    torch.manual_seed(seed)
    weight, x = torch.randn(48, num_inputs), torch.randn(num_rows, num_inputs)
    bias, before = torch.randn(48), torch.randn(num_rows, 48)
    terms = x.bfloat16().double()[:, None] * weight.bfloat16().double()
    bound = 2e-6 * terms.abs().sum(2) + 1e-6
    for added in (False, True):
        found = product(x, weight, before.clone(), bias=bias, added=added).double()
        expected = terms.sum(2) + bias.double() + added * before.double()
        assert ((found - expected).abs() <= bound).all()
    whole = product(x, weight, torch.empty(num_rows, 48))
    for row in {0, num_rows // 2, num_rows - 1}:
        alone = product(x[row : row + 1], weight, torch.empty(1, 48))
        assert torch.equal(alone[0], whole[row])


def test_rounding_is_to_the_nearest_and_a_nan_stays_one():
    bits = torch.randint(0, 2**32, (64, 33), dtype=torch.int64).to(torch.int32)
    bits[0, :6] = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800001, -1, 0x7F800000])
    x = bits.view(torch.float32)
    made = torch.from_numpy(rounded(x)).view(torch.bfloat16)[:, :33]
    expected = x.bfloat16()
    nan = x.isnan()
    assert made[nan].isnan().all()
    tiny = x.abs() < 2**-126  # the processor takes these for zeros
    assert torch.equal(made[~nan & ~tiny], expected[~nan & ~tiny])
    assert (made[tiny].abs() <= expected[tiny].abs()).all()


def test_what_is_no_number_shows():
    x = torch.randn(2, 20)
    x[0, 7] = torch.nan
    out = product(x, torch.randn(16, 20), torch.zeros(2, 16))
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("size", [1.0, 1e3, 1e10, 1e29, 1e34])
def test_attention_to_scores_of_any_size(size):
    """Powers are of differences from the peak; each stretch has one key that outdoes its others."""
    case = Case(
        [1, 1], [300, 40], shape=(1, 1, 32, 16), dtype=torch.bfloat16, seed=3, in_pairs=True
    )
    query = case.queries[0][-1, 0].bfloat16().float()
    for t in range(300):
        slot = int(case.tables[0, t // 16]) * 16 + t % 16
        key = query.sign() * (-size if t not in (7, 290) else -size / 2)
        case.store(slot, 0, key, torch.full((32,), float(t)))
    found, expected, bound = case.attend(workers=1)
    # of the two highest, 7 and 290, and with size 1 of all others a little
    assert_near(found[1], expected[1], bound[1])
    if size > 1:
        assert (found[0] - 148.5).abs().max() < 1
