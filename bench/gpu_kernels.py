"""The GPU's kernels: proven against float64 on the device, then timed beside its limits."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels import draws, fp8, reference
from engine.kernels.packed_weight import quantized_4, quantized_8, quantized_fp8
from engine.kernels.registry import REFERENCE, Kernels

Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the shapes to time: Llama-3.1-8B's on a GPU, next to nothing where only the way counts."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 14336
    vocab: int = 128256
    batches: tuple[int, ...] = (1, 8, 64, 256)
    contexts: tuple[int, ...] = (512, 4096, 32768)
    prompts: tuple[int, ...] = (512, 2048, 8192, 16384)
    most_cache_bytes: int = 24 << 30
    aimed_decode: tuple[int, int] = (64, 4096)  # batch, context
    aimed_prompt: int = 8192
    copy_bytes: int = 4 << 30
    matrix: int = 8192


DRY = Sizes(
    heads=4, kv_heads=2, head_dim=16, hidden=64, intermediate=128, vocab=300, batches=(1, 3),
    contexts=(32,), prompts=(48,), most_cache_bytes=1 << 20, copy_bytes=1 << 16, matrix=64,
    aimed_decode=(2, 40), aimed_prompt=40,
)  # fmt: skip


class Timer:
    """Median seconds of a call on a device."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._device = device
        self._rounds = rounds

    def __call__(self, run: Callable[[], object]) -> float:
        for _ in range(2):
            run()
        times = [self._once(run) for _ in range(self._rounds)]
        return statistics.median(times)

    def _once(self, run: Callable[[], object]) -> float:
        if self._device.type != "cuda":
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def limits(timer: Timer, device: torch.device, sizes: Sizes) -> dict[str, float]:
    """What the device copies, read and written together, and multiplies."""
    pair = torch.empty(2, sizes.copy_bytes, dtype=torch.uint8, device=device)
    copy_s = timer(lambda: pair[1].copy_(pair[0]))
    n = sizes.matrix
    a, b = torch.randn(2, n, n, device=device, dtype=torch.bfloat16).unbind()
    matmul_s = timer(lambda: a @ b)
    return {
        "copy_gb_s": 2 * sizes.copy_bytes / copy_s / 1e9,
        "bf16_tflop_s": 2 * n**3 / matmul_s / 1e12,
    }


def attention_case(
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    queries: list[tuple[int, int]],
    kept: torch.dtype | None = None,  # of the cache, where it is not the query's
) -> dict[str, Any]:
    """Sequences of (query length, length) in shuffled blocks of 16."""
    counts = [-(-length // 16) for _, length in queries]
    total = sum(counts)
    shape = (total, sizes.kv_heads, 2, 16, sizes.head_dim)
    cache = torch.empty(shape, device=device, dtype=dtype).normal_()
    if kept is not None:
        cache = in_8_bits(cache, kept)
    order = torch.randperm(total, device=device, dtype=torch.int32)
    tables = torch.zeros(len(queries), max(counts), device=device, dtype=torch.int32)
    start = 0
    for n, count in enumerate(counts):
        tables[n, :count] = order[start : start + count]
        start += count
    lens = torch.tensor([q for q, _ in queries], device=device)
    zero = lens.new_zeros(1)
    num_tokens = sum(q for q, _ in queries)
    query = torch.empty(num_tokens, sizes.heads, sizes.head_dim, device=device, dtype=dtype)
    return {
        "query": query.normal_(),
        "kv_cache": cache,
        "block_tables": tables,
        "cu_query_lens": torch.cat((zero, lens.cumsum(0))).int(),
        "seq_lens": torch.tensor([n for _, n in queries], device=device, dtype=torch.int32),
    }


def in_8_bits(cache: Tensor, kept: torch.dtype) -> Tensor:
    """As `reference.store_kv` keeps it, a few blocks at a time: a cache may fill half a GPU."""
    lanes = []
    for blocks in torch.tensor_split(cache, -(-len(cache) // 4096)):
        parts = reference.in_8_bits(blocks, kept)
        lanes.append(torch.cat([x.contiguous().view(torch.int8).flatten(3) for x in parts], -1))
    return torch.cat(lanes).view(*cache.shape[:4], -1).view(kept)


def numbers_of(cache: Tensor) -> Tensor:
    """What a cache holds, in float64."""
    if cache.itemsize > 1:
        return cache.double()
    shape = (*cache.shape[:4], cache.shape[4] - 4)
    lanes = cache.view(torch.int8).flatten(3)
    behind = shape[3] * shape[4]
    numbers = lanes[..., :behind].contiguous().view(cache.dtype).double().view(shape)
    scales = lanes[..., behind:].contiguous().view(torch.float32)
    return numbers * scales.double().unsqueeze(-1)


def attention_in_float64(case: dict[str, Any], scale: float) -> Tensor:
    tables, cu = case["block_tables"], case["cu_query_lens"].tolist()
    out = []
    for n, length in enumerate(case["seq_lens"].tolist()):
        chunk = case["query"][cu[n] : cu[n + 1]].double()
        blocks = tables[n, : -(-length // 16)].long()
        held = numbers_of(case["kv_cache"][blocks]).permute(2, 1, 0, 3, 4).flatten(2, 3)
        keys, values = held[:, :, :length]
        grouped = chunk.unflatten(1, (len(keys), -1))
        scores = torch.einsum("qhgd,hkd->hgqk", grouped, keys) * scale
        at = torch.arange(length, device=keys.device)
        seen = at <= at[-len(chunk) :, None]
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out.append(torch.einsum("hgqk,hkd->qhgd", weights, values).flatten(1, 2))
    return torch.cat(out)


class Proof:
    """Rows that say how far an operation's numbers are from float64's, of the largest there is."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def row(self, name: str, found: Tensor, wanted: Tensor, allowed: float | None = None) -> Row:
        most = 16 * torch.finfo(self.dtype).eps if allowed is None else allowed
        off = (found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
        return {"kernel": name, "error": off.item(), "ok": bool(off <= most)}

    def random(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_()


def proofs(kernels: Kernels, device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Each kernel against float64. One that fails is told with what it says; the others go on."""
    proof = Proof(device)
    for prove in (
        lambda: prove_attention(proof, kernels, sizes),
        lambda: prove_stores(proof, kernels, sizes),
        lambda: prove_sums(proof, kernels, sizes),
        lambda: prove_packed(proof, kernels, sizes),
        lambda: prove_fp8(proof, kernels, sizes),
        lambda: prove_experts(proof, kernels),
        lambda: draw_proofs(kernels, device, sizes.vocab),
    ):
        rows = iter(prove())
        try:
            yield from rows
        except Exception as error:  # noqa: BLE001 (of a kernel that nobody has run before)
            yield {"kernel": "?", "failed": f"{type(error).__name__}: {error}"[:1000], "ok": False}


def prove_attention(proof: Proof, kernels: Kernels, sizes: Sizes) -> Iterator[Row]:
    scale = sizes.head_dim**-0.5
    longest = max(sizes.prompts[0], 40)
    for queries in ([(1, longest), (1, 3), (1, 17)], [(longest - 7, longest), (1, 33), (5, 20)]):
        for kept in (None, *types_of_8_bits(proof.device)):
            case = attention_case(sizes, proof.device, proof.dtype, queries, kept)
            found = kernels.paged_attention(**case, scale=scale)
            name = f"paged_attention {queries} {kept or proof.dtype}"
            yield proof.row(name, found, attention_in_float64(case, scale))


def prove_sums(proof: Proof, kernels: Kernels, sizes: Sizes) -> Iterator[Row]:
    random = proof.random
    x, residual, weight = random(7, sizes.hidden), random(7, sizes.hidden), random(sizes.hidden)
    total = (x + residual).double()
    norm = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    yield proof.row("add_rms_norm", kernels.add_rms_norm(x, residual, weight, 1e-5), norm)
    gate_up = random(5, 2 * sizes.intermediate)
    gate, up = gate_up.double().chunk(2, -1)
    silu = torch.nn.functional.silu(gate) * up
    yield proof.row("silu_mul", kernels.silu_mul(gate_up), silu)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
    yield proof.row("gelu_mul", kernels.gelu_mul(gate_up), gelu)


def prove_packed(proof: Proof, kernels: Kernels, sizes: Sizes) -> Iterator[Row]:
    whole = proof.random(sizes.hidden, 256) / 16
    for packed in (quantized_8(whole), quantized_4(whole)):
        inputs = proof.random(9, 256)
        wanted = inputs.double() @ packed.dequantized(proof.dtype).double().T
        found = kernels.packed_linear(inputs, packed, None)
        yield proof.row(f"packed_linear {packed.bits}", found, wanted)


def prove_fp8(proof: Proof, kernels: Kernels, sizes: Sizes) -> Iterator[Row]:
    values, scales = fp8.quantize_rows(proof.random(sizes.hidden, 256) / 16)
    inputs = proof.random(16, 256)
    rows, row_scales = fp8.quantize_rows(inputs)
    wanted = (rows.double() * row_scales.double()) @ (values.double() * scales.double()).T
    found = kernels.fp8_linear(inputs, values, scales.T.contiguous(), None)
    yield proof.row("fp8_linear", found, wanted)


def prove_experts(proof: Proof, kernels: Kernels) -> Iterator[Row]:
    first, second = proof.random(5, 2 * 64, 128) / 11, proof.random(5, 128, 64) / 8
    scores = torch.stack([torch.randperm(5) for _ in range(33)]).to(proof.device, proof.dtype)
    tokens = proof.random(33, 128)
    ways: tuple[tuple[str, Any], ...] = (
        ("", lambda w: w),
        (" of 4 bits", lambda w: quantized_4(w.flatten(0, 1), 64)),
        (" of fp8", lambda w: quantized_fp8(w.flatten(0, 1))),
    )
    for name, made in ways:
        up, down = made(first), made(second)
        exact = (up, down) if name else (first.double(), second.double())
        wanted = reference.moe(tokens.double(), scores.double(), exact[0], exact[1], 2, True)
        yield proof.row(f"moe{name}", kernels.moe(tokens, scores, up, down, 2, True), wanted)


def prove_stores(proof: Proof, kernels: Kernels, sizes: Sizes) -> Iterator[Row]:
    """Keys turned and values stored, in the model's type and in 8 bits."""
    key, value = proof.random(2, 9, sizes.kv_heads, sizes.head_dim)
    device, dtype = proof.device, proof.dtype
    angles = torch.rand(9, sizes.head_dim // 2, device=device) * 100
    low, high = key.double().chunk(2, -1)
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    slots = torch.randperm(64, device=device)[:9]
    steps = {torch.int8: 1 / 127, torch.float8_e4m3fn: 1 / 15}
    for kept in (dtype, *types_of_8_bits(device)):
        width = sizes.head_dim + (4 if kept.itemsize == 1 else 0)
        cache = torch.zeros(4, sizes.kv_heads, 2, 16, width, device=device, dtype=kept)
        query = proof.random(9, sizes.heads, sizes.head_dim)
        kernels.rotary_store_kv(query, key.clone(), value, angles.cos(), angles.sin(), cache, slots)
        held = numbers_of(cache).permute(0, 3, 2, 1, 4).flatten(0, 1)[slots]
        wanted = torch.stack((turned, value.double()), 1)
        yield proof.row(f"rotary_store_kv {kept}", held, wanted, steps.get(kept))


def types_of_8_bits(device: torch.device) -> list[torch.dtype]:
    """That a cache may have on a device."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
    return [torch.int8] if old else [torch.int8, torch.float8_e4m3fn]


def draw_proofs(kernels: Kernels, device: torch.device, vocab: int) -> list[Row]:
    """The tokens that plain PyTorch draws, of rows of all kinds."""
    kinds = [(0.0, 1.0, 0.0, 0), (1.0, 1.0, 0.0, 0), (0.7, 0.9, 0.0, 0), (1.0, 1.0, 0.05, 40)]
    numbers = torch.tensor(
        [[t, p, math.log(m) if m else -math.inf] for t, p, m, _ in kinds], dtype=torch.float64
    ).repeat(8, 1)
    words = torch.tensor([[k, 12345 + i, 7 * i] for i in range(8) for _, _, _, k in kinds])
    logits = torch.randn(len(words), vocab) * 3
    wanted = draws.draw(logits, numbers, words)
    found = kernels.draw(logits.to(device), numbers.to(device), words.to(device)).cpu()
    same = int((found == wanted).sum())
    return [{"kernel": "draw", "same": same, "of": len(words), "ok": same == len(words)}]


def aimed_at(kernels: Kernels, timer: Timer, device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The two shapes that the aims name, before all others."""
    yield decode_row(kernels, timer, device, sizes, *sizes.aimed_decode)
    yield prefill_row(kernels, timer, device, sizes, sizes.aimed_prompt)


def timings(kernels: Kernels, timer: Timer, device: torch.device, sizes: Sizes) -> Iterator[Row]:
    yield from linear_timings(kernels, timer, device, sizes)
    for kept in types_of_8_bits(device):
        yield decode_row(kernels, timer, device, sizes, *sizes.aimed_decode, kept)
    for length in sizes.prompts:
        if length != sizes.aimed_prompt:
            yield prefill_row(kernels, timer, device, sizes, length)
    token_bytes = 4 * sizes.kv_heads * sizes.head_dim
    for batch in sizes.batches:
        for context in sizes.contexts:
            fits = batch * context * token_bytes <= sizes.most_cache_bytes
            if fits and (batch, context) != sizes.aimed_decode:
                yield decode_row(kernels, timer, device, sizes, batch, context)


def decode_row(
    kernels: Kernels, timer: Timer, device: torch.device, sizes: Sizes, batch: int, context: int,
    kept: torch.dtype | None = None,
) -> Row:  # fmt: skip
    case = attention_case(sizes, device, torch.bfloat16, [(1, context)] * batch, kept)
    scale = sizes.head_dim**-0.5
    seconds = timer(lambda: kernels.paged_attention(**case, scale=scale))
    of_a_token = 2 * sizes.head_dim if kept is None else sizes.head_dim + 4
    size = batch * context * 2 * sizes.kv_heads * of_a_token
    return {
        "kernel": "decode attention" if kept is None else f"decode attention, {kept} cache",
        "batch": batch, "context": context, "ms": seconds * 1e3, "gb_s": size / seconds / 1e9,
    }  # fmt: skip


def prefill_row(
    kernels: Kernels, timer: Timer, device: torch.device, sizes: Sizes, length: int
) -> Row:
    case = attention_case(sizes, device, torch.bfloat16, [(length, length)])
    scale = sizes.head_dim**-0.5
    seconds = timer(lambda: kernels.paged_attention(**case, scale=scale))
    operations = 2 * length**2 * sizes.heads * sizes.head_dim
    return {
        "kernel": "prefill attention", "length": length,
        "ms": seconds * 1e3, "tflop_s": operations / seconds / 1e12,
    }  # fmt: skip


def linear_timings(
    kernels: Kernels, timer: Timer, device: torch.device, sizes: Sizes
) -> Iterator[Row]:
    """The gate and up projection in each way to keep it, and what stands beside products."""
    weight = torch.empty(2 * sizes.intermediate, sizes.hidden, device=device, dtype=torch.bfloat16)
    weight.normal_(std=0.02)
    small, smaller = quantized_8(weight), quantized_4(weight, min(128, sizes.hidden))
    values, scales = fp8.quantize_rows(weight)
    scales = scales.T.contiguous()
    for count in (1, 16, 64, 512):
        x = torch.randn(count, sizes.hidden, device=device).bfloat16()
        for name, size, run in (
            ("bf16", 2.0, lambda x=x: x @ weight.T),
            ("fp8", 1.0, lambda x=x: kernels.fp8_linear(x, values, scales, None)),
            ("int8", 1.0, lambda x=x: kernels.packed_linear(x, small, None)),
            ("int4", 0.5, lambda x=x: kernels.packed_linear(x, smaller, None)),
        ):
            seconds = timer(run)
            yield {
                "kernel": f"linear {name}", "rows": count, "ms": seconds * 1e3,
                "gb_s": weight.numel() * size / seconds / 1e9,
                "tflop_s": 2 * weight.numel() * count / seconds / 1e12,
            }  # fmt: skip
    logits = torch.randn(sizes.batches[-1], sizes.vocab, device=device)
    numbers = torch.tensor([[0.8, 0.95, -math.inf]], device=device, dtype=torch.float64)
    words = torch.tensor([[50, 1, 2]], device=device)
    count = len(logits)
    given = numbers.repeat(count, 1), words.repeat(count, 1)
    seconds = timer(lambda: kernels.draw(logits, *given))
    yield {"kernel": "draw top-k top-p", "rows": count, "ms": seconds * 1e3}


def kernels_for(device: torch.device) -> Kernels:
    if device.type != "cuda":
        return REFERENCE
    from engine.kernels import triton

    reason = triton.unavailable()
    if reason is not None:
        raise SystemExit(f"no kernels to measure: {reason}")
    return triton.provide(REFERENCE)
