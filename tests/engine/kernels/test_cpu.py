"""Compiled CPU kernels against float64, and bit for bit against themselves in other company."""

import numpy as np
import pytest
import torch

from engine.kernels.cpu import MAX_THREADS
from engine.kernels.cpu.attention import AttentionShape, attend, plan_attention, store_token
from engine.kernels.cpu.matmul import KINDS, pack
from engine.kernels.cpu.stack import multiply, multiply_gated, norm_rows
from tests.engine.kernels import oracle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WORKERS = min(2, MAX_THREADS)
NO_SINKS = np.empty(0, np.float32)


@pytest.fixture
def draw(request):
    """Fresh numbers on every run; the seed stands in the failure."""
    seed = int(torch.seed() % 2**31)
    print("seed", seed)  # noqa: T201
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 29])
def test_products_equal_float64(draw, dtype, num_rows):
    num_inputs, num_outputs = int(draw.integers(1, 90)), 16 * int(draw.integers(1, 5))
    weight = torch.randn(num_outputs, num_inputs).to(dtype)
    x, bias = torch.randn(num_rows, num_inputs), torch.randn(num_outputs)
    before = torch.randn(num_rows + 1, num_outputs)
    packed = pack(weight, dtype)
    for has_bias in (False, True):
        for added in (False, True):
            found = before.clone()
            multiply(
                x.numpy(), packed.data_ptr(), bias.data_ptr() if has_bias else 0, found.numpy(),
                added, num_rows, num_inputs, KINDS[dtype], dtype.itemsize, WORKERS,
            )  # fmt: skip
            expected = before.double()
            made = x.double() @ weight.double().T + has_bias * bias.double()
            expected[:num_rows] = added * expected[:num_rows] + made
            torch.testing.assert_close(found.double(), expected, atol=3e-5, rtol=1e-5)


def test_gated_products_equal_float64(draw):
    num_rows, num_inputs, width = 13, 40, 48
    weight, x = torch.randn(2 * width, num_inputs), torch.randn(num_rows, num_inputs)
    x[0] *= 100  # where exp(-gate) leaves float32
    bias = torch.randn(2 * width)
    out = torch.zeros(num_rows, width)
    packed = pack(weight, torch.float32)
    multiply_gated(
        x.numpy(), packed.data_ptr(), bias.data_ptr(), out.numpy(),
        np.zeros((WORKERS, 2, 6, 16), np.float32), num_rows, num_inputs, 0, 4, WORKERS,
    )  # fmt: skip
    expected = oracle.silu_mul(x.double() @ weight.double().T + bias.double())
    torch.testing.assert_close(out[1:].double(), expected[1:], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out[:1].double(), expected[:1], atol=0.1, rtol=1e-3)


@pytest.mark.parametrize("num_rows", [3, 20])
def test_norms_equal_float64(draw, num_rows):
    x, weight, out = torch.randn(num_rows, 70), torch.randn(65), torch.zeros(num_rows, 70)
    norm_rows(x.numpy(), weight.data_ptr(), np.float32(1e-5), out.numpy(), num_rows, 65)
    expected = oracle.rms_norm(x[:, :65], weight, 1e-5)
    torch.testing.assert_close(out[:, :65].double(), expected, atol=1e-5, rtol=1e-5)
    assert not out[:, 65:].any()


class Case:
    """Random sequences in a cache whose free slots are NaN."""

    def __init__(self, query_lens, seq_lens, *, shape, dtype, seed):
        torch.manual_seed(seed)
        heads, kv_heads, dim, block_size = shape
        self.shape = AttentionShape(heads, kv_heads, dim, block_size, KINDS[dtype], dtype.itemsize)
        counts = [-(-length // block_size) for length in seq_lens]
        order = torch.randperm(sum(counts) + 3).split([*counts, 3])
        self.tables = np.full((len(seq_lens), max(counts) + 1), 2**31 - 1, np.int64)
        for table, blocks in zip(self.tables, order[:-1], strict=True):
            table[: len(blocks)] = blocks.numpy()
        size = (sum(counts) + 3, kv_heads, 2, block_size, dim)
        self.cache = torch.full(size, torch.nan, dtype=dtype)
        self.held = []  # keys and values of each sequence
        self.seq_lens, self.query_lens = list(seq_lens), list(query_lens)
        self.queries = [torch.randn(length, heads, dim) for length in seq_lens]
        for n, length in enumerate(seq_lens):
            at = torch.arange(length)
            slots = torch.from_numpy(self.tables[n])[at // block_size] * block_size
            slots += at % block_size
            key, value = torch.randn(2, length, kv_heads, dim).to(dtype).float()
            self.held.append((key.double(), value.double()))
            for t, slot in enumerate(slots.tolist()):
                for h in range(kv_heads):
                    store_token(
                        self.cache.data_ptr(), slot, h, key[t, h].numpy(), value[t, h].numpy(),
                        self.shape,
                    )  # fmt: skip

    def attend(self, rows=None, query_lens=None, workers=WORKERS, **scores):
        """Of some of the sequences, in a step of their own; their last query tokens."""
        rows = list(range(len(self.seq_lens))) if rows is None else rows
        query_lens = [self.query_lens[n] for n in rows] if query_lens is None else query_lens
        query = torch.cat([self.queries[n][-q:] for n, q in zip(rows, query_lens, strict=True)])
        out = torch.full_like(query, torch.nan)
        cu = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int64)
        lengths = np.array([self.seq_lens[n] for n in rows], np.int64)
        sinks = scores.get("sinks")
        attend(
            query.numpy(), out.numpy(), self.cache.data_ptr(), self.tables[rows], cu, lengths,
            self.shape, np.float32(0.2), scores.get("window") or 0,
            np.float32(scores.get("softcap") or 0.0),
            NO_SINKS if sinks is None else sinks.numpy(),
            plan_attention(cu, lengths, self.shape, workers),
        )  # fmt: skip
        parts = zip(query.double().split(query_lens), rows, strict=True)
        expected = torch.cat([self.expected(part, n, **scores) for part, n in parts])
        return out, expected

    def expected(self, query, n, *, window=None, softcap=None, sinks=None):
        """Of one sequence's last tokens, in float64."""
        key, value = self.held[n]
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * 0.2
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        place, at = torch.arange(len(key))[-len(query) :, None], torch.arange(len(key))
        hidden = at > place
        if window is not None:
            hidden |= at <= place - window
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.double().exp()[:, None, None]
        return torch.einsum("hqk,khd->qhd", weights / total, value)


SHAPES = [(6, 2, 32, 16), (4, 4, 16, 32), (8, 1, 48, 16)]  # H, H_kv, D, block_size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_float64_and_never_reads_a_free_slot(draw, shape, dtype):
    lengths = [1, 16, 17, *draw.integers(1, 600, 3).tolist()]
    queries = [1, 16, 5, *(int(draw.integers(1, min(n, 60) + 1)) for n in lengths[3:])]
    case = Case(queries, lengths, shape=shape, dtype=dtype, seed=int(draw.integers(2**31)))
    for scores in (
        {},
        {"window": int(draw.integers(1, 300))},
        {"softcap": 2.0},
        {"sinks": torch.randn(shape[0])},
    ):
        found, expected = case.attend(**scores)
        torch.testing.assert_close(found.double(), expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("scores", [{}, {"window": 70}, {"softcap": 3.0}], ids=str)
def test_a_row_of_attention_is_the_same_bits_in_any_company(draw, scores):
    lengths = [300, 17, 1, 700, 511]
    case = Case(
        lengths, lengths, shape=(6, 2, 32, 16), dtype=torch.float32, seed=int(draw.integers(2**31))
    )
    whole, _ = case.attend(**scores)
    last = [whole[end - 1] for end in np.cumsum(lengths)]
    for n, length in enumerate(lengths):
        alone, _ = case.attend([n], [1], **scores)  # a decode, cut into its stretches
        assert torch.equal(alone[-1], last[n])
        alone, _ = case.attend([n], [1], workers=1, **scores)  # in one piece
        assert torch.equal(alone[-1], last[n])
        chunk, _ = case.attend([n], [min(length, 23)], **scores)
        assert torch.equal(chunk[-1], last[n])
    together, _ = case.attend([3, 0, 4] * 8, [1, 2, 3] * 8, **scores)
    ends = np.cumsum([1, 2, 3] * 8) - 1
    for end, n in zip(ends, [3, 0, 4] * 8, strict=True):
        assert torch.equal(together[end], last[n])


def test_a_product_has_the_same_bits_in_any_company(draw):
    weight, x = torch.randn(64, 200), torch.randn(40, 200)
    packed = pack(weight, torch.float32)

    def product(rows, workers):
        out = torch.empty(len(rows), 64)
        multiply(
            rows.numpy(), packed.data_ptr(), 0, out.numpy(), False, len(rows), 200, 0, 4, workers
        )
        return out

    whole = product(x, WORKERS)
    for count in (1, 2, 5, 6, 7, 13):
        assert torch.equal(product(x[3 : 3 + count].clone(), 1), whole[3 : 3 + count])


def test_a_key_that_is_not_a_number_shows_in_the_output(draw):
    case = Case([1, 1], [40, 40], shape=(6, 2, 32, 16), dtype=torch.float32, seed=1)
    store_token(
        case.cache.data_ptr(), int(case.tables[0, 1]) * 16 + 3, 0,
        np.full(32, np.nan, np.float32), np.zeros(32, np.float32), case.shape,
    )  # fmt: skip
    found, expected = case.attend()
    assert found[0, :3].isnan().all()
    assert found[0, 3:].isfinite().all()
    torch.testing.assert_close(found[1].double(), expected[1], atol=3e-6, rtol=1e-5)
