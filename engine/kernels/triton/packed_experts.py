"""A choice of experts for each token, their weights in 4 or 8 bits: the products in one launch.

Tiles of sorted pairs find their expert as in `experts`; a tile of its weight is made of integers,
or float8, as in `packed_linear`, on the product's left side. All experts' outputs are rows of one
weight.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.packed_weight import PackedWeight
from engine.kernels.triton.grouping import find_tile
from engine.kernels.triton.packed_linear import FEW, FLOAT32, SOME, Tiles, add_run


@triton.jit
def multiply_packed_groups(
    out,  # [pairs, N]
    x,  # [rows, K]
    values,  # [EXPERTS × N, K] int8 or float8, or [EXPERTS × N, K // 2] uint8
    scales,  # [EXPERTS × N, GROUPS]
    zeros,  # [EXPERTS × N, GROUPS] int8, or anything
    order,  # [pairs] int64, pairs by expert
    counts,  # [EXPERTS] int32, pairs of each
    x_stride,
    N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
    PER_TOKEN: tl.constexpr,  # as in `multiply_groups`
    GROUP: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
    FOUR: tl.constexpr,  # bits
    ZEROS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's weight times a tile of its pairs."""
    expert, first_pair, left = find_tile(tl.program_id(1), counts, EXPERTS, WIDTH, ROWS)
    if left > 0:
        m = tl.arange(0, ROWS)
        there = m < left
        place = first_pair + m
        pair = tl.load(order + place, mask=there, other=0)
        source = place.to(tl.int64)
        if PER_TOKEN > 0:
            source = pair // PER_TOKEN
        at = source * x_stride
        n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        inside = n < N
        row = expert.to(tl.int64) * N + n
        RUN: tl.constexpr = 2 * HALF if FOUR else HALF
        acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for first in tl.range(0, K, RUN):
            acc = add_run(
                acc, values, scales, zeros, row, inside, x, at, there, first,
                K, GROUP, GROUPS, HALF, FOUR, ZEROS,
            )  # fmt: skip
        to = place.to(tl.int64)
        if PER_TOKEN == 0:
            to = pair
        mask = inside[:, None] & there[None, :]
        tl.store(out + to[None, :] * N + n[:, None], acc, mask=mask)


def multiply(
    x: Tensor,  # [rows, K]
    weight: PackedWeight,  # of [experts × N, K]
    order: Tensor,
    counts: Tensor,
    *,
    per_token: int,
) -> Tensor:  # [pairs, N]
    """As `experts` does it with weights that are whole."""
    assert weight.inputs is None
    num_experts, num_pairs = len(counts), len(order)
    num_outputs = len(weight.values) // num_experts
    tiles = _tiles_for(num_pairs / num_experts, x.itemsize)
    most = num_pairs // tiles.rows + min(num_experts, num_pairs)
    out = x.new_empty((num_pairs, num_outputs))
    multiply_packed_groups[(triton.cdiv(num_outputs, tiles.outputs), most)](
        out, x, weight.values, weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        order, counts, x.stride(0),
        N=num_outputs,
        K=weight.num_inputs,
        EXPERTS=num_experts,
        WIDTH=triton.next_power_of_2(num_experts),
        PER_TOKEN=per_token,
        GROUP=weight.group_size,
        GROUPS=weight.scales.shape[1],
        HALF=weight.half,
        FOUR=weight.bits == 4,
        ZEROS=weight.zeros is not None,
        OUTPUTS=tiles.outputs,
        ROWS=tiles.rows,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def _tiles_for(pairs_per_expert: float, itemsize: int) -> Tiles:
    if itemsize == 4:
        return FLOAT32
    return FEW if pairs_per_expert <= FEW.rows else SOME
