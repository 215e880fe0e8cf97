"""The GPU's kernels, timed beside the device's limits."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels import fp8, reference
from engine.kernels.packed_weight import quantized_4, quantized_8
from engine.kernels.registry import REFERENCE, Kernels

Row = dict[str, object]
CACHE_BYTES = 256 << 20  # more than a GPU keeps of what it has read
BUSY_CYCLES = 20_000_000  # about 10 ms: ten rounds are launched meanwhile


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
    """Median seconds of a call on a device, with nothing of what it reads in the device's cache.

    All rounds are launched while the device is kept busy: what a launch takes is not in them.
    """

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._device = device
        self._rounds = rounds
        size = CACHE_BYTES if device.type == "cuda" else 1
        self._other = torch.empty(size, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], object]) -> float:
        for _ in range(2):
            run()
        times = self._on_gpu(run) if self._device.type == "cuda" else self._by_clock(run)
        return statistics.median(times)

    def _by_clock(self, run: Callable[[], object]) -> list[float]:
        times = []
        for _ in range(self._rounds):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return times

    def _on_gpu(self, run: Callable[[], object]) -> list[float]:
        pairs = []
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        for _ in range(self._rounds):
            self._other.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [float(begin.elapsed_time(end)) / 1e3 for begin, end in pairs]


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


def types_of_8_bits(device: torch.device) -> list[torch.dtype]:
    """That a cache may have on a device."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
    return [torch.int8] if old else [torch.int8, torch.float8_e4m3fn]


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
