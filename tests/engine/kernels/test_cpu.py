"""Compiled CPU kernels against float64, and bit for bit against themselves in other company."""

import numba
import numpy as np
import pytest
import torch

from engine.kernels.cpu.attention_plan import Sequences, plan_attention
from engine.kernels.cpu.matmul import (
    ROWS_TOGETHER,
    multiply_gated,
    pack,
    stored_as,
)
from engine.kernels.cpu.norms import norm_row
from engine.kernels.cpu.pairs import HAS_PAIRS
from engine.kernels.cpu.quantize import pack_int8, quantize_row, quantized_words
from engine.kernels.cpu.tiles_int8 import GROUP_WORDS, INT8_BY_AMX
from engine.kernels.cpu.vectors import gelu_mul_panels
from engine.kernels.cpu.workers import Crew, run_side_by_side, share, wait_for_all
from tests.engine.kernels import oracle, product_case
from tests.engine.kernels.attention_case import WORKERS, Case, assert_near
from tests.engine.kernels.product_case import NO_MEETING

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAIRED = pytest.param(
    {"dtype": torch.bfloat16, "in_pairs": True},
    marks=pytest.mark.skipif(not HAS_PAIRS, reason="needs AVX512-BF16"),
)
KV_CACHES = [*({"dtype": dtype} for dtype in (*DTYPES, torch.int8)), PAIRED]
KEPT = [{"dtype": torch.float32}, {"dtype": torch.int8}, PAIRED]  # 8 bits have a scale


def product(x, packed, out, dtype=torch.float32, *, workers=WORKERS, **how):
    left = x.numpy()
    if dtype == torch.int8:
        left = product_case.rounded(x, quantize_row, quantized_words)
    stored = stored_as(dtype)
    return product_case.product(x, left, packed, out, stored, workers=workers, **how)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 6, 7, 29, 16 * 6 + 1])
def test_products_equal_float64(draw, dtype, num_rows):
    num_inputs, num_outputs = int(draw.integers(1, 90)), 16 * int(draw.integers(1, 5))
    weight = torch.randn(num_outputs, num_inputs).to(dtype)
    x, bias = torch.randn(num_rows, num_inputs), torch.randn(num_outputs)
    before = torch.randn(num_rows + 1, num_outputs)
    packed = pack(weight, dtype)
    for has_bias in (False, True):
        for added in (False, True):
            found = before.clone()
            product(x, packed, found, dtype, bias=bias if has_bias else None, added=added)
            expected = before.double()
            made = x.double() @ weight.double().T + has_bias * bias.double()
            expected[:num_rows] = added * expected[:num_rows] + made
            torch.testing.assert_close(found.double(), expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("num_inputs", [2048, 2049, 4097])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_panels_that_many_tiles_meet_give_each_row_what_it_gets_alone(dtype, num_inputs):
    """Up to some size they are made float32 first, beyond it by each tile."""
    weight, x = torch.randn(32, num_inputs).to(dtype), torch.randn(40, num_inputs)
    packed = pack(weight, dtype)
    found = product(x, packed, torch.zeros(40, 32), dtype)
    for row in range(40):
        alone = product(x[row : row + 1], packed, torch.zeros(1, 32), dtype)
        assert torch.equal(alone[0], found[row])
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, atol=2e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_what_is_added_to_much_loses_no_more_than_one_rounding(draw, dtype):
    """A residual may be large: it takes no part in the sum of products until that is whole."""
    weight, x = torch.randn(32, 1536).round(decimals=1), torch.randn(13, 1536)
    packed = pack_int8(weight) if dtype == torch.int8 else pack(weight, dtype)
    products = product(x, packed, torch.zeros(13, 32), dtype).double()
    large = torch.full((13, 32), 1e6)
    found = product(x, packed, large.clone(), dtype, added=True).double()
    assert ((found - (products + 1e6)).abs() <= 2**-5).all()  # half a step of float32 there


def by_groups(x):
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))


def inputs_in_8_bits(x):
    """Each 32 numbers of a row as multiples, up to 127, of a scale: integers and scales."""
    largest = by_groups(x).abs().amax(dim=2, keepdim=True)
    # torch divides a number by way of the reciprocal, which may round to the other neighbour
    integers = (by_groups(x) * torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0)).round()
    return integers.double(), (largest / 127).double()


def weights_in_8_bits(x):
    """Likewise, of scales that are kept in 16 bits."""
    scales = (by_groups(x).abs().amax(dim=2, keepdim=True) / 127).bfloat16().float()
    integers = (by_groups(x) / scales.where(scales > 0, 1.0)).round().clamp(-127, 127)
    return integers.double(), scales.double()


@pytest.mark.parametrize("num_inputs", [1, 8, 64, 333, 1536])
def test_products_with_8_bit_weights_are_those_of_the_rounded_numbers(draw, num_inputs):
    num_rows, num_outputs = 13, 40  # the last panel is not full
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(48)
    weight[3] = 0
    weight[4, :5] *= 1000  # the rest of its group loses much, other groups nothing
    x = torch.randn(num_rows, num_inputs) * torch.tensor([1e-20, 1.0, 1e3]).repeat(5)[:13, None]
    packed = pack_int8(weight)
    out = torch.zeros(num_rows, 48)
    found = product(x, packed, out, torch.int8, bias=bias)[:, :num_outputs].double()
    left, left_scales = inputs_in_8_bits(x)
    right, right_scales = weights_in_8_bits(weight)
    made = torch.einsum("tgk,ngk->tng", left, right)
    made *= left_scales.squeeze(2)[:, None] * right_scales.squeeze(2)
    bound = 1e-5 * (made.abs().sum(2) + bias[:num_outputs].abs()) + 1e-30
    assert ((found - made.sum(2) - bias[:num_outputs]).abs() <= bound).all()
    for row in range(num_rows):
        alone = product(x[row : row + 1], packed, torch.zeros(1, 48), torch.int8, bias=bias)
        assert torch.equal(alone[0, :num_outputs].double(), found[row])


@pytest.mark.parametrize("count", [0, 31, 32, 33, 200])
def test_a_row_in_8_bits_reads_nothing_beyond_its_end(draw, count):
    x = np.full(count + 70, np.nan, np.float32)
    x[:count] = draw.standard_normal(count)
    made = np.full(quantized_words(count) + 1, -7, np.float32)
    quantize_row(x, count, made)
    num_groups = -(-count // 32)
    first, step = (8 * num_groups, 1) if INT8_BY_AMX else (0, GROUP_WORDS)
    assert np.isfinite(made[first:][: num_groups * step : step]).all()
    assert made[-1] == -7


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_products_with_8_bit_weights_do_not_hide_what_is_no_number(draw, broken):
    packed, x = pack_int8(torch.randn(16, 20)), torch.randn(2, 20)
    x[0, 7] = broken
    out = torch.zeros(2, 16)
    product(x, packed, out, torch.int8)
    assert not out[0].isfinite().any()
    assert out[1].isfinite().all()


def test_gated_products_equal_float64(draw):
    num_rows, num_inputs, width = ROWS_TOGETHER + 13, 40, 48
    weight, x = torch.randn(2 * width, num_inputs), torch.randn(num_rows, num_inputs)
    x[0] *= 100  # where exp(-gate) leaves float32
    bias = torch.randn(2 * width)
    out = torch.zeros(num_rows, width)
    packed = pack(weight, torch.float32)
    tiles = np.zeros((WORKERS, ROWS_TOGETHER, 2, 16), np.float32)
    for worker in range(WORKERS):
        multiply_gated(
            x.numpy(), packed.data_ptr(), bias.data_ptr(), out.numpy(), tiles, num_rows, num_inputs,
            stored_as(torch.float32), Crew(worker, WORKERS, NO_MEETING),
        )  # fmt: skip
    expected = oracle.silu_mul(x.double() @ weight.double().T + bias.double())
    torch.testing.assert_close(out[1:].double(), expected[1:], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out[:1].double(), expected[:1], atol=0.1, rtol=1e-3)


@numba.njit
def _gelu(gate, up, out):
    gelu_mul_panels(gate.ctypes.data, up.ctypes.data, out.ctypes.data, len(gate) // 16)


def test_a_gelu_gate_equals_float64_far_out_too_and_hides_no_nan(draw):
    x = torch.randn(2, 160) * 4
    x[0, 80:] = torch.tensor([-1e30, -200, 0, 200, 1e30]).repeat(16)
    expected = oracle.gelu_mul(x.view(1, -1)).squeeze(0)
    gate, up = x.numpy()
    _gelu(gate, up, gate)  # in place, as in a step
    torch.testing.assert_close(torch.from_numpy(gate).double(), expected, atol=1e-5, rtol=2e-6)
    gate[3] = np.nan
    _gelu(gate, up, gate)
    assert np.isnan(gate[3])


@pytest.mark.parametrize("size", [1, 15, 16, 65, 130, 576])
def test_norms_equal_float64(draw, size):
    x, weight, out = torch.randn(5, size + 5), torch.randn(size), torch.zeros(5, size + 5)
    for row, normed in zip(x.numpy(), out.numpy(), strict=True):
        norm_row(row, weight.data_ptr(), np.float32(1e-5), normed, size)
    expected = oracle.rms_norm(x[:, :size], weight, 1e-5)
    torch.testing.assert_close(out[:, :size].double(), expected, atol=1e-5, rtol=1e-5)
    assert not out[:, size:].any()
    for row in x.numpy():  # in place, as of queries and keys
        norm_row(row, weight.data_ptr(), np.float32(1e-5), row, size)
    torch.testing.assert_close(x[:, :size].double(), expected, atol=1e-5, rtol=1e-5)


@numba.njit(parallel=True)
def _meet(num_workers, num_phases, seen, met):
    counter = np.zeros(8, np.int64)
    for worker in numba.prange(num_workers):
        crew = Crew(worker, num_workers, counter)
        for phase in range(num_phases):
            seen[worker, phase] = 1
            wait_for_all(crew, phase)
            met[worker, phase] = seen[:, phase].sum()


def test_no_worker_leaves_a_phase_before_all_have_ended_it():
    assert run_side_by_side(WORKERS)
    seen, met = np.zeros((2, WORKERS, 3000), np.int64)
    _meet(WORKERS, 3000, seen, met)
    assert (met == WORKERS).all()


def test_workers_share_all_and_nothing_twice():
    for count in (0, 1, 5, 64):
        for workers in (1, 2, 3, 7):
            parts = [
                range(*share(count, Crew(worker, workers, NO_MEETING))) for worker in range(workers)
            ]
            assert [i for part in parts for i in part] == list(range(count))


SHAPES = [(6, 2, 32, 16), (4, 4, 16, 32), (8, 1, 48, 16), (20, 1, 64, 16), (3, 3, 96, 16)]
# H, H_kv, D, block_size


@pytest.mark.parametrize("kept", KV_CACHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_float64_and_never_reads_a_free_slot(draw, shape, kept):
    lengths = [1, 16, 17, *draw.integers(1, 600, 3).tolist()]
    queries = [1, 16, 5, *(int(draw.integers(1, min(n, 60) + 1)) for n in lengths[3:])]
    case = Case(queries, lengths, shape=shape, **kept, seed=int(draw.integers(2**31)))
    for scores in (
        {},
        {"window": int(draw.integers(1, 300))},
        {"softcap": 2.0},
        {"sinks": torch.randn(shape[0])},
    ):
        assert_near(*case.attend(**scores))


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("scores", [{}, {"window": 70}, {"softcap": 3.0}], ids=str)
def test_a_row_of_attention_is_the_same_bits_in_any_company(draw, scores, kept):
    lengths = [300, 17, 1, 700, 511]
    case = Case(lengths, lengths, shape=(6, 2, 32, 16), **kept, seed=int(draw.integers(2**31)))
    whole, *_ = case.attend(**scores)
    last = [whole[end - 1] for end in np.cumsum(lengths)]
    for n, length in enumerate(lengths):
        alone, *_ = case.attend([n], [1], **scores)  # a decode, cut into its stretches
        assert torch.equal(alone[-1], last[n])
        alone, *_ = case.attend([n], [1], workers=1, **scores)  # in one piece
        assert torch.equal(alone[-1], last[n])
        chunk, *_ = case.attend([n], [min(length, 23)], **scores)
        assert torch.equal(chunk[-1], last[n])
    together, *_ = case.attend([3, 0, 4] * 8, [1, 2, 3] * 8, **scores)
    ends = np.cumsum([1, 2, 3] * 8) - 1
    for end, n in zip(ends, [3, 0, 4] * 8, strict=True):
        assert torch.equal(together[end], last[n])


def a_case_that_shares(draw, **kept):
    """A tree of prefixes, more decodes at its root than one item holds, and some apart from it."""
    lengths = [256, 1100, 1024, 1025, 700, 900, *draw.integers(512, 900, 18).tolist(), 600, 40]
    queries = [1] * 20 + [3, 1, 1, 1, 1, 1]
    case = Case(queries, lengths, shape=(6, 2, 32, 16), **kept, seed=int(draw.integers(2**31)))
    for n in range(1, 24):
        case.let_begin_alike(n, 0, 16)
    for n in (2, 3):
        case.let_begin_alike(n, 1, 64)  # four stretches
    case.let_begin_alike(5, 4, 40)  # two stretches and a half
    for n in range(6, 24):
        case.let_begin_alike(n, 5, 31)  # not quite two
    return case


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("scores", [{}, {"window": 300}, {"softcap": 3.0}], ids=str)
def test_a_shared_prefix_is_read_once_and_changes_no_bit(draw, scores, kept):
    case = a_case_that_shares(draw, **kept)
    found, *expected = case.attend(**scores)
    assert_near(found, *expected)
    ends = np.cumsum(case.query_lens)
    for n, (end, count) in enumerate(zip(ends, case.query_lens, strict=True)):
        alone, *_ = case.attend([n], [count], workers=1, **scores)
        assert torch.equal(alone, found[end - count : end])
    shuffled = draw.permutation(len(ends)).tolist()
    assert_near(*case.attend(shuffled, [case.query_lens[n] for n in shuffled], **scores))


def test_the_plan_reads_each_shared_stretch_once(draw):
    case = a_case_that_shares(draw, dtype=torch.float32)
    cu = np.concatenate(([0], np.cumsum(case.query_lens))).astype(np.int64)
    sequences = Sequences(case.tables, cu, np.array(case.seq_lens, np.int64))
    plan = plan_attention(sequences, case.shape, WORKERS)
    reads = {}  # of each stretch, by its blocks: the sequences of each item of the first head
    for first, end, head, first_row, end_row, low, high, partial in plan.items:
        members = plan.order[first:end]
        assert (end - first) * (end_row - first_row) <= 48
        assert len(members) == 1 or partial >= 0
        for stretch in range(low, high):
            [blocks] = {blocks_of(case, n, stretch) for n in members}
            if head == 0:
                reads.setdefault(blocks, []).append(sorted(members.tolist()))
    # 23 decodes of 3 rows, 16 to an item, and the chunk by itself
    assert sorted(map(len, reads[blocks_of(case, 0, 0)])) == [1, 7, 16]
    for n, stretch, members in (
        (1, 1, [1, 2, 3]),
        (1, 3, [1, 2, 3]),
        (4, 1, [4, 5]),
        (24, 0, [24]),
    ):
        assert reads[blocks_of(case, n, stretch)] == [members]


def blocks_of(case, n, stretch):
    return tuple(case.tables[n, stretch * 16 : stretch * 16 + 16])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8], ids=str)
def test_a_product_has_the_same_bits_in_any_company(draw, dtype):
    weight, x = torch.randn(64, 200), torch.randn(40, 200)
    packed = pack_int8(weight) if dtype == torch.int8 else pack(weight, dtype)
    whole = product(x, packed, torch.empty(40, 64), dtype)
    for count in (1, 2, 5, 6, 7, 13):
        part = product(x[3 : 3 + count], packed, torch.empty(count, 64), dtype, workers=3)
        assert torch.equal(part, whole[3 : 3 + count])


def test_a_key_that_is_not_a_number_shows_in_the_output(draw):
    case = Case([1, 1], [40, 40], shape=(6, 2, 32, 16), dtype=torch.float32, seed=1)
    slot = int(case.tables[0, 1]) * 16 + 3
    case.store(slot, 0, torch.full((32,), torch.nan), torch.zeros(32))
    found, expected, _ = case.attend()
    assert found[0, :3].isnan().all()
    assert found[0, 3:].isfinite().all()
    torch.testing.assert_close(found[1].double(), expected[1], atol=3e-6, rtol=1e-5)
