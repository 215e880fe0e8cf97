"""Products of float16 numbers, summed in float16 for a stretch, against float64 of the numbers."""

import numpy as np
import pytest
import torch

from engine.kernels.cpu.halves import (
    HAS_HALVES,
    STRETCH,
    half_weight_at,
    half_words,
    halve_row,
    pack_halves,
)
from engine.kernels.cpu.matmul import (
    ROWS_TOGETHER,
    multiply,
    multiply_gated,
    stored_as,
)
from engine.kernels.cpu.workers import Crew
from tests.engine.kernels import oracle
from tests.engine.kernels.attention_case import Case

pytestmark = pytest.mark.skipif(not HAS_HALVES, reason="needs AVX512-FP16")
NO_MEETING = np.zeros(8, np.int64)
STEP = 2.0**-11  # of float16: what one rounding changes a number by at most, as a share of it


def rounded(x):
    made = np.full((len(x), half_words(x.shape[1])), np.nan, np.float32)
    for row, out in zip(x.numpy(), made, strict=True):
        halve_row(row, x.shape[1], out)
    return made


def product(x, weight, out, *, bias=None, added=False):
    packed, left = pack_halves(weight), rounded(x)
    for worker in range(2):
        multiply(
            left, packed.data_ptr(), 0 if bias is None else bias.data_ptr(), out.numpy(), added,
            len(x), x.shape[1], stored_as(torch.float16, in_pairs=True),
            Crew(worker, 2, NO_MEETING),
        )  # fmt: skip
    return out


def scaled(x):
    """Each row times a power of two that keeps float16 from running out of exponents."""
    _, exponents = torch.frexp(x.abs().amax(dim=1, keepdim=True))
    return torch.ldexp(torch.ldexp(x, 8 - exponents).half().double(), exponents - 8)


def bound_of(x, weight):
    """What rounding sums in float16 may add up to: of a stretch each sum by half a step."""
    left, right = scaled(x).abs(), scaled(weight).abs()
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for parity in (0, 1):  # each lane's own
        a, b = left[:, parity::2], right[:, parity::2]
        for first in range(0, a.shape[1], STRETCH):
            terms = a[:, None, first : first + STRETCH] * b[:, first : first + STRETCH]
            total += STEP * terms.cumsum(2).sum(2)
    return total + 1e-5 * (left @ right.T) + 1e-30


@pytest.mark.parametrize("num_inputs", [1, 2, 15, 16, 17, 63, 64, 65, 577])
@pytest.mark.parametrize("num_rows", [1, 2, 11, 12, 13, 109])
def test_products_are_those_of_the_rounded_numbers(num_rows, num_inputs):
    seed = int(torch.seed())
    print("seed", seed)  # noqa: T201
    torch.manual_seed(seed)
    weight, x = torch.randn(48, num_inputs), torch.randn(num_rows, num_inputs)
    bias, before = torch.randn(48), torch.randn(num_rows, 48)
    made = scaled(x) @ scaled(weight).T
    bound = bound_of(x, weight)
    for added in (False, True):
        found = product(x, weight, before.clone(), bias=bias, added=added).double()
        expected = made + bias.double() + added * before.double()
        assert ((found - expected).abs() <= bound + 2e-6).all()
    whole = product(x, weight, torch.empty(num_rows, 48))
    # as a rule errors cancel: far below what they may be
    size = x.norm(dim=1)[:, None] * weight.norm(dim=1)
    assert ((whole.double() - made) / size).square().mean().sqrt() < 3e-4
    for row in {0, num_rows // 2, num_rows - 1}:
        alone = product(x[row : row + 1], weight, torch.empty(1, 48))
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("size", [1e-36, 1e-12, 1.0, 1e4, 1e12, 1e25])
@pytest.mark.parametrize("other", [1e-8, 1.0, 1e8])
def test_sizes_that_float16_has_not(size, other):
    """All of one sign and the largest there are: no sum overflows, and none runs out."""
    x, weight = torch.full((3, 200), 1.99 * size), torch.full((16, 200), 1.99 * other)
    x[1, 1:] = 0.5 * size
    x[2, 1:] = 1e-3 * size
    found = product(x, weight, torch.empty(3, 16)).double()
    expected = x.double() @ weight.double().T
    # what is small is lost beside a large one of its stretch
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-37)


def test_rows_of_zeros_and_rows_that_are_not_whole():
    x, weight = torch.randn(3, 33), torch.randn(20, 33)
    x[1], weight[2] = 0, 0
    found = product(x, weight, torch.full((3, 32), torch.nan))
    assert torch.equal(found[1], torch.zeros(32))
    assert torch.equal(found[:, 2], torch.zeros(3))
    assert torch.equal(found[:, 20:], torch.zeros(3, 12))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_shows_in_its_own_row(broken):
    x = torch.randn(2, 20)
    x[0, 7] = broken
    out = product(x, torch.randn(16, 20), torch.zeros(2, 16))
    assert not out[0].isfinite().any()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 200])
def test_a_row_reads_and_writes_nothing_beyond_its_end(count):
    x = np.full(count + 70, np.nan, np.float32)
    x[:count] = np.random.default_rng(count).standard_normal(count)
    made = np.full(half_words(count) + 1, -7, np.float32)
    halve_row(x, count, made)
    halves = made.view(np.float16)[: 2 * ((count + 1) // 2)]
    scale = made[(count + 1) // 2]
    np.testing.assert_allclose(halves[:count] * scale, x[:count], rtol=STEP, atol=1e-6)
    assert (halves[count:] == 0).all()
    assert made[-1] == -7


def test_a_weight_is_read_back_as_it_was():
    weight = (torch.randn(40, 33) * torch.logspace(-9, 9, 40)[:, None]).half().float()
    packed = pack_halves(weight)
    address, size = packed.data_ptr(), packed.stride(0) * 2
    for row in (0, 15, 16, 39):
        found = [half_weight_at(address + row // 16 * size, row % 16, i, 33) for i in range(33)]
        torch.testing.assert_close(torch.tensor(found), weight[row], rtol=STEP, atol=0)


def test_gated_products_equal_float64():
    num_rows, num_inputs, width = ROWS_TOGETHER + 13, 40, 48
    weight, x = torch.randn(2 * width, num_inputs), torch.randn(num_rows, num_inputs)
    out = torch.zeros(num_rows, width)
    tiles = np.zeros((2, ROWS_TOGETHER, 2, 16), np.float32)
    packed, left = pack_halves(weight), rounded(x)
    for worker in range(2):
        multiply_gated(
            left, packed.data_ptr(), 0, out.numpy(), tiles, num_rows, num_inputs,
            stored_as(torch.float16, in_pairs=True), Crew(worker, 2, NO_MEETING),
        )  # fmt: skip
    expected = oracle.silu_mul(x.double() @ weight.double().T)
    torch.testing.assert_close(out.double(), expected, atol=0.15, rtol=0.02)


@pytest.mark.parametrize("key_size", [1e-6, 1.0, 6e4])
@pytest.mark.parametrize("value_size", [1e-2, 1.0, 6e4])
def test_attention_to_keys_and_values_of_any_size(key_size, value_size):
    """As large as float16 has them, and all of one sign: neither scores nor values overflow.

    Values far below 1e-2 lose digits: a numerator times a value has float16's exponents.
    """
    case = Case([1], [300], shape=(1, 1, 64, 16), dtype=torch.float16, seed=3, in_pairs=True)
    case.queries[0].fill_(1.0)
    for t in range(300):
        slot = int(case.tables[0, t // 16]) * 16 + t % 16
        case.store(slot, 0, torch.full((64,), key_size), torch.full((64,), value_size))
    found, *_ = case.attend(workers=1)
    torch.testing.assert_close(
        found, torch.full_like(found, float(np.float16(value_size))), rtol=5e-3, atol=0
    )
