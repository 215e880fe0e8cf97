"""Paged attention against float64, on shapes drawn afresh in each run.

float32 and float16 only: the interpreter's products of bfloat16 are silently wrong. A failure
shows the seed; put it into SEEDS to see it again.
"""

import itertools
import math
import random
import secrets
from collections import defaultdict

import pytest
import torch
import triton.language as tl

from engine.kernels import reference
from engine.kernels.triton import attention, attention_items, attention_kernels, devices
from engine.kernels.triton.attention import paged_attention
from tests.engine.kernels import oracle

SEEDS = [secrets.randbelow(2**32)]
DTYPES = [torch.float32, torch.float16]
SEEN = defaultdict(set)  # of each property of a case, what this file has had


def attention_case(draw, *, head_dim, group, dtype, queries, block_size=16, num_kv_heads=1):
    """Sequences of (query length, length) in shuffled blocks; NaN where no token is."""
    SEEN["block size"].add(block_size)
    SEEN["head dim"].add(head_dim)
    SEEN["group"].add(group)
    for query_len, length in queries:
        SEEN["query length"].add(query_len)
        SEEN["tokens in the last block"].add((block_size, length % block_size))
    counts = [-(-length // block_size) for _, length in queries]
    num_blocks = sum(counts) + 2
    free = draw.sample(range(num_blocks), num_blocks)
    cache = torch.full((num_blocks, num_kv_heads, 2, block_size, head_dim), torch.nan)
    tables = torch.full((len(queries), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    for n, ((_, length), count) in enumerate(zip(queries, counts, strict=True)):
        for i in range(count):
            block = tables[n, i] = free.pop()
            held = min(block_size, length - i * block_size)
            cache[block, :, :, :held] = torch.randn(num_kv_heads, 2, held, head_dim)
    num_heads, num_tokens = num_kv_heads * group, sum(q for q, _ in queries)
    # as a layer hands it over: heads of a wider tensor
    fused = torch.full((num_tokens, num_heads + 2, head_dim), torch.nan, dtype=dtype)
    fused[:, :num_heads] = torch.randn(num_tokens, num_heads, head_dim)
    return {
        "query": fused[:, :num_heads],
        "kv_cache": cache.to(dtype),
        "block_tables": tables,
        "cu_query_lens": torch.tensor([0, *(q for q, _ in queries)]).cumsum(0).int(),
        "seq_lens": torch.tensor([length for _, length in queries], dtype=torch.int32),
        "scale": head_dim**-0.5,
    }


def in_float64(
    query, kv_cache, block_tables, cu_query_lens, seq_lens, *, scale,
    sliding_window=None, softcap=None, sinks=None,
):  # fmt: skip
    """A sequence's scores as one matrix, in float64."""
    num_kv_heads, block_size = kv_cache.shape[1], kv_cache.shape[3]
    out = []
    for n, length in enumerate(seq_lens.tolist()):
        chunk = query[cu_query_lens[n] : cu_query_lens[n + 1]].double()
        blocks = block_tables[n, : -(-length // block_size)].long()
        keys, values = kv_cache[blocks].double().permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length]
        grouped = chunk.unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,hkd->hgqk", grouped, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(length - len(chunk), length)[:, None] - torch.arange(length)
        seen = behind >= 0
        if sliding_window is not None:
            seen &= behind < sliding_window
        weights = scores.masked_fill(~seen, -torch.inf).exp()
        total = weights.sum(-1)
        if sinks is not None:
            total = total + sinks.double().exp().view(num_kv_heads, -1, 1)
        weights = weights / total[..., None]
        out.append(torch.einsum("hgqk,hkd->qhgd", weights, values).flatten(1, 2))
    return torch.cat(out)


def check(case, **options):
    note(options)
    found = paged_attention(**case, **options)
    dtype = case["query"].dtype
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), in_float64(**case, **options), **oracle.attention_tolerance(dtype)
    )


def note(options):
    SEEN["options"].add(tuple(sorted(name for name in options if options[name] is not None)))


@pytest.fixture(params=SEEDS, ids=str)
def draw(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


# in turn, not drawn: tests that begin with one seed would all draw the same
COMBINATIONS = itertools.cycle(itertools.product((False, True), repeat=3))


def options_for(draw, case):
    window, softcap, sinks = next(COMBINATIONS)
    return {
        "sliding_window": draw.choice((1, draw.randint(2, 150))) if window else None,
        "softcap": draw.uniform(0.5, 5) if softcap else None,
        "sinks": torch.randn(case["query"].shape[1]) if sinks else None,
    }


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_block_size_across_its_edges(draw, dtype, block_size):
    edge = draw.randint(1, 3) * block_size
    queries = [(1, edge), (1, edge + 1), (3, edge + 2), (1, 1), (edge, edge)]
    case = attention_case(
        draw, head_dim=64, group=2, dtype=dtype, queries=queries, block_size=block_size,
        num_kv_heads=2,
    )  # fmt: skip
    check(case, **options_for(draw, case))


@pytest.mark.parametrize(
    ("queries", "window"),
    [
        # the first row of a tile sees the last key of one tile of keys, or the first of the next
        *(([(20, 20 + first)], None) for first in (62, 63, 64, 126, 127)),
        *(([(1, length)], None) for length in (63, 64, 65, 128, 129)),
        # the same of the first key that a window leaves
        *(([(1, 202)], 202 - first) for first in (126, 127, 128, 129)),
        *(([(20, 150)], 131 - first) for first in (62, 63, 64, 65)),
    ],
)
def test_keys_at_the_edges_of_tiles(draw, queries, window):
    case = attention_case(draw, head_dim=64, group=2, dtype=torch.float16, queries=queries)
    check(case, sliding_window=window)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_head_dim(draw, dtype, head_dim):
    length = draw.randint(20, 90)
    queries = [(1, draw.randint(1, 80)), (draw.randint(17, 20), length)]
    case = attention_case(draw, head_dim=head_dim, group=3, dtype=dtype, queries=queries)
    check(case, **options_for(draw, case))


@pytest.mark.parametrize("group", range(1, 9))
def test_each_number_of_query_heads_to_a_kv_head(draw, group):
    queries = [(1, draw.randint(1, 70)), (draw.randint(2, 30), draw.randint(30, 70)), (1, 9)]
    case = attention_case(draw, head_dim=64, group=group, dtype=torch.float16, queries=queries)
    check(case, **options_for(draw, case))


def test_more_query_heads_than_a_tile_has_rows(draw):
    case = attention_case(
        draw, head_dim=64, group=24, dtype=torch.float16, queries=[(1, 40), (3, 9)]
    )
    check(case)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 290])
def test_long_contexts_of_decodes_are_split_and_merged(draw, window, sinks):
    queries = [(1, draw.randint(513, 800)), (1, draw.randint(1, 256)), (1, 512)]
    case = attention_case(draw, head_dim=64, group=3, dtype=torch.float16, queries=queries)
    check(case, sliding_window=window, sinks=torch.randn(3) if sinks else None)


def test_a_split_has_more_keys_where_a_context_would_have_too_many_splits(draw, monkeypatch):
    monkeypatch.setattr(attention, "MAX_SPLITS", 2)
    queries = [(1, draw.randint(700, 900)), (2, 300)]
    case = attention_case(draw, head_dim=64, group=3, dtype=torch.float16, queries=queries)
    check(case)


@pytest.mark.parametrize("window", [None, 100])
def test_a_short_chunk_of_a_long_prompt_is_split(draw, monkeypatch, window):
    # on a device with idle processors
    large = devices.Device(capability=80, num_processors=64)
    monkeypatch.setattr(attention, "device_of", lambda device: large)
    queries = [(1, 70), (draw.randint(40, 60), draw.randint(520, 600)), (20, 280), (1, 300)]
    case = attention_case(draw, head_dim=64, group=3, dtype=torch.float16, queries=queries)
    check(case, sliding_window=window, sinks=torch.randn(3))


@pytest.mark.parametrize("num_processors", [2, 64], ids=["whole", "split"])
def test_a_long_prompt_beside_decodes(draw, monkeypatch, num_processors):
    device = devices.Device(capability=80, num_processors=num_processors)
    monkeypatch.setattr(attention, "device_of", lambda _: device)
    length = draw.randint(270, 300)
    queries = [(1, 33), (length, length), (1, 290), (7, 100)]
    case = attention_case(draw, head_dim=64, group=2, dtype=torch.float16, queries=queries)
    check(case, sinks=torch.randn(2))


def test_programs_that_have_many_items_each(draw, monkeypatch):
    monkeypatch.setattr(attention, "PROGRAMS_PER_PROCESSOR", 1)
    queries = [(1, draw.randint(1, 40)) for _ in range(9)]
    case = attention_case(
        draw, head_dim=64, group=2, dtype=torch.float16, queries=queries, num_kv_heads=2
    )
    check(case)


@pytest.mark.parametrize("num_sequences", [4, 5, 9])
def test_more_sequences_than_are_counted_at_once(draw, monkeypatch, num_sequences):
    for module in (attention_items, attention_kernels):
        monkeypatch.setattr(module, "SEQUENCES_AT_ONCE", tl.constexpr(4))
    # on a device that splits the chunks, so that `merge` looks for their sequences, too
    large = devices.Device(capability=80, num_processors=64)
    monkeypatch.setattr(attention, "device_of", lambda device: large)
    queries = [(1, draw.randint(1, 40)) for _ in range(num_sequences - 1)]
    queries.insert(draw.randrange(num_sequences), (20, draw.randint(257, 290)))
    case = attention_case(draw, head_dim=64, group=2, dtype=torch.float16, queries=queries)
    check(case)


@pytest.mark.parametrize("queries", [[(1, 20), (5, 30)], [(5, 270), (1, 9), (2, 31), (4, 600)]])
def test_what_a_captured_step_is_padded_with_is_passed_over(draw, queries):
    """Sequences without a token, and tokens of no sequence; as many rows as the shape has."""
    case = attention_case(draw, head_dim=64, group=2, dtype=torch.float16, queries=queries)
    wanted = in_float64(**case)
    num_sequences = len(queries) + 3
    for name, filling in (("cu_query_lens", len(case["query"])), ("seq_lens", 0)):
        case[name] = torch.cat((case[name], torch.full((3,), filling, dtype=torch.int32)))
    tables = case["block_tables"]
    case["block_tables"] = torch.cat((tables, torch.full((3, tables.shape[1]), 2**31 - 1)))
    case["block_tables"] = case["block_tables"].int()
    for num_tokens in (len(wanted), 5 * num_sequences):
        padded = torch.full((num_tokens, *case["query"].shape[1:]), torch.nan).half()
        padded[: len(wanted)] = case["query"]
        found = paged_attention(**case | {"query": padded})[: len(wanted)]
        torch.testing.assert_close(
            found.double(), wanted, **oracle.attention_tolerance(torch.float16)
        )


def test_a_decode_is_the_same_to_the_last_bit_whatever_is_beside_it(draw):
    queries = [(1, draw.randint(300, 600)), (1, 40), (30, 60), (1, 700)]
    case = attention_case(draw, head_dim=64, group=2, dtype=torch.float16, queries=queries)
    together = paged_attention(**case)
    alone = paged_attention(
        **case
        | {
            "query": case["query"][:1],
            "block_tables": case["block_tables"][:1, : math.ceil(queries[0][1] / 16)],
            "cu_query_lens": case["cu_query_lens"][:2],
            "seq_lens": case["seq_lens"][:1],
        }
    )
    assert torch.equal(alone, together[:1])


def kept_in_8_bits(cache, kv_dtype):
    """The cache in 8 bits, free slots no numbers; and what it then holds, in float64."""
    numbers, scales = reference.in_8_bits(cache, kv_dtype)
    lanes = [x.contiguous().view(torch.int8).flatten(3) for x in (numbers, scales)]
    kept = torch.cat(lanes, -1).view(*cache.shape[:4], -1).view(kv_dtype)
    return kept, numbers.double() * scales.double()


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "block_size", "group"),
    [
        (torch.int8, 64, 16, 3), (torch.float8_e4m3fn, 80, 8, 1), (torch.int8, 96, 32, 8),
        (torch.float8_e4m3fn, 128, 16, 4), (torch.int8, 256, 16, 2),
    ],
    ids=str,
)  # fmt: skip
def test_a_cache_of_eight_bits(draw, kv_dtype, head_dim, block_size, group):
    queries = [(1, draw.randint(257, 300)), (draw.randint(5, 20), 40), (1, 5)]
    case = attention_case(
        draw, head_dim=head_dim, group=group, dtype=draw.choice(DTYPES), queries=queries,
        block_size=block_size, num_kv_heads=2,
    )  # fmt: skip
    kept, held = kept_in_8_bits(case["kv_cache"], kv_dtype)
    options = options_for(draw, case)
    note(options)
    SEEN["type of the cache"].add(kv_dtype)
    found = paged_attention(**case | {"kv_cache": kept}, **options)
    wanted = in_float64(**case | {"kv_cache": held}, **options)
    torch.testing.assert_close(found.double(), wanted, rtol=3e-3, atol=3e-3)


def test_nothing_to_do(draw):
    case = attention_case(draw, head_dim=64, group=2, dtype=torch.float16, queries=[(1, 20)])
    empty = {
        "query": case["query"][:0],
        "block_tables": case["block_tables"][:0],
        "cu_query_lens": case["cu_query_lens"][:1],
        "seq_lens": case["seq_lens"][:0],
    }
    assert paged_attention(**case | empty).shape == (0, 2, 64)


def test_together_they_have_had_every_odd_shape():
    """The last of the file: what the tests above are there to cover, they have covered."""
    assert SEEN["block size"] >= {8, 16, 32}
    assert SEEN["head dim"] >= {64, 80, 96, 128, 256}
    assert SEEN["group"] >= set(range(1, 9))
    lengths = SEEN["query length"]
    assert min(lengths) == 1
    assert 270 <= max(lengths) <= 300
    assert len(lengths) >= 8
    for block_size in (8, 16, 32):  # a full last block, and one that has a single token
        assert {(block_size, 0), (block_size, 1)} <= SEEN["tokens in the last block"]
    names = ("sinks", "sliding_window", "softcap")
    assert SEEN["options"] >= {c for n in range(4) for c in itertools.combinations(names, n)}
    assert SEEN["type of the cache"] == {torch.int8, torch.float8_e4m3fn}
