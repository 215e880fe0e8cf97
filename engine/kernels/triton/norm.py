"""Root-mean-square norm, alone or with the residual stream's addition: a program for each row.

A row is read once and stays in registers. Source: Zhang and Sennrich 2019, equation 4.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_row(
    out,  # [rows, D]
    x,
    residual,  # [rows, D], changed; or anything
    weight,  # [D]
    eps,
    inner,  # rows of x that lie inner_stride apart
    outer_stride,
    inner_stride,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    mask = d < D
    at = row // inner * outer_stride + row % inner * inner_stride
    values = tl.load(x + at + d, mask=mask, other=0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * D + d, mask=mask, other=0).to(tl.float32)
        # the stream is what is kept of it, rounded
        stream = values.to(residual.dtype.element_ty)
        tl.store(residual + row * D + d, stream, mask=mask)
        values = stream.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 0) / D + eps)
    values *= tl.load(weight + d, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * D + d, values, mask=mask)


def rms_norm(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [D]
    eps: float,
) -> Tensor:  # [..., D]
    """x / sqrt(mean(x²) + eps) × weight, over the last dimension, computed in float32."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        x = x.contiguous().view(-1, x.shape[-1])
    # heads of a wider tensor, [T, H, D], lie apart in two ways; rows in one
    inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    _launch(out, x, None, weight, eps, inner, x.stride(0), inner_stride)
    return out


def add_rms_norm(
    x: Tensor,  # [T, D]
    residual: Tensor,  # [T, D] contiguous, changed: x is added to it
    weight: Tensor,  # [D]
    eps: float,
) -> Tensor:  # [T, D]
    """Add x to the residual stream, in place, and return the stream's norm: one pass over both."""
    assert residual.is_contiguous()
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, x, residual, weight, eps, 1, x.stride(0), 0)
    return out


def _launch(
    out: Tensor,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    inner: int,
    outer_stride: int,
    inner_stride: int,
) -> None:
    size = out.shape[-1]
    if out.numel() == 0:
        return
    width = triton.next_power_of_2(size)
    with torch.cuda.device_of(x):
        norm_row[(out.numel() // size,)](
            out, x, x if residual is None else residual, weight, eps,
            inner, outer_stride, inner_stride,
            D=size,
            WIDTH=width,
            ADD=residual is not None,
            num_warps=num_warps(width),
        )  # fmt: skip


def num_warps(width: int) -> int:
    """Threads for a row: 8 numbers of two bytes are one read of 16 bytes; at most 16 warps."""
    return min(16, max(1, width // 256))
