"""Products of numbers in 16 bits, against float64 of the numbers that were given."""

import numpy as np
import pytest
import torch

from engine.kernels.cpu.int16 import (
    GROUP,
    HAS_INT16,
    INPUT_NORM,
    LARGEST,
    WEIGHT_NORM,
    int16_panel_bytes,
    int16_row,
    int16_weight_at,
    int16_words,
    pack_int16,
)
from engine.kernels.cpu.matmul import (
    ROWS_TOGETHER,
    multiply_gated,
    stored_as,
)
from engine.kernels.cpu.workers import Crew
from tests.engine.kernels import product_case
from tests.engine.kernels.attention_case import assert_near
from tests.engine.kernels.product_case import NO_MEETING

pytestmark = pytest.mark.skipif(not HAS_INT16, reason="needs AVX512-VNNI")


def rounded(x):
    return product_case.rounded(x, int16_row, int16_words)


def product(x, weight, out, **how):
    stored = stored_as(torch.float16, in_pairs=True)
    return product_case.product(x, rounded(x), pack_int16(weight), out, stored, **how)


def in_groups(x):
    """[R, G, 32] float64."""
    filled = x.new_zeros(len(x), -(-x.shape[1] // GROUP) * GROUP).double()
    filled[:, : x.shape[1]] = x
    return filled.unflatten(1, (-1, GROUP))


def bound_of(x, weight):
    """Half a step of each input times its weight, and the other way round; and float32's sums."""
    left, right = in_groups(x), in_groups(weight)
    input_steps = left.norm(dim=2) / INPUT_NORM  # [R, G]
    norms, peaks = right.norm(dim=2).amax(dim=1), right.abs().amax(dim=(1, 2))
    weight_steps = torch.maximum(norms / WEIGHT_NORM, peaks / LARGEST)  # [N]
    of_inputs = input_steps @ right.abs().sum(dim=2).T / 2
    of_weights = left.abs().sum(dim=(1, 2))[:, None] * weight_steps / 2
    of_both = GROUP / 4 * input_steps.sum(dim=1)[:, None] * weight_steps
    sums = 2**-23 * (left.shape[1] + 3) * (left.norm(dim=2) @ right.norm(dim=2).T)
    return 1.001 * (of_inputs + of_weights + of_both) + sums + 1e-30


@pytest.mark.parametrize("num_inputs", [1, 2, 31, 32, 33, 64, 65, 577])
@pytest.mark.parametrize("num_rows", [1, 2, 11, 12, 13, 109])
def test_products_are_those_of_the_numbers(num_rows, num_inputs):
    seed = int(torch.seed())
    print("seed", seed)  # noqa: T201
    torch.manual_seed(seed)
    weight, x = torch.randn(48, num_inputs), torch.randn(num_rows, num_inputs)
    bias, before = torch.randn(48), torch.randn(num_rows, 48)
    made = x.double() @ weight.double().T
    bound = bound_of(x, weight)
    for added in (False, True):
        found = product(x, weight, before.clone(), bias=bias, added=added).double()
        expected = made + bias.double() + added * before.double()
        assert ((found - expected).abs() <= bound + 2e-6).all()
    whole = product(x, weight, torch.empty(num_rows, 48))
    # as a rule errors cancel: far below what they may be, and a tenth of what float16's sums make
    size = x.norm(dim=1)[:, None] * weight.norm(dim=1)
    assert ((whole.double() - made) / size).square().mean().sqrt() < 4e-5
    for row in {0, num_rows // 2, num_rows - 1}:
        alone = product(x[row : row + 1], weight, torch.empty(1, 48))
        assert torch.equal(alone[0], whole[row])


PATTERNS = {
    "all alike": torch.ones(GROUP),
    "one alone": torch.eye(GROUP)[0],
    "two": torch.eye(GROUP)[:2].sum(0),
    "falling": 0.7 ** torch.arange(GROUP),
    "rounded up": torch.full((GROUP,), 1.0).index_fill_(0, torch.arange(8), 0.50001),
}


@pytest.mark.parametrize("left", PATTERNS)
@pytest.mark.parametrize("right", PATTERNS)
@pytest.mark.parametrize("sign", [1, -1])
def test_no_sum_overflows(left, right, sign):
    """What is alike adds up to the product of the norms, the most that there can be."""
    x = torch.stack([size * PATTERNS[left].repeat(3) for size in (1.0, 0.99, 1.37)])
    weight = torch.stack([size * PATTERNS[right].repeat(3) for size in torch.linspace(1, 2, 16)])
    found = product(x, sign * weight, torch.empty(3, 16)).double()
    expected = sign * (x.double() @ weight.double().T)
    assert ((found - expected).abs() <= bound_of(x, weight)).all()


@pytest.mark.parametrize("size", [1e-36, 1e-12, 1.0, 1e4, 1e12, 1e25])
@pytest.mark.parametrize("other", [1e-8, 1.0, 1e8])
def test_numbers_of_any_size(size, other):
    x, weight = torch.full((3, 200), 1.99 * size), torch.full((16, 200), 1.99 * other)
    x[1, 1:] = 0.5 * size
    x[2, GROUP:] = max(
        1e-9 * size, 1e-36
    )  # groups of their own: nothing is lost beside a large one
    x[2, :GROUP] = 0
    found = product(x, weight, torch.empty(3, 16)).double()
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-37)


def integers_of(x):
    """[R, G, 32] int64, and their scales, [R, G] float64."""
    num_groups = -(-x.shape[1] // GROUP)
    made = rounded(x)
    numbers = made[:, : GROUP // 2 * num_groups].copy().view(np.int16)
    scales = made[:, GROUP // 2 * num_groups : (GROUP // 2 + 1) * num_groups]
    return numbers.reshape(len(x), num_groups, GROUP).astype(np.int64), scales.astype(np.float64)


@pytest.mark.parametrize("largest", [1e-45, 1e-39, 1e-33, 1.0, 1.2e38, 1.8e38, 3.4e38])
def test_no_group_is_larger_than_its_norm_may_be(largest):
    """Beside a number of any size one of any other, whose square may have few bits or none."""
    halves = torch.arange(-310, 1) / 2
    x = torch.zeros(len(halves), 2 * GROUP, dtype=torch.float64)
    x[:, 0] = largest
    x[:, GROUP:] = largest * 0.87 * 2.0 ** halves.double()[:, None]
    x = x.float()
    numbers, scales = integers_of(x)
    assert (np.sqrt((numbers.astype(float) ** 2).sum(axis=2)) <= INPUT_NORM + 3).all()
    found = torch.from_numpy(numbers * scales[:, :, None]).flatten(1)
    # half a step, and half of what a scale below float32's normal numbers is rounded by
    bound = in_groups(x).norm(dim=2, keepdim=True) * 0.51 / INPUT_NORM + INPUT_NORM * 2.0**-150
    bound += largest * 2.0**-60
    assert ((found - x.double()).abs().unflatten(1, (2, GROUP)) <= bound).all()


def test_a_row_of_the_largest_numbers_is_never_taken_for_zeros():
    weight = torch.full((16, 40), 1e-3)
    weight[1::2] = 0
    out = product(torch.full((1, 40), 3.4e38), weight, torch.empty(1, 16))
    assert not out[0, ::2].isfinite().any()
    out = product(torch.full((1, 40), 4e32), weight, torch.empty(1, 16))
    torch.testing.assert_close(out[0, ::2], torch.full((8,), 40 * 4e29), rtol=1e-4, atol=0)
    assert torch.equal(out[0, 1::2], torch.zeros(8))


@pytest.mark.parametrize("kind", ["one alone", "all alike"])
def test_weights_of_any_size_stay_within_their_norm(kind):
    sizes = 2.0 ** (torch.arange(-300, 257).double() / 2)
    weight = (sizes[:, None] * PATTERNS[kind]).clamp(max=3.4e38).float()
    packed = pack_int16(weight)
    numbers = packed[:, : GROUP * 16].unflatten(1, (GROUP // 2, 16, 2)).transpose(1, 2)
    numbers = numbers.flatten(2).flatten(0, 1)[: len(weight)].double()
    assert (numbers.norm(dim=1) <= WEIGHT_NORM + 3).all()
    assert (numbers[:, 0] >= 0).all()
    scales = packed[:, GROUP * 16 :].view(torch.float32).flatten()[: len(weight)].double()
    step = torch.maximum(weight.double().norm(dim=1) / WEIGHT_NORM, weight[:, 0] / LARGEST)
    bound = 0.51 * torch.maximum(step, torch.tensor(2.0**-126))
    error = (numbers * scales[:, None] - weight.double()).abs().amax(dim=1)
    assert (error <= bound).all()


def test_rows_of_zeros_and_rows_that_are_not_whole():
    x, weight = torch.randn(3, 33), torch.randn(20, 33)
    x[1], weight[2] = 0, 0
    found = product(x, weight, torch.full((3, 32), torch.nan))
    assert torch.equal(found[1], torch.zeros(32))
    assert torch.equal(found[:, 2], torch.zeros(3))
    assert torch.equal(found[:, 20:], torch.zeros(3, 12))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_shows_in_its_own_row(broken):
    x = torch.randn(2, 80)
    x[0, 7] = broken
    out = product(x, torch.randn(16, 80), torch.zeros(2, 16))
    assert not out[0].isfinite().any()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_shows_in_its_own_column(broken):
    weight = torch.randn(32, 80)
    weight[3, 50] = broken
    out = product(torch.randn(2, 80), weight, torch.zeros(2, 32))
    assert not out[:, 3].isfinite().any()
    assert out[:, [*range(3), *range(4, 32)]].isfinite().all()


@pytest.mark.parametrize("count", [0, 1, 15, 31, 32, 33, 200])
def test_a_row_reads_and_writes_nothing_beyond_its_end(count):
    x = np.full(count + 70, np.nan, np.float32)
    x[:count] = np.random.default_rng(count).standard_normal(count)
    made = np.full(int16_words(count) + 1, -7, np.float32)
    int16_row(x, count, made)
    groups = -(-count // GROUP)
    scales = made[16 * groups : 17 * groups]
    numbers = made.view(np.int16)[: GROUP * groups] * np.repeat(scales, GROUP)
    steps = np.repeat(scales, GROUP)[:count]
    assert (np.abs(numbers[:count] - x[:count]) <= 0.502 * steps).all()
    assert (numbers[count:] == 0).all()
    assert (made[17 * groups :] == -7).all()


def test_a_weight_is_read_back_as_it_was():
    weight = torch.randn(40, 33) * torch.logspace(-9, 9, 40)[:, None]
    packed = pack_int16(weight)
    address, size = packed.data_ptr(), int16_panel_bytes(33)
    assert size == packed.stride(0) * 2
    for row in (0, 15, 16, 39):
        found = [int16_weight_at(address + row // 16 * size, row % 16, i, 33) for i in range(33)]
        step = float(weight[row].norm()) / WEIGHT_NORM + float(weight[row].abs().max()) / LARGEST
        torch.testing.assert_close(torch.tensor(found), weight[row], rtol=0, atol=0.51 * step)


def test_gated_products_equal_float64():
    num_rows, num_inputs, width = ROWS_TOGETHER + 13, 40, 48
    weight, x = torch.randn(2 * width, num_inputs), torch.randn(num_rows, num_inputs)
    out = torch.zeros(num_rows, width)
    tiles = np.zeros((2, ROWS_TOGETHER, 2, 16), np.float32)
    packed, left = pack_int16(weight), rounded(x)
    for worker in range(2):
        multiply_gated(
            left, packed.data_ptr(), 0, out.numpy(), tiles, num_rows, num_inputs,
            stored_as(torch.float16, in_pairs=True), Crew(worker, 2, NO_MEETING),
        )  # fmt: skip
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    silu = torch.nn.functional.silu(gate)
    # a sum of 40 products is off by 4e-4 in one case of three; a gate's slope is 1.1 at most
    bound = 0.003 * (1.1 * up.abs() + silu.abs() + 0.003)
    assert_near(out, silu * up, bound)
