"""Keys and values in 8 bits, as compiled kernels keep them: what is lost, and what must not be."""

import numpy as np
import pytest
import torch

from engine.kernels.cpu.emit import PANEL
from engine.kernels.registry import REFERENCE
from tests.engine.kernels.attention_case import Case, kept

SHAPE = (6, 2, 32, 16)  # H, H_kv, D, block_size


def a_case(draw, query_lens, seq_lens, shape=SHAPE):
    return Case(query_lens, seq_lens, shape=shape, dtype=torch.int8, seed=int(draw.integers(2**31)))


def stored(case, slot, head):
    """A slot's key and value in float64, read as the layout says."""
    dim, block_size = case.shape.head_dim, case.shape.block_size
    block, place = divmod(slot, block_size)
    planes = case.cache[block, head].view(2, block_size // PANEL, PANEL * (dim + 4))
    keys, values = planes[:, place // PANEL]
    lane = place % PANEL
    return [
        numbers.double() * piece[PANEL * dim :].contiguous().view(torch.float32)[lane].double()
        for piece, numbers in (
            (keys, keys[: PANEL * dim].view(dim, PANEL)[:, lane]),
            (values, values[: PANEL * dim].view(PANEL, dim)[lane]),
        )
    ]


@pytest.mark.parametrize("shape", [SHAPE, (2, 1, 48, 32)])
def test_each_number_is_off_by_half_a_step_and_the_largest_by_nothing(draw, shape):
    case = a_case(draw, [1], [1], shape)
    dim, block_size = shape[2:]
    for place in (0, 5, block_size - 1):
        sizes = 10.0 ** torch.empty(2, 1).uniform_(-30, 30)
        pair = torch.randn(2, dim) * sizes
        case.store(block_size + place, shape[1] - 1, *pair)
        for x, found in zip(pair, stored(case, block_size + place, shape[1] - 1), strict=True):
            step = x.abs().max().double() / 127
            assert (found - x.double()).abs().max() <= step * 0.50001
            largest = x.abs().argmax()
            torch.testing.assert_close(found[largest], x[largest].double(), rtol=1e-6, atol=0)
            assert torch.equal(found, kept(x, torch.int8))


def test_zeros_are_zeros_and_the_smallest_and_largest_numbers_do_no_harm(draw):
    case = a_case(draw, [1], [1])
    for x, expected in (
        (torch.zeros(32), torch.zeros(32)),
        (torch.full((32,), -0.0), torch.zeros(32)),
        (torch.full((32,), 1e-45), torch.zeros(32)),  # where a scale would be 0
        (torch.full((32,), -3.4e38), torch.full((32,), -3.4e38)),
    ):
        case.store(16, 1, x, x)
        for found in stored(case, 16, 1):
            torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 17, 31])
def test_what_is_not_a_number_shows_in_its_head_and_no_other(draw, broken, place):
    case = a_case(draw, [1, 1], [40, 40])
    slot = int(case.tables[0, 1]) * 16 + 3
    bad, zeros = torch.randn(32), torch.zeros(32)
    bad[place] = broken
    for key, value in ((bad, zeros), (zeros, bad)):
        case.store(slot, 0, key, value)
        assert [x.isnan().all() for x in stored(case, slot, 0)] == [key is bad, value is bad]
        found, expected, _ = case.attend()
        assert found[0, :3].isnan().all()
        torch.testing.assert_close(found[0, 3:].double(), expected[0, 3:], atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(found[1].double(), expected[1], atol=3e-6, rtol=1e-5)


def test_attention_is_as_near_to_that_over_unrounded_numbers_as_half_steps_allow(draw):
    lengths = [1, 40, 300, 700]
    case = a_case(draw, [1, 40, 7, 1], lengths)
    found, *_ = case.attend()
    held, case.held = case.held, case.given
    _, unrounded, _ = case.attend()
    for n, part in enumerate((found.double() - unrounded).split([1, 40, 7, 1])):
        keys, values = held[n]
        query = case.queries[n][-len(part) :].abs().sum(-1).max()
        # a score is off by that much at most, and a weight by its exponential, twice
        off = 0.2 * query * keys.abs().max() / 127 / 2 * 1.01
        bound = (2 * off).expm1() * values.abs().max() + values.abs().max() / 127 / 2 * 1.01
        assert 0 < part.abs().max() <= bound


def test_a_copied_block_gives_the_same_bits(draw):
    case = a_case(draw, [3, 1], [300, 40])
    before, *_ = case.attend()
    free = sorted(set(range(len(case.cache))) - {int(b) for t in case.tables for b in t})
    sources, copies = case.tables[[0, 1], [2, 1]].copy(), np.array(free[:2])
    REFERENCE.copy_blocks(case.cache, torch.from_numpy(sources), torch.from_numpy(copies))
    case.tables[[0, 1], [2, 1]] = copies
    case.cache[sources] = -1  # each scale no number
    after, *_ = case.attend()
    assert torch.equal(after, before)
