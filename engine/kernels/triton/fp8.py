"""Rows to float8, each with a scale of its own: one pass that reads a row twice from the cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import fp8

BLOCK = 2048


@triton.jit
def quantize_row(
    out,  # [T, D]
    scales,  # [T]
    x,
    stride,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    peak = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, D, BLOCK):
        values = tl.load(x + row * stride + first + d, mask=first + d < D, other=0)
        peak = tl.maximum(peak, tl.abs(values.to(tl.float32)))
    scale = tl.maximum(tl.max(peak, 0), LEAST) / LARGEST
    tl.store(scales + row, scale)
    for first in tl.range(0, D, BLOCK):
        values = tl.load(x + row * stride + first + d, mask=first + d < D, other=0)
        # not clamped, which would make numbers of what is none: the conversion ends at 448 itself
        kept = (values.to(tl.float32) / scale).to(out.dtype.element_ty)
        tl.store(out + row * D + first + d, kept, mask=first + d < D)


def quantize_rows(
    x: Tensor,  # [T, D]
) -> tuple[Tensor, Tensor]:  # [T, D] float8 e4m3, [T, 1] float32
    """What `fp8.quantize_rows` computes."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=fp8.FP8, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    if out.numel() > 0:
        with torch.cuda.device_of(x):
            quantize_row[(len(x),)](
                out, scales, x, x.stride(0),
                LARGEST=fp8.LARGEST, LEAST=fp8.LEAST, D=x.shape[1], BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
    return out, scales


def fp8_linear(
    x: Tensor,  # [T, in]
    weight: Tensor,  # [out, in] float8 e4m3
    scales: Tensor,  # [1, out] float32
    bias: Tensor | None,  # [out]
) -> Tensor:  # [T, out]
    """What `fp8.fp8_linear` computes."""
    return fp8.fp8_linear(x, weight, scales, bias, quantize_rows)
