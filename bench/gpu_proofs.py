"""Every kernel of a GPU against float64, on the device.

How far a number may be off follows from its type: by the roundings that its computation has.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.gpu_kernels import Row, Sizes, attention_case, types_of_8_bits
from engine.kernels import draws, fp8, reference
from engine.kernels.packed_weight import quantized_4, quantized_8, quantized_fp8
from engine.kernels.registry import Kernels

IN_FLOAT32 = 1e-5  # of sums and functions, beside a result's own size


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


def attention_in_float64(
    case: dict[str, Any], scale: float, *, sliding_window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    tables, cu = case["block_tables"], case["cu_query_lens"].tolist()
    out = []
    for n, length in enumerate(case["seq_lens"].tolist()):
        chunk = case["query"][cu[n] : cu[n + 1]].double()
        blocks = tables[n, : -(-length // 16)].long()
        held = numbers_of(case["kv_cache"][blocks]).permute(2, 1, 0, 3, 4).flatten(2, 3)
        keys, values = held[:, :, :length]
        grouped = chunk.unflatten(1, (len(keys), -1))
        scores = torch.einsum("qhgd,hkd->hgqk", grouped, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length, device=keys.device)
        behind = at[-len(chunk) :, None] - at
        seen = behind >= 0
        if sliding_window is not None:
            seen &= behind < sliding_window
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            sink = sinks.double().view(len(keys), -1, 1, 1).expand(-1, -1, len(chunk), 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out.append(torch.einsum("hgqk,hkd->qhgd", weights, values).flatten(1, 2))
    return torch.cat(out)


class Proof:
    """Rows that say by how many times of what they may be off an operation's numbers are."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> None:
        self.device = device
        self.dtype = dtype
        self.sizes = sizes
        self.eps = torch.finfo(dtype).eps

    def row(
        self,
        name: str,
        found: Tensor,
        wanted: Tensor,
        roundings: float = 1,  # of numbers as large as the result
        beside: float = 0.01,  # and as large as results are in general
    ) -> Row:
        size = wanted.square().mean().sqrt()
        may_be = self.eps / 2 * (roundings * wanted.abs() + beside * size)
        return self.within(name, found, wanted, may_be + IN_FLOAT32 * (wanted.abs() + size))

    def within(self, name: str, found: Tensor, wanted: Tensor, may_be: Tensor) -> Row:
        off = (found.double() - wanted).abs()
        worst = float((off / may_be.clamp(min=1e-30)).max())
        short = str(self.dtype).removeprefix("torch.")
        return {"kernel": f"{name} {short}", "off": worst, "ok": worst <= 1}

    def same(self, name: str, found: Tensor, wanted: Tensor) -> Row:
        differ = int((found != wanted).sum())
        return {"kernel": name, "differ": differ, "of": wanted.numel(), "ok": differ == 0}

    def random(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_()


def prove_attention(proof: Proof, kernels: Kernels) -> Iterator[Row]:
    sizes, half = proof.sizes, proof.dtype == torch.float16
    scale, longest = sizes.head_dim**-0.5, max(sizes.prompts[0], 40)
    sinks = proof.random(sizes.heads)
    options: list[dict[str, Any]] = [
        {},
        {"sliding_window": longest // 2 + 1},
        {"softcap": 5.0},
        {"sinks": sinks},
        {"sliding_window": longest // 3, "softcap": 5.0, "sinks": sinks},
    ]
    steps = [(1, longest), (1, 3), (1, 17)], [(longest - 7, longest), (1, 33), (5, 20)]
    for queries in steps:
        for kept in (None,) if half else (None, *types_of_8_bits(proof.device)):
            case = attention_case(sizes, proof.device, proof.dtype, queries, kept)
            for asked in options[:1] if half else options if kept is None else options[::4]:
                found = kernels.paged_attention(**case, scale=scale, **asked)
                name = f"paged_attention {queries} {' '.join(asked)} {kept or 'whole'}"
                wanted = attention_in_float64(case, scale, **asked)
                # weights are rounded before they meet the values, which are about 1
                may_be = (proof.eps + IN_FLOAT32) * (wanted.abs() + 1)
                yield proof.within(name, found, wanted, may_be * (1 if kept is None else 3))


def prove_stores(proof: Proof, kernels: Kernels) -> Iterator[Row]:
    """Keys turned or as they are, and values, in the model's type and in 8 bits."""
    sizes, device = proof.sizes, proof.device
    key, value = proof.random(2, 9, sizes.kv_heads, sizes.head_dim)
    angles = torch.rand(9, sizes.head_dim // 2, device=device) * 100
    turned = turned_in_float64(key, angles)
    slots = torch.randperm(64, device=device)[:9]
    slots[4] = reference.NO_SLOT
    there = slots >= 0
    for kept in (proof.dtype, *types_of_8_bits(device)):
        width = sizes.head_dim + (4 if kept.itemsize == 1 else 0)
        shape = (4, sizes.kv_heads, 2, 16, width)
        for name, keys in (("rotary_store_kv", turned), ("store_kv", key.double())):
            cache = torch.zeros(shape, device=device, dtype=kept)
            query = proof.random(9, sizes.heads, sizes.head_dim)
            if name == "store_kv":
                kernels.store_kv(key, value, cache, slots)
            else:
                wanted = turned_in_float64(query, angles)
                angled = angles.cos(), angles.sin()
                kernels.rotary_store_kv(query, key.clone(), value, *angled, cache, slots)
                yield proof.row(f"{name} {kept} queries", query, wanted)
            held = numbers_of(cache).permute(0, 3, 2, 1, 4).flatten(0, 1)
            wanted = torch.stack((keys, value.double()), 1)[there]
            yield proof.within(
                f"{name} {kept}", held[slots[there]], wanted, may_be_kept(wanted, kept)
            )
            held[slots[there]] = 0
            yield proof.same(f"{name} {kept} elsewhere", held, torch.zeros_like(held))


def turned_in_float64(x: Tensor, angles: Tensor) -> Tensor:
    low, high = x.double().chunk(2, -1)
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def may_be_kept(wanted: Tensor, kept: torch.dtype) -> Tensor:
    """By how much numbers may be off in a cache of this type: half from one to the next."""
    largest = wanted.abs().amax(-1, keepdim=True)
    in_float32 = IN_FLOAT32 * largest
    if kept == torch.int8:
        return (largest / 127 / 2 + in_float32).expand_as(wanted)
    if kept == torch.float8_e4m3fn:
        return torch.maximum(wanted.abs() / 16, largest / 448 / 2**10) + in_float32
    return torch.finfo(kept).eps / 2 * wanted.abs() + in_float32


def prove_copies(proof: Proof, kernels: Kernels) -> Iterator[Row]:
    for dtype in (proof.dtype, torch.int8):
        cache = (proof.random(40, 2, 2, 16, 20) * 40).to(dtype)
        order = torch.randperm(40, device=proof.device)
        # the second copy reads what the first one writes over
        sources, destinations = torch.cat((order[:17], order[:1])), order[17:35]
        destinations[0] = order[1]
        wanted = cache.clone()
        wanted[destinations] = cache[sources]
        kernels.copy_blocks(cache, sources, destinations)
        yield proof.same(f"copy_blocks {dtype}", cache, wanted)


def prove_sums(proof: Proof, kernels: Kernels) -> Iterator[Row]:
    sizes, random = proof.sizes, proof.random
    x, residual, weight = random(7, sizes.hidden), random(7, sizes.hidden), random(sizes.hidden)

    def normed(wide: Tensor, weight: Tensor) -> Tensor:
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    yield proof.row("rms_norm", kernels.rms_norm(x, weight, 1e-5), normed(x.double(), weight))
    heads, of_head = random(7, 5, sizes.head_dim)[:, 1:3], random(sizes.head_dim)
    found = kernels.rms_norm(heads, of_head, 1e-5)
    yield proof.row("rms_norm of heads", found, normed(heads.double(), of_head))
    total = x + residual
    wanted = normed(total.double(), weight)
    yield proof.row("add_rms_norm", kernels.add_rms_norm(x, residual, weight, 1e-5), wanted)
    yield proof.same("add_rms_norm stream", residual, total)
    gate_up = random(5, 2 * sizes.intermediate)
    gate, up = gate_up.double().chunk(2, -1)
    silu = torch.nn.functional.silu(gate) * up
    yield proof.row("silu_mul", kernels.silu_mul(gate_up), silu)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
    yield proof.row("gelu_mul", kernels.gelu_mul(gate_up), gelu)


def prove_packed(proof: Proof, kernels: Kernels) -> Iterator[Row]:
    whole = proof.random(proof.sizes.hidden, 256) / 16
    for packed in (quantized_8(whole), quantized_4(whole)):
        for count in (3, 70):
            inputs = proof.random(count, 256)
            wanted = inputs.double() @ packed.dequantized(proof.dtype).double().T
            found = kernels.packed_linear(inputs, packed, None)
            # a weight may be rounded before it is scaled, or behind
            yield proof.row(f"packed_linear {packed.bits}, {count} rows", found, wanted, 2, 2)


def prove_fp8(proof: Proof, kernels: Kernels) -> Iterator[Row]:
    weight = proof.random(proof.sizes.hidden, 256) / 16
    values, scales = fp8.quantize_rows(weight)
    inputs = proof.random(16, 256)
    rows, row_scales = fp8.quantize_rows(inputs)
    wanted = (rows.double() * row_scales.double()) @ (values.double() * scales.double()).T
    found = kernels.fp8_linear(inputs, values, scales.T.contiguous(), None)
    # Hopper keeps 14 bits of a sum of float8's products
    yield proof.row("fp8_linear", found, wanted, 1, 0.01 + 2**-10 / proof.eps)


def prove_experts(proof: Proof, kernels: Kernels) -> Iterator[Row]:
    first, second = proof.random(5, 2 * 64, 128) / 11, proof.random(5, 128, 64) / 8
    scores = torch.stack([torch.randperm(5) / 2 for _ in range(33)]).to(proof.device, proof.dtype)
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
        found = kernels.moe(tokens, scores, up, down, 2, True)
        # both products of an expert and what lies between are rounded
        yield proof.row(f"moe{name}", found, wanted, 8, 8)


def prove_draws(proof: Proof, kernels: Kernels) -> Iterator[Row]:
    """The tokens that plain PyTorch draws, of rows of all kinds; and what penalties leave."""
    vocab, device = proof.sizes.vocab, proof.device
    kinds = [(0.0, 1.0, 0.0, 0), (1.0, 1.0, 0.0, 0), (0.7, 0.9, 0.0, 0), (1.0, 1.0, 0.05, 40)]
    numbers = torch.tensor(
        [[t, p, math.log(m) if m else -math.inf] for t, p, m, _ in kinds], dtype=torch.float64
    ).repeat(8, 1)
    words = torch.tensor([[k, 12345 + i, 7 * i] for i in range(8) for _, _, _, k in kinds])
    logits = torch.randn(len(words), vocab) * 3
    wanted = draws.draw(logits, numbers, words)
    found = kernels.draw(logits.to(device), numbers.to(device), words.to(device))
    yield proof.same("draw", found.cpu(), wanted)
    count = min(700, logits.numel() // 2)
    places = torch.randperm(logits.numel())[:count]
    terms = torch.stack(
        (torch.randint(0, 4, (count,)).float(), torch.rand(count) + 0.5, *torch.randn(2, count))
    )
    lowered = logits.double()
    draws.penalize(lowered, places, terms.double())
    found = logits.to(device)
    kernels.penalize(found, places.to(device), terms.to(device))
    size = logits.double().abs() + 1
    yield proof.within("penalize", found.cpu(), lowered, IN_FLOAT32 * size)


GROUPS: dict[str, Callable[[Proof, Kernels], Iterator[Row]]] = {
    "attention": prove_attention,
    "stores": prove_stores,
    "copies": prove_copies,
    "sums": prove_sums,
    "packed": prove_packed,
    "fp8": prove_fp8,
    "experts": prove_experts,
    "draws": prove_draws,
}
IN_HALF = ("attention", "stores", "sums")  # proven in float16, too


def proofs(
    kernels: Kernels, device: torch.device, sizes: Sizes, groups: list[str]
) -> Iterator[Row]:
    """Each group's rows behind one that says that it begins; ends where the device is broken."""
    for group in groups:
        yield {"begins": group}
        try:
            for dtype in types_for(device, group):
                yield from GROUPS[group](Proof(device, dtype, sizes), kernels)
        except Exception as error:  # noqa: BLE001 (of a kernel that nobody has run before)
            failed = f"{type(error).__name__}: {error}"[:1000]
            yield {"kernel": group, "failed": failed, "ok": False}
            if device.type == "cuda":
                torch.cuda.synchronize()  # raises where nothing can be launched any more


def types_for(device: torch.device, group: str) -> list[torch.dtype]:
    if device.type != "cuda":
        return [torch.float32]
    return [torch.bfloat16, torch.float16] if group in IN_HALF else [torch.bfloat16]
