"""Queries and keys turned by their angles, keys and values stored in their slots: one kernel.

Rotary positions as in Su et al. 2021 (RoFormer), in the half-split order of Hugging Face
checkpoints: pairs are (x[i], x[i + half]) of a head's turned part.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.reference import LEAST_IN_8_BITS
from engine.kernels.triton.attention import padded, scales_of

HEADS_AT_ONCE = 4
LEAST: tl.constexpr = tl.constexpr(LEAST_IN_8_BITS)


@triton.jit
def turn_heads(x, heads, d, mask, head_stride, cos, sin, half):
    """Both halves of the turned part of some heads, float32."""
    at = heads[:, None] * head_stride + d[None, :]
    low = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    high = tl.load(x + at + half, mask=mask, other=0).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def largest(x, mask):
    """Of each head's numbers, without their signs; NaN where one is none."""
    peak = tl.max(tl.where(mask, tl.abs(x), 0.0), 1)
    broken = tl.max((mask & (x != x)).to(tl.int32), 1)
    return tl.where(broken > 0, float("nan"), peak)


@triton.jit
def scale_of(peak, at, DTYPE: tl.constexpr):
    """Store what a head's numbers in 8 bits are to be multiplied by; returns it."""
    END: tl.constexpr = 448.0 if DTYPE.is_floating() else 127.0
    scale = tl.where(peak < float("inf"), peak / END, float("nan"))
    scale = tl.where(peak < LEAST, 0.0, scale)
    tl.store(at, scale)
    return scale[:, None]


@triton.jit
def keep(at, x, scale, mask, SCALED: tl.constexpr):
    """Store numbers of some heads as the cache has them: the nearest there is."""
    DTYPE: tl.constexpr = at.dtype.element_ty
    if SCALED:
        x = tl.where(scale > 0, x.to(tl.float32), 0.0) / tl.where(scale > 0, scale, 1.0)
        # a quotient just beyond 448 is 448: the conversion to float8 ends there itself
        x = x if DTYPE.is_floating() else tl.floor(x + 0.5)
    tl.store(at, x.to(DTYPE), mask=mask)


@triton.jit
def store_token(
    key, value, kept,
    kept_scales,  # of these heads' slots, where the cache is of 8 bits
    heads, key_head_stride, value_head_stride, turned, turned_by,
    D: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, HALF_WIDTH: tl.constexpr,
    VALUES: tl.constexpr,  # how far behind a block's keys its values lie
    SCALED: tl.constexpr,
):  # fmt: skip
    """Some heads of one token's key, turned, and of its value, to where these heads are kept."""
    DTYPE: tl.constexpr = kept.dtype.element_ty
    wide = tl.arange(0, WIDTH)
    d = tl.arange(0, HALF_WIDTH)
    inside = (d < HALF)[None, :]
    beyond = ((wide >= 2 * HALF) & (wide < D))[None, :]
    rest = tl.load(key + heads[:, None] * key_head_stride + wide[None, :], mask=beyond, other=0)
    low, high = turn_heads(key, heads, d, inside, key_head_stride, turned, turned_by, HALF)
    scale = 1.0
    if SCALED:
        peak = largest(rest.to(tl.float32), beyond)
        for half in tl.static_range(2):
            part = largest(high if half else low, inside)
            # what is no number is larger than all
            peak = tl.where((part > peak) | (part != part), part, peak)
        scale = scale_of(peak, kept_scales, DTYPE)
    if HALF > 0:
        keep(kept + d[None, :], low, scale, inside, SCALED)
        keep(kept + HALF + d[None, :], high, scale, inside, SCALED)
    if 2 * HALF < D:
        keep(kept + wide[None, :], rest, scale, beyond, SCALED)
    mask = (wide < D)[None, :]
    at = value + heads[:, None] * value_head_stride + wide[None, :]
    values = tl.load(at, mask=mask, other=0)
    if SCALED:
        peak = largest(values.to(tl.float32), mask)
        scale = scale_of(peak, kept_scales + VALUES // 4, DTYPE)
    keep(kept + VALUES + wide[None, :], values, scale, mask, SCALED)


@triton.jit
def turn_and_store(
    query, key, value, cos, sin, kv_cache, slot_mapping,  # as `rotary_store_kv` has them
    kv_scales,  # the cache as float32, where it is of 8 bits; or anything
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    angle_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr,  # of the turned part; 0: nothing is turned, queries are not looked at
    HALF_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, AT_ONCE: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """A program for a token and some heads: first those of its key and value, then its query's."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * AT_ONCE
    kv_end = tl.cdiv(KV_HEADS, AT_ONCE) * AT_ONCE
    d = tl.arange(0, HALF_WIDTH)
    angles = token * angle_stride + d
    turned = tl.load(cos + angles, mask=d < HALF, other=0)[None, :]
    turned_by = tl.load(sin + angles, mask=d < HALF, other=0)[None, :]
    if first < kv_end:
        # the last head again where there are no more: the same is stored twice
        kv_heads = tl.minimum(first + tl.arange(0, AT_ONCE), KV_HEADS - 1)
        slot = tl.load(slot_mapping + token)
        if slot >= 0:  # a token that a step was padded with has none
            VALUES: tl.constexpr = BLOCK_SIZE * (D + 4 if SCALED else D)
            place = slot % BLOCK_SIZE
            heads_at = slot // BLOCK_SIZE * (KV_HEADS * 2 * VALUES) + kv_heads * (2 * VALUES)
            store_token(
                key + token * key_stride, value + token * value_stride,
                kv_cache + heads_at[:, None] + place * D,
                kv_scales + (heads_at + BLOCK_SIZE * D) // 4 + place,
                kv_heads, key_head_stride, value_head_stride, turned, turned_by,
                D, WIDTH, HALF, HALF_WIDTH, VALUES, SCALED,
            )  # fmt: skip
    elif HALF > 0:
        heads = first - kv_end + tl.arange(0, AT_ONCE)
        mask = (heads < HEADS)[:, None] & (d < HALF)[None, :]
        x = query + token * query_stride
        low, high = turn_heads(x, heads, d, mask, query_head_stride, turned, turned_by, HALF)
        at = x + heads[:, None] * query_head_stride + d[None, :]
        tl.store(at, low, mask=mask)
        tl.store(at + HALF, high, mask=mask)


def rotary_store_kv(
    query: Tensor,  # [T, H, D], changed
    key: Tensor,  # [T, H_kv, D]
    value: Tensor,  # [T, H_kv, D]
    cos: Tensor,  # [T, rotary_dim // 2] float32
    sin: Tensor,  # [T, rotary_dim // 2] float32
    kv_cache: Tensor,  # as `store_kv` has it, changed
    slot_mapping: Tensor,  # [T] int64
) -> None:
    """Turn the first rotary_dim of each query and key; store keys so turned, and values.

    Queries are turned in place; keys stay as they are.
    """
    _launch(query, key, value, cos, sin, kv_cache, slot_mapping)


def store_kv(
    key: Tensor,  # [T, H_kv, D]
    value: Tensor,  # [T, H_kv, D]
    kv_cache: Tensor,  # [num_blocks, H_kv, 2, block_size, D], changed; of 8 bits [… D + 4]
    slot_mapping: Tensor,  # [T] int64
) -> None:
    """Write each token's key and value into its slot, as `reference.store_kv` does.

    The cache is contiguous; it may be int8, or float8_e4m3fn (from compute capability 8.9 on).
    """
    # nothing is turned by no angles
    none = key.new_empty((key.shape[0], 0), dtype=torch.float32)
    _launch(key[:, :0], key, value, none, none, kv_cache, slot_mapping)


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    assert kv_cache.is_contiguous()
    assert query.stride(2) == 1
    assert cos.stride() == sin.stride()
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    half, scaled = cos.shape[1], kv_cache.itemsize == 1
    groups = triton.cdiv(num_kv_heads, HEADS_AT_ONCE) + triton.cdiv(query.shape[1], HEADS_AT_ONCE)
    with torch.cuda.device_of(query):
        turn_and_store[(num_tokens, groups)](
            query, key, value, cos, sin, kv_cache, slot_mapping,
            scales_of(kv_cache) if scaled else cos,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            value.stride(0), value.stride(1), cos.stride(0),
            HEADS=query.shape[1],
            KV_HEADS=num_kv_heads,
            D=head_dim,
            WIDTH=padded(head_dim),
            HALF=half,
            HALF_WIDTH=max(1, triton.next_power_of_2(half)),
            BLOCK_SIZE=kv_cache.shape[3],
            AT_ONCE=HEADS_AT_ONCE,
            SCALED=scaled,
            num_warps=2,
        )  # fmt: skip
