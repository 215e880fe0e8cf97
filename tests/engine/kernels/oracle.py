"""The kernels again, one token and one head at a time, in float64: slow, and hard to get wrong."""

import itertools
import math

import torch
from torch import Tensor


def paged_attention(
    query: Tensor,  # [T, H, D]
    kv_cache: Tensor,  # [num_blocks, H_kv, 2, block_size, D]
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # [T, H, D] float64
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[1], kv_cache.shape[3]
    out = torch.empty(query.shape, dtype=torch.float64)
    for n, seq_len in enumerate(seq_lens.tolist()):
        first, last = cu_query_lens[n].item(), cu_query_lens[n + 1].item()
        for t in range(first, last):
            position = seq_len - (last - t)
            start = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                keys, values = torch.empty(2, position + 1 - start, head_dim, dtype=torch.float64)
                for i, at in enumerate(range(start, position + 1)):
                    block = block_tables[n, at // block_size].item()
                    keys[i], values[i] = kv_cache[block, kv_head, :, at % block_size].double()
                scores = keys @ query[t, head].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                out[t, head] = weights @ values / total
    return out


def in_8_bits(
    cache: Tensor,  # [num_blocks, H_kv, 2, block_size, D + 4]
) -> tuple[Tensor, Tensor]:  # [num_blocks, H_kv, 2, block_size, D], [… 1] float64
    """What a cache of 8 bits holds, byte by byte, and what each of it is multiplied by."""
    shape = (*cache.shape[:4], cache.shape[4] - 4)
    numbers = torch.empty(shape, dtype=torch.float64)
    scales = torch.empty((*shape[:4], 1), dtype=torch.float64)
    for block, head, kind in itertools.product(*map(range, shape[:3])):
        lane = cache.view(torch.int8)[block, head, kind].flatten().cpu()
        kept = lane[: shape[3] * shape[4]].view(cache.dtype)
        numbers[block, head, kind] = kept.double().view(shape[3:])
        behind = lane[shape[3] * shape[4] :].clone().view(torch.float32)
        scales[block, head, kind, :, 0] = behind.double()
    return numbers, scales


def spacing_in_8_bits(
    numbers: Tensor,  # float64, up to the type's largest
    dtype: torch.dtype,  # int8, float8_e4m3fn
) -> Tensor:
    """How far apart the type's numbers are around each."""
    if dtype == torch.int8:
        return torch.ones_like(numbers)
    exponents = numbers.abs().clamp(min=2.0**-6).log2().floor()
    return torch.exp2(exponents - 3)


def edges_of_float8() -> tuple[Tensor, Tensor]:
    """Numbers up to 448, and what e4m3 makes of each: the nearest, of two the even one."""
    least = 2.0**-9
    pairs = [
        (448, 448), (447, 448), (-448, -448), (433, 448), (432, 448), (431, 416), (400, 384),
        (248, 256), (247, 240), (127, 128), (31.5, 32), (-31, -32), (17, 16), (19, 20),
        (-17, -16), (1.0625, 1), (1.1875, 1.25), (2.0**-6, 2.0**-6), (least, least),
        (7.5 * least, 8 * least), (6.5 * least, 6 * least), (1.5 * least, 2 * least),
        (2.5 * least, 2 * least), (0.75 * least, least), (0.5 * least, 0), (-0.25 * least, 0),
        (0, 0),
    ]  # fmt: skip
    given, kept = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    return given, kept


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair as a complex number, turned by its angle."""
    low, high = x.double().chunk(2, dim=-1)
    angle = torch.complex(cos.double(), sin.double()).unsqueeze(1)
    turned = torch.complex(low, high) * angle
    return torch.cat((turned.real, turned.imag), dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate * (1 + inner.tanh()) / 2 * up


def moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    num_per_token: int,
    normalized: bool,
) -> Tensor:
    """Token by token, and its experts one by one."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for made, token, logits in zip(out, x.double(), router_logits.double(), strict=True):
        weights = logits.exp() / logits.exp().sum()
        chosen = weights.argsort(descending=True)[:num_per_token]
        whole = weights[chosen].sum() if normalized else 1.0
        for e in chosen:
            gated = silu_mul((gate_up[e].double() @ token).unsqueeze(0)).squeeze(0)
            made += weights[e] / whole * (down[e].double() @ gated)
    return out


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """One rounding of the result, and float32 sums before it."""
    rounding = torch.finfo(dtype).eps / 2
    return {"rtol": rounding + 1e-5, "atol": rounding * 1e-2 + 1e-5}


def attention_tolerance(dtype: torch.dtype) -> dict[str, float]:
    """On a GPU, weights are rounded to the type before they meet the values; then the result is."""
    rounding = torch.finfo(dtype).eps
    return {"rtol": rounding + 1e-5, "atol": rounding + 1e-5}


def angles(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """[T, head_dim // 2] float64"""
    rates = [math.exp(-math.log(theta) * 2 * i / head_dim) for i in range(head_dim // 2)]
    return positions.double().unsqueeze(1) * torch.tensor(rates, dtype=torch.float64)
