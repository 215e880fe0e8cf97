"""Every kernel in plain PyTorch: works everywhere, and is what fast ones are tested against.

Half-precision inputs are computed in float32 and rounded once, at the end.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.packed_weight import PackedWeight

NO_SLOT = -1  # of a token that a step was padded with: what it makes is stored nowhere
LEAST_IN_8_BITS = 1e-35  # the largest number of a key or value that is not kept as zeros
LARGEST_IN_8_BITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def paged_attention(
    query: Tensor,  # [T, H, D] the step's tokens, all sequences end to end
    kv_cache: Tensor,  # [num_blocks, H_kv, 2, block_size, D] keys at 0, values at 1
    block_tables: Tensor,  # [N, max_blocks], right-padded with anything
    cu_query_lens: Tensor,  # [N + 1], sequence n's tokens are query[cu[n]:cu[n + 1]]
    seq_lens: Tensor,  # [N] tokens in the cache, this step's included
    *,
    scale: float,
    sliding_window: int | None = None,  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None,  # scores s become softcap × tanh(s / softcap)
    sinks: Tensor | None = None,  # [H] one more score for each head, of a key without a value
) -> Tensor:  # [T, H, D]
    """Causal attention of each query token over its own sequence's cached keys and values.

    A sequence's query tokens are its last ones, so prefill, a chunk of prefill and decode are one
    case: the query length is the prompt's, a part of it, or 1. Slots past a sequence's length are
    never read: a stale NaN in them cannot leak.

    Source: Kwon et al. 2023 (PagedAttention), section 4.1. The soft cap is Gemma 2's (Gemma Team
    2024), the sinks are gpt-oss' (after Xiao et al. 2023). The cache may be of any type; how one of
    8 bits lies in memory, `store_kv` says.
    """
    num_kv_heads, block_size = kv_cache.shape[1], kv_cache.shape[3]
    out = torch.empty_like(query)
    starts, lengths = cu_query_lens.tolist(), seq_lens.tolist()
    if not lengths:
        return out
    # one row per (block, head, key or value): a gather of rows writes [H_kv, 2, length, D] in one
    # pass, into memory that every sequence reuses; fresh memory would cost more in page faults
    kept = kv_cache if kv_cache.itemsize > 1 else kv_cache.view(torch.int8)
    rows = kept.view(-1, block_size * kv_cache.shape[4])
    lanes = torch.arange(num_kv_heads * 2, device=query.device).unsqueeze(1)
    scratch = rows.new_empty((num_kv_heads * 2 * -(-max(lengths) // block_size), rows.shape[1]))
    for n, seq_len in enumerate(lengths):
        chunk = slice(starts[n], starts[n + 1])
        query_len = chunk.stop - chunk.start
        first = 0
        if sliding_window is not None:
            first = max(0, seq_len - query_len + 1 - sliding_window)
        first_block = first // block_size
        blocks = block_tables[n, first_block : -(-seq_len // block_size)].long()
        index = (blocks * (num_kv_heads * 2) + lanes).flatten()
        gathered = torch.index_select(rows, 0, index, out=scratch[: index.numel()])
        gathered = gathered.view(kv_cache.dtype)
        held = _numbers(gathered.view(num_kv_heads, 2, len(blocks), *kv_cache.shape[3:]))
        origin = first_block * block_size  # the position of held[..., 0, :]
        held = held[:, :, first - origin : seq_len - origin]
        if softcap is None and sinks is None:
            out[chunk] = _attend(query[chunk], held, scale, sliding_window)
        else:
            out[chunk] = _attend_openly(query[chunk], held, scale, sliding_window, softcap, sinks)
    return out


def _attend(
    query: Tensor,  # [query_len, H, D] the last tokens of the sequence
    held: Tensor,  # [H_kv, 2, held_len, D] the last keys and values, all that a query may see
    scale: float,
    sliding_window: int | None,
) -> Tensor:  # [query_len, H, D]
    query_len, num_heads, head_dim = query.shape
    keys, values = held.float().unsqueeze(0).unbind(2)
    if query_len == 1:
        # heads that share keys become the rows of one query; everything held is visible
        packed = query.float().view(1, held.shape[0], -1, head_dim)
        attended = F.scaled_dot_product_attention(packed, keys, values, scale=scale)
        return attended.view(1, num_heads, head_dim).to(query.dtype)
    visible = _visible(query_len, held.shape[2], sliding_window, query.device)
    attended = F.scaled_dot_product_attention(
        query.float().transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=visible,
        scale=scale,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1).to(query.dtype)


def _attend_openly(
    query: Tensor,  # [query_len, H, D], as in `_attend`
    held: Tensor,  # [H_kv, 2, held_len, D]
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # [H]
) -> Tensor:  # [query_len, H, D]
    """`_attend` with its scores in the open, for what PyTorch's own attention does not compute."""
    query_len, num_heads, head_dim = query.shape
    keys, values = held.float().unbind(1)
    grouped = query.float().view(query_len, held.shape[0], -1, head_dim)
    scores = torch.einsum("qhgd,hkd->hgqk", grouped, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(query_len, held.shape[2], sliding_window, query.device)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(*scores.shape[:2], 1, 1).expand(-1, -1, query_len, 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    attended = torch.einsum("hgqk,hkd->qhgd", weights, values)
    return attended.reshape(query_len, num_heads, head_dim).to(query.dtype)


def _visible(
    query_len: int, held_len: int, sliding_window: int | None, device: torch.device
) -> Tensor:  # [query_len, held_len] bool
    """Which held tokens each query token may see; the queries are the last of those held."""
    query_at = torch.arange(held_len - query_len, held_len, device=device).unsqueeze(1)
    key_at = torch.arange(held_len, device=device)
    visible = key_at <= query_at
    if sliding_window is not None:
        visible &= key_at > query_at - sliding_window
    return visible


def store_kv(
    key: Tensor,  # [T, H_kv, D]
    value: Tensor,  # [T, H_kv, D]
    kv_cache: Tensor,  # [num_blocks, H_kv, 2, block_size, D], changed; of 8 bits [… D + 4]
    slot_mapping: Tensor,  # [T] int64, block × block_size + place in the block, or NO_SLOT
) -> None:
    """Write each token's key and value into its slot, none twice, in the cache's type.

    In 8 bits (int8, float8_e4m3fn) a head's keys of a block lie side by side, behind them the
    float32 by which each of them is multiplied; and likewise its values.
    """
    block_size = kv_cache.shape[3]
    stored = slot_mapping != NO_SLOT
    if not stored.all():
        key, value, slot_mapping = key[stored], value[stored], slot_mapping[stored]
    block, place = slot_mapping // block_size, slot_mapping % block_size
    for i, x in enumerate((key, value)):
        if kv_cache.dtype not in LARGEST_IN_8_BITS:
            kv_cache[block, :, i, place] = x.to(kv_cache.dtype)
            continue
        numbers, scales = in_8_bits(x, kv_cache.dtype)
        lane = kv_cache.view(torch.int8)[:, :, i].flatten(2).transpose(1, 2)
        behind = block_size * x.shape[2]
        for part, begin in ((numbers, 0), (scales, behind)):
            bytes_of = part.contiguous().view(torch.int8).transpose(1, 2)
            at = begin + place[:, None] * bytes_of.shape[1]
            at = at + torch.arange(bytes_of.shape[1], device=at.device)
            lane[block[:, None], at] = bytes_of


def in_8_bits(
    x: Tensor,  # [..., D]
    dtype: torch.dtype,  # of LARGEST_IN_8_BITS
) -> tuple[Tensor, Tensor]:  # [..., D], [..., 1] float32
    """Each row's largest number as the type's largest, all to the nearest; and the scale.

    What is not a number, or infinite, makes the scale no number.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    scale = torch.where(largest.isfinite(), largest / LARGEST_IN_8_BITS[dtype], torch.nan)
    # of smaller numbers the scale would lose digits: they are kept as zeros
    scale = torch.where(largest < LEAST_IN_8_BITS, 0.0, scale)
    numbers = torch.where(scale > 0, x / scale, 0.0)
    return (numbers if dtype.is_floating_point else numbers.round()).to(dtype), scale


def _numbers(
    blocks: Tensor,  # [H_kv, 2, M, block_size, D], or of 8 bits [… D + 4]
) -> Tensor:  # [H_kv, 2, M × block_size, D]
    """What blocks of a cache hold, as it is used."""
    if blocks.dtype not in LARGEST_IN_8_BITS:
        return blocks.flatten(2, 3)
    block_size, head_dim = blocks.shape[3], blocks.shape[4] - 4
    flat = blocks.flatten(3)
    numbers = flat[..., : block_size * head_dim].float().view(*blocks.shape[:4], head_dim)
    scales = flat[..., block_size * head_dim :].contiguous().view(torch.float32)
    held: Tensor = numbers * scales.unsqueeze(-1)
    return held.flatten(2, 3)


def copy_blocks(
    kv_cache: Tensor,  # [num_blocks, …], changed
    sources: Tensor,  # [M] int64
    destinations: Tensor,  # [M] int64, no block twice
) -> None:
    """Copy whole blocks; all sources are read before any destination is written."""
    kv_cache[destinations] = kv_cache[sources]


def rms_norm(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [D]
    eps: float,
) -> Tensor:  # [..., D]
    """x / sqrt(mean(x²) + eps) × weight, over the last dimension.

    Source: Zhang and Sennrich 2019, equation 4.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def add_rms_norm(
    x: Tensor,  # [T, D]
    residual: Tensor,  # [T, D], changed: x is added to it
    weight: Tensor,  # [D]
    eps: float,
) -> Tensor:  # [T, D]
    """Add x to the residual stream, in place, and return the stream's norm."""
    residual += x
    return rms_norm(residual, weight, eps)


def rotary(
    query: Tensor,  # [T, H, D], changed
    key: Tensor,  # [T, H_kv, D], changed
    cos: Tensor,  # [T, D // 2] float32
    sin: Tensor,  # [T, D // 2] float32
) -> None:
    """Turn each pair (x[i], x[i + D // 2]) by its token's i-th angle, in place.

    Source: Su et al. 2021 (RoFormer), in the half-split order of Hugging Face checkpoints.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    for x in (query, key):
        low, high = x.float().chunk(2, dim=-1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        x.copy_(turned)


def rotary_store_kv(
    query: Tensor,  # [T, H, D], changed
    key: Tensor,  # [T, H_kv, D], changed or not
    value: Tensor,  # [T, H_kv, D]
    cos: Tensor,  # [T, rotary_dim // 2] float32
    sin: Tensor,  # [T, rotary_dim // 2] float32
    kv_cache: Tensor,  # [num_blocks, H_kv, 2, block_size, D], changed
    slot_mapping: Tensor,  # [T] int64, as in `store_kv`
) -> None:
    """Turn the first rotary_dim of each query and key; store keys so turned, and values."""
    rotary_dim = 2 * cos.shape[1]
    rotary(query[..., :rotary_dim], key[..., :rotary_dim], cos, sin)
    store_kv(key, value, kv_cache, slot_mapping)


def silu_mul(
    gate_up: Tensor,  # [T, 2 × D] gate, then up
) -> Tensor:  # [T, D]
    """silu(gate) × up: the gated half of a SwiGLU layer (Shazeer 2020)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_mul(
    gate_up: Tensor,  # [T, 2 × D] gate, then up
) -> Tensor:  # [T, D]
    """gelu(gate) × up, GELU by its tanh approximation (Hendrycks and Gimpel 2016): Gemma's gate."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def moe(
    x: Tensor,  # [T, hidden]
    router_logits: Tensor,  # [T, num_experts]
    gate_up: Tensor
    | PackedWeight,  # [num_experts, 2 × D, hidden] gate, then up; or all rows packed
    down: Tensor | PackedWeight,  # [num_experts, hidden, D]; or all rows packed
    num_per_token: int,
    normalized: bool,  # the weights of a token's experts are divided by their sum
) -> Tensor:  # [T, hidden]
    """Each token through the SwiGLU layers that its router gives most weight, summed by weight.

    Weights are a softmax over all experts. A token's products are in x's type, as `Linear`'s are;
    their sum is in float32. Source: Shazeer et al. 2017, with the softmax before the choice.
    """
    num_experts = router_logits.shape[1]
    gate_up, down = (_whole(weight, num_experts, x.dtype) for weight in (gate_up, down))
    weights, experts = router_logits.float().softmax(-1).topk(num_per_token, dim=-1)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    counts = torch.bincount(experts.flatten(), minlength=num_experts).tolist()
    # pairs of token and expert, all of one expert side by side
    pairs_of = torch.split(experts.flatten().argsort(stable=True), counts)
    parts = x.new_empty((experts.numel(), x.shape[1]), dtype=torch.float32)
    for expert, pairs in enumerate(pairs_of):
        if len(pairs):
            gated = silu_mul(F.linear(x[pairs // num_per_token], gate_up[expert]))
            parts[pairs] = F.linear(gated, down[expert]).float()
    # by token again: in the order of its weights, whatever the experts of others are
    parts = parts.view(*experts.shape, x.shape[1])
    return (parts * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _whole(
    weight: Tensor | PackedWeight, num_experts: int, dtype: torch.dtype
) -> Tensor:  # [num_experts, N, K]
    if isinstance(weight, Tensor):
        return weight
    return weight.dequantized(dtype).view(num_experts, -1, weight.num_inputs)
