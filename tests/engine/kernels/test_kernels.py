"""Every implementation of every kernel against float64, on shapes drawn afresh in each run.

A failure shows the seed; put it into SEEDS to see it again.
"""

import random
import secrets

import pytest
import torch

from engine.kernels.reference import NO_SLOT
from engine.kernels.registry import PROVIDERS, REFERENCE, select_kernels
from tests.engine.kernels import oracle

SEEDS = [secrets.randbelow(2**32) for _ in range(8)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = [torch.device(name) for name in PROVIDERS if name == "cpu" or torch.cuda.is_available()]
CASES = {
    f"{device}-{name}": (kernels, device)
    for device in DEVICES
    for name, kernels in (("reference", REFERENCE), ("selected", select_kernels(device)))
    if name == "reference" or kernels is not REFERENCE
}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.parametrize(("kernels", "device"), CASES.values(), ids=CASES.keys()),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("seed", SEEDS, ids=range(len(SEEDS))),
]


@pytest.fixture
def draw(seed):
    torch.manual_seed(seed)
    return random.Random(seed)


def normal(*shape, dtype, device):
    return torch.randn(shape).to(device, dtype)


def attention_case(draw, dtype, device):
    """Sequences of odd lengths in shuffled blocks; every slot that holds no token holds a NaN."""
    num_kv_heads, group = draw.choice((1, 2, 3)), draw.choice((1, 2, 3, 5))
    head_dim, block_size = draw.choice((2, 8, 20, 64)), draw.choice((1, 3, 8, 16))
    seq_lens = [draw.randint(1, 60) for _ in range(draw.randint(1, 5))]
    query_lens = [draw.choice((1, length, draw.randint(1, length))) for length in seq_lens]
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(counts) + 2
    free = draw.sample(range(num_blocks), num_blocks)
    cache = torch.full((num_blocks, num_kv_heads, 2, block_size, head_dim), torch.nan)
    tables = torch.full((len(seq_lens), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    for n, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        for i in range(count):
            block = free.pop()
            tables[n, i] = block
            held = min(block_size, length - i * block_size)
            cache[block, :, :, :held] = torch.randn(num_kv_heads, 2, held, head_dim)
    cumulated = torch.tensor([0, *query_lens]).cumsum(0)
    return {
        "query": normal(
            sum(query_lens), num_kv_heads * group, head_dim, dtype=dtype, device=device
        ),
        "kv_cache": cache.to(device, dtype),
        "block_tables": tables.to(device),
        "cu_query_lens": cumulated.to(device, torch.int32),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=device),
        "scale": head_dim**-0.5,
        "sliding_window": draw.choice((None, 1, draw.randint(1, 70))),
        "softcap": draw.choice((None, draw.uniform(0.5, 5))),
        "sinks": draw.choice((None, normal(num_kv_heads * group, dtype=dtype, device=device))),
    }


def test_attention_equals_float64_and_never_reads_a_free_slot(kernels, device, dtype, draw):
    case = attention_case(draw, dtype, device)
    found = kernels.paged_attention(**case)
    assert found.dtype == dtype
    on_cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    expected = oracle.paged_attention(**on_cpu)
    compiled = kernels is not REFERENCE
    tolerance = oracle.attention_tolerance(dtype) if compiled else oracle.tolerance(dtype)
    torch.testing.assert_close(found.cpu().double(), expected, **tolerance)


def test_attention_takes_query_views_as_layers_hand_them_over(kernels, device, dtype, draw):
    case = attention_case(draw, dtype, device)
    expected = kernels.paged_attention(**case)
    query = case["query"]
    wide = torch.cat((query, torch.full_like(query, torch.nan)), dim=1)
    found = kernels.paged_attention(**case | {"query": wide[:, : query.shape[1]]})
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_cache_of_another_type_is_filled_and_read_as_rounded(kernels, device, dtype, draw):
    """In 8 bits a number is off by half a step, and attention is that over what is kept."""
    case = attention_case(draw, dtype, device)
    wide = case["kv_cache"].float()
    blocks, heads, _, block_size, dim = wide.shape
    tokens = wide.permute(0, 3, 2, 1, 4).reshape(blocks * block_size, 2, heads, dim)
    [slots] = tokens[:, 0, 0, 0].isfinite().nonzero(as_tuple=True)
    key, value = tokens[slots].to(dtype).unbind(1)
    types = [torch.float16, torch.bfloat16] if device.type == "cpu" else []  # elsewhere the model's
    for kept in (*types, torch.int8, torch.float8_e4m3fn):
        width = dim + 4 if kept.itemsize == 1 else dim
        cache = torch.zeros(blocks, heads, 2, block_size, width, dtype=kept, device=device)
        cache.view(torch.uint8).fill_(0xFF)  # no number in any type
        kernels.store_kv(key, value, cache, slots)
        read = cache
        if kept.itemsize == 1:
            numbers, scales = oracle.in_8_bits(cache)
            read = numbers * scales
            read_at = read.permute(0, 3, 2, 1, 4).reshape(blocks * block_size, 2, heads, dim)[slots]
            given = tokens.to(dtype).double()[slots]
            largest = given.abs().amax(-1, keepdim=True)
            half_step = largest / 254
            if kept != torch.int8:  # of three digits behind the first; below 2**-6 of fewer
                half_step = torch.maximum(given.abs() / 16, largest / 448 * 2**-10)
            assert ((read_at - given).abs() <= 1.0001 * half_step).all()
            assert (numbers.abs().amax(-1) >= 126).any()
        found = kernels.paged_attention(**case | {"kv_cache": cache})
        expected = oracle.paged_attention(**case | {"kv_cache": read})
        torch.testing.assert_close(found.double(), expected, **oracle.tolerance(dtype))


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 0.0, 1e-45])
def test_what_8_bits_cannot_keep_is_no_number_or_nothing(
    kernels, device, dtype, draw, broken, kept
):
    x = torch.zeros(1, 1, 6, dtype=dtype, device=device)
    x[..., 3] = broken
    cache = torch.zeros(1, 1, 2, 4, 10, dtype=kept, device=device)
    kernels.store_kv(x, x, cache, torch.tensor([2], device=device))
    numbers, scales = oracle.in_8_bits(cache)
    assert not numbers.any()
    scale = scales[0, 0, :, 2]
    assert scale.isnan().all() if not abs(broken) < 1 else not scale.any()


def test_keys_and_values_go_to_their_slots_and_nowhere_else(kernels, device, dtype, draw):
    num_blocks, heads, block_size, dim = (draw.randint(1, 9) for _ in range(4))
    cache = normal(num_blocks, heads, 2, block_size, dim, dtype=dtype, device=device)
    slots = draw.sample(range(num_blocks * block_size), draw.randint(1, num_blocks * block_size))
    # as a layer hands them over: slices of one wider tensor
    fused = normal(len(slots), 2 * heads + 1, dim, dtype=dtype, device=device)
    key, value = fused[:, 1 : heads + 1], fused[:, heads + 1 :]
    slots[draw.randrange(len(slots))] = NO_SLOT  # of a token that a step was padded with
    expected = cache.clone()
    for token, slot in enumerate(slots):
        if slot != NO_SLOT:
            expected[slot // block_size, :, 0, slot % block_size] = key[token]
            expected[slot // block_size, :, 1, slot % block_size] = value[token]
    kernels.store_kv(key, value, cache, torch.tensor(slots, device=device))
    assert torch.equal(cache, expected)


def test_blocks_are_copied_as_they_were_before_the_first_copy(kernels, device, dtype, draw):
    num_blocks = draw.randint(3, 20)
    cache = normal(num_blocks, 2, 2, 3, 5, dtype=dtype, device=device)
    destinations = draw.sample(range(num_blocks), draw.randint(1, num_blocks))
    sources = [draw.randrange(num_blocks) for _ in destinations]
    before = cache.clone()
    kernels.copy_blocks(
        cache,
        torch.tensor(sources, device=device),
        torch.tensor(destinations, device=device),
    )
    for block in range(num_blocks):
        source = sources[destinations.index(block)] if block in destinations else block
        assert torch.equal(cache[block], before[source])


def test_rms_norm_equals_float64(kernels, device, dtype, draw):
    shape = [draw.randint(1, 7) for _ in range(draw.randint(1, 2))] + [draw.randint(1, 700)]
    x = normal(*shape, dtype=dtype, device=device) * 10 ** draw.uniform(-2, 2)
    weight, eps = normal(shape[-1], dtype=dtype, device=device), 10 ** draw.uniform(-6, -4)
    found = kernels.rms_norm(x, weight, eps)
    assert found.dtype == dtype
    expected = oracle.rms_norm(x.cpu(), weight.cpu(), eps)
    torch.testing.assert_close(found.cpu().double(), expected, **oracle.tolerance(dtype))


def test_add_rms_norm_changes_the_residual_and_norms_it(kernels, device, dtype, draw):
    shape = (draw.randint(1, 40), draw.randint(1, 700))
    x, residual = normal(2, *shape, dtype=dtype, device=device)
    weight = normal(shape[-1], dtype=dtype, device=device)
    total = x + residual
    found = kernels.add_rms_norm(x.clone(), residual, weight, 1e-5)
    assert torch.equal(residual, total)
    expected = oracle.rms_norm(total.cpu(), weight.cpu(), 1e-5)
    torch.testing.assert_close(found.cpu().double(), expected, **oracle.tolerance(dtype))


def test_queries_are_turned_in_place_and_keys_on_their_way_to_their_slots(
    kernels, device, dtype, draw
):
    tokens, heads, kv_heads = draw.randint(1, 30), draw.randint(1, 9), draw.randint(1, 4)
    turned, beyond, block_size = 2 * draw.randint(1, 64), draw.choice((0, 6)), draw.randint(1, 9)
    # as a layer hands them over: heads of one wider tensor, of each the first part to be turned
    fused = normal(tokens, heads + 2 * kv_heads, turned + beyond, dtype=dtype, device=device)
    query, key, value = fused.split((heads, kv_heads, kv_heads), dim=1)
    slots = draw.sample(range(tokens * block_size), tokens)
    angle = torch.rand(tokens, turned // 2, device=device) * 100
    cos, sin = angle.cos(), angle.sin()
    wanted = fused.cpu().double()
    wanted[:, :-kv_heads, :turned] = oracle.rotary(
        fused[:, :-kv_heads, :turned].cpu(), cos.cpu(), sin.cpu()
    )
    cache = normal(tokens, kv_heads, 2, block_size, turned + beyond, dtype=dtype, device=device)
    kept = cache.cpu().double()
    for token, slot in enumerate(slots):
        block, place = divmod(slot, block_size)
        kept[block, :, 0, place], kept[block, :, 1, place] = wanted[token, heads:].chunk(2)
    rest = query[..., turned:].clone(), value.clone()
    kernels.rotary_store_kv(query, key, value, cos, sin, cache, torch.tensor(slots, device=device))
    tolerance = oracle.tolerance(dtype)
    torch.testing.assert_close(query.cpu().double(), wanted[:, :heads], **tolerance)
    torch.testing.assert_close(cache.cpu().double(), kept, **tolerance)
    assert torch.equal(query[..., turned:], rest[0])
    assert torch.equal(value, rest[1])


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gates_equal_float64(kernels, device, dtype, draw, name):
    gate_up = normal(draw.randint(1, 30), 2 * draw.randint(1, 700), dtype=dtype, device=device)
    found = getattr(kernels, name)(gate_up * 4)
    assert found.dtype == dtype
    expected = getattr(oracle, name)(gate_up.cpu() * 4)
    torch.testing.assert_close(found.cpu().double(), expected, **oracle.tolerance(dtype))


def test_experts_equal_float64_token_by_token(kernels, device, dtype, draw):
    num_tokens, hidden, width = draw.randint(0, 30), draw.randint(1, 60), draw.randint(1, 50)
    num_experts = draw.randint(1, 9)
    sizes = ((num_tokens, hidden), (num_experts, 2 * width, hidden), (num_experts, hidden, width))
    x, gate_up, down = (normal(*size, dtype=dtype, device=device) for size in sizes)
    # apart by more than float32's rounding, so that the choice is sure
    logits = torch.stack([torch.randperm(num_experts) / 2 for _ in range(num_tokens + 1)])[1:]
    given = (
        x,
        logits.to(device, dtype),
        gate_up / hidden**0.5,
        down / width**0.5,
        draw.randint(1, num_experts),
        draw.choice((False, True)),
    )
    found = kernels.moe(*given)
    assert found.dtype == dtype
    expected = oracle.moe(*(g.cpu() if isinstance(g, torch.Tensor) else g for g in given))
    # both products of an expert are rounded, and what is between them
    rounding = 4 * torch.finfo(dtype).eps
    close = {"rtol": rounding + 1e-5, "atol": rounding + 1e-5}
    torch.testing.assert_close(found.cpu().double(), expected, **close)
