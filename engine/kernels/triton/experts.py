"""A choice of experts for each token: the products of all of them in one launch.

Pairs of token and expert are sorted by expert; a tile of rows belongs to one expert, and each
program finds out whose by counting through the experts' pairs on the device. So nothing is read
back to the host, and a captured graph stays right when tokens choose otherwise.

Source: Gale et al. 2023 (MegaBlocks), grouped products without padding to a capacity.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.packed_weight import PackedWeight
from engine.kernels.triton import packed_experts
from engine.kernels.triton.gates import silu_mul
from engine.kernels.triton.grouping import find_tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    rows: int  # pairs of one expert; at least 16: the matrix units' least
    columns: int
    depth: int
    num_warps: int
    num_stages: int = 3


# with few pairs to an expert its weights are read for one tile: the reading is all the time
FEW = Tiles(rows=16, columns=64, depth=128, num_warps=4)
SOME = Tiles(rows=64, columns=64, depth=64, num_warps=4)
MANY = Tiles(rows=128, columns=128, depth=32, num_warps=8)
FLOAT32 = Tiles(rows=16, columns=32, depth=32, num_warps=4, num_stages=2)
SUM_BLOCK = 1024


@triton.jit
def multiply_groups(
    out,  # [pairs, N]
    x,  # [rows, K]
    weight,  # [EXPERTS, N, K]
    order,  # [pairs] int64, pairs by expert
    counts,  # [EXPERTS] int32, pairs of each
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # EXPERTS, padded to a power of two
    PER_TOKEN: tl.constexpr,  # pairs of a row of x; 0: x is in the order of the sorted pairs
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile of one expert's pairs times its weight.

    From rows of tokens to the place of the sorted pair; from there back to the pair's own place.
    """
    expert, first, left = find_tile(tl.program_id(1), counts, EXPERTS, WIDTH, ROWS)
    if left > 0:
        m = tl.arange(0, ROWS)
        there = m < left
        place = first + m
        pair = tl.load(order + place, mask=there, other=0)
        n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        source = place.to(tl.int64)
        if PER_TOKEN > 0:
            source = pair // PER_TOKEN
        rows = x + source[:, None] * x_stride + k[None, :]
        columns = weight + expert.to(tl.int64) * (N * K) + n[None, :] * K + k[:, None]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, K, DEPTH):
            inside = k < K - start
            a = tl.load(rows + start, mask=there[:, None] & inside[None, :], other=0)
            b = tl.load(columns + start, mask=inside[:, None] & (n < N)[None, :], other=0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        to = place.to(tl.int64)
        if PER_TOKEN == 0:
            to = pair
        mask = there[:, None] & (n < N)[None, :]
        tl.store(out + to[:, None] * N + n[None, :], acc, mask=mask)


@triton.jit
def sum_pairs(
    out,  # [T, D]
    parts,  # [T, PER_TOKEN, D]
    weights,  # [T, PER_TOKEN] float32
    D: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token's parts by their weights, in the order of the weights."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(PER_TOKEN):
        pair = token * PER_TOKEN + i
        part = tl.load(parts + pair * D + d, mask=d < D, other=0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(out + token * D + d, total, mask=d < D)


def moe(
    x: Tensor,  # [T, hidden]
    router_logits: Tensor,  # [T, num_experts]
    gate_up: Tensor | PackedWeight,  # [num_experts, 2 × D, hidden] contiguous; or all rows packed
    down: Tensor | PackedWeight,  # [num_experts, hidden, D] contiguous; or all rows packed
    num_per_token: int,
    normalized: bool,
) -> Tensor:  # [T, hidden]
    """What `reference.moe` computes; products of an expert are rounded to x's type."""
    num_tokens, num_experts = router_logits.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    weights, experts = router_logits.float().softmax(-1).topk(num_per_token, dim=-1)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    # not bincount: it waits for the device, to learn the largest number
    ones = torch.ones_like(chosen, dtype=torch.int32)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
    counts = counts.scatter_add_(0, chosen, ones)
    with torch.cuda.device_of(x):
        gated = silu_mul(_multiply(x, gate_up, order, counts, per_token=num_per_token))
        parts = _multiply(gated, down, order, counts, per_token=0)
        sum_pairs[(num_tokens, triton.cdiv(x.shape[1], SUM_BLOCK))](
            out, parts, weights.contiguous(),
            D=x.shape[1], PER_TOKEN=num_per_token, BLOCK=SUM_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def _multiply(
    x: Tensor, weight: Tensor | PackedWeight, order: Tensor, counts: Tensor, *, per_token: int
) -> Tensor:  # [pairs, N]
    if isinstance(weight, PackedWeight):
        return packed_experts.multiply(x, weight, order, counts, per_token=per_token)
    assert weight.is_contiguous()
    num_experts, num_outputs, num_inputs = weight.shape
    num_pairs = len(order)
    tiles = _choose_tiles(num_pairs / num_experts, x.itemsize)
    # as many tiles as pairs can fill, one for the rest of each expert
    most = num_pairs // tiles.rows + min(num_experts, num_pairs)
    out = x.new_empty((num_pairs, num_outputs))
    # columns first: programs of one expert's rows are begun together
    multiply_groups[(triton.cdiv(num_outputs, tiles.columns), most)](
        out, x, weight, order, counts, x.stride(0),
        N=num_outputs,
        K=num_inputs,
        EXPERTS=num_experts,
        WIDTH=triton.next_power_of_2(num_experts),
        PER_TOKEN=per_token,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def _choose_tiles(pairs_per_expert: float, itemsize: int) -> Tiles:
    if itemsize == 4:
        return FLOAT32
    if pairs_per_expert <= FEW.rows:
        return FEW
    return SOME if pairs_per_expert <= MANY.rows else MANY
