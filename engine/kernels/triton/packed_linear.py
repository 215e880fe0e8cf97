"""x Wᵀ with weights in 4 or 8 bits, made numbers on their way from memory to the matrix units.

A weight is an integer or, of 8 bits, float8. A tile of them is the product's left side: a matrix
unit may take that from registers, where it is made. With few rows the inputs are split among
programs, as many as keep all processors reading; what each adds up is added in one order, so that
results do not depend on timing.

Source: Frantar et al. 2022 (GPTQ) and Lin et al. 2023 (AWQ), products over group-wise integers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.packed_weight import PackedWeight
from engine.kernels.triton.devices import Device, device_of

SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    outputs: int
    rows: int  # of x, at least 16
    num_warps: int
    num_stages: int = 3


FEW = Tiles(outputs=64, rows=16, num_warps=4)
SOME = Tiles(outputs=64, rows=64, num_warps=4)
MANY = Tiles(outputs=128, rows=128, num_warps=8)
FLOAT32 = Tiles(outputs=32, rows=16, num_warps=4, num_stages=2)


@triton.jit
def made(kept, scales, zeros, n, group, GROUPS, inside, ZEROS: tl.constexpr):
    """A tile's weights in float32, all of one group."""
    scale = tl.load(scales + n * GROUPS + group, mask=inside, other=0).to(tl.float32)
    values = kept.to(tl.float32)
    if ZEROS:
        zero = tl.load(zeros + n * GROUPS + group, mask=inside, other=0).to(tl.float32)
        values -= zero[:, None]
    return values * scale[:, None]


@triton.jit
def times(acc, weight, x, at, k, there, K: tl.constexpr):
    """Add a tile's product with the rows' inputs from k on."""
    rows = tl.load(x + at[None, :] + k[:, None], mask=there[None, :] & (k < K)[:, None], other=0)
    return tl.dot(weight.to(rows.dtype), rows, acc, input_precision="ieee")


@triton.jit
def add_run(
    acc, values, scales, zeros, row, inside, x, at, there, first,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
    FOUR: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Add products of the inputs from `first` on: HALF of them, in 4 bits twice as many."""
    j = tl.arange(0, HALF)
    if FOUR:
        byte = row[:, None] * (K // 2) + first // 2 + j[None, :]
        both = tl.load(values + byte, mask=inside[:, None], other=0)
        low = made(both & 15, scales, zeros, row, first // GROUP, GROUPS, inside, ZEROS)
        acc = times(acc, low, x, at, first + j, there, K)
        second = first + HALF
        high = made(both >> 4, scales, zeros, row, second // GROUP, GROUPS, inside, ZEROS)
        acc = times(acc, high, x, at, second + j, there, K)
    else:
        k = first + j
        mask = inside[:, None] & (k < K)[None, :]
        whole = tl.load(values + row[:, None] * K + k[None, :], mask=mask, other=0.0)
        weight = made(whole, scales, zeros, row, first // GROUP, GROUPS, inside, ZEROS)
        acc = times(acc, weight, x, at, k, there, K)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def multiply_packed(
    out,  # [SPLITS, num_rows, N]; float32 where there are splits
    x,  # [num_rows, K]
    values,  # [N, K] int8 or float8, or [N, K // 2] uint8
    scales,  # [N, GROUPS]
    zeros,  # [N, GROUPS] int8, or anything
    bias,  # [N], or anything
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    FOUR: tl.constexpr,  # bits
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    inside, there = n < N, m < num_rows
    at = m.to(tl.int64) * x_stride
    n_wide = n.to(tl.int64)
    RUN: tl.constexpr = 2 * HALF if FOUR else HALF
    RUNS: tl.constexpr = (K + RUN - 1) // RUN
    EACH: tl.constexpr = (RUNS + SPLITS - 1) // SPLITS
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for run in tl.range(split * EACH, tl.minimum(split * EACH + EACH, RUNS)):
        acc = add_run(
            acc, values, scales, zeros, n_wide, inside, x, at, there, run * RUN,
            K, GROUP, GROUPS, HALF, FOUR, ZEROS,
        )  # fmt: skip
    if BIAS:
        added = tl.load(bias + n, mask=inside, other=0).to(tl.float32)
        acc += added[:, None]
    place = (split * num_rows + m).to(tl.int64) * N
    tl.store(out + place[None, :] + n[:, None], acc, mask=inside[:, None] & there[None, :])


@triton.jit
def add_splits(
    out,  # [size]
    parts,  # [SPLITS, size] float32
    bias,  # [N], or anything
    size,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts + split * size + i, mask=i < size, other=0)
    if BIAS:
        total += tl.load(bias + i % N, mask=i < size, other=0).to(tl.float32)
    tl.store(out + i, total, mask=i < size)


def packed_linear(
    x: Tensor,  # [T, in] float16, bfloat16 or float32
    weight: PackedWeight,
    bias: Tensor | None,  # [out]
) -> Tensor:  # [T, out]
    """What `packed_weight.packed_linear` computes, without the whole weight anywhere."""
    if weight.inputs is not None:
        x = x[:, weight.inputs]
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_outputs = len(x), len(weight.values)
    out = x.new_empty((num_rows, num_outputs))
    if num_rows == 0:
        return out
    tiles = _choose_tiles(num_rows, x.itemsize)
    splits = _num_splits(weight, num_rows, tiles, device_of(x.device))
    parts = out
    if splits > 1:
        parts = torch.empty((splits, *out.shape), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_outputs, tiles.outputs), triton.cdiv(num_rows, tiles.rows), splits)
    with torch.cuda.device_of(x):
        multiply_packed[grid](
            parts, x, weight.values, weight.scales,
            weight.scales if weight.zeros is None else weight.zeros,
            x if bias is None else bias,
            num_rows, x.stride(0),
            N=num_outputs,
            K=weight.num_inputs,
            GROUP=weight.group_size,
            GROUPS=weight.scales.shape[1],
            HALF=weight.half,
            FOUR=weight.bits == 4,
            ZEROS=weight.zeros is not None,
            BIAS=bias is not None and splits == 1,
            SPLITS=splits,
            OUTPUTS=tiles.outputs,
            ROWS=tiles.rows,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )  # fmt: skip
        if splits > 1:
            add_splits[(triton.cdiv(out.numel(), SUM_BLOCK),)](
                out, parts, x if bias is None else bias, out.numel(),
                N=num_outputs, SPLITS=splits, BIAS=bias is not None, BLOCK=SUM_BLOCK, num_warps=4,
            )  # fmt: skip
    return out


def _choose_tiles(num_rows: int, itemsize: int) -> Tiles:
    if itemsize == 4:
        return FLOAT32
    if num_rows <= FEW.rows:
        return FEW
    return SOME if num_rows <= MANY.rows else MANY


def _num_splits(weight: PackedWeight, num_rows: int, tiles: Tiles, device: Device) -> int:
    """As many as give each processor two programs, but each at least eight runs of its own."""
    num_tiles = triton.cdiv(len(weight.values), tiles.outputs) * triton.cdiv(num_rows, tiles.rows)
    num_runs = weight.num_inputs // (weight.half * (2 if weight.bits == 4 else 1))
    wanted = min(2 * device.num_processors // num_tiles, num_runs // 8, 16)
    # powers of two: each number is a kernel of its own
    return 1 << max(0, wanted.bit_length() - 1) if wanted > 1 else 1
