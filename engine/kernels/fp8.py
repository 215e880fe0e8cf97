"""Products of float8: a scale for each row of what is multiplied, and for each output.

`torch._scaled_mm` computes them on a GPU (Hopper and Ada, by cuBLAS and CUTLASS). On a CPU, where
not every version of it takes a scale for each row, the same numbers are multiplied in float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LEAST = 1e-12  # of a row's largest number, so that a row of zeros has a scale

QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]


def quantize_rows(
    x: Tensor,  # [T, in]
) -> tuple[Tensor, Tensor]:  # [T, in] float8 e4m3, [T, 1] float32
    """Each row's largest number as 448, all rounded to the nearest."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp(min=LEAST) / LARGEST
    return (wide / scales).to(FP8), scales


def fp8_linear(
    x: Tensor,  # [T, in]
    weight: Tensor,  # [out, in] float8 e4m3
    scales: Tensor,  # [1, out] float32
    bias: Tensor | None,  # [out]
    quantize: QuantizeRows = quantize_rows,
) -> Tensor:  # [T, out]
    """x Wᵀ + b, both sides in float8 and summed in float32; rounded to bfloat16 on a GPU.

    Sizes must be multiples of 16. The product with scales for rows has no other type there.
    """
    rows, row_scales = quantize(x)
    if x.is_cuda:
        product: Tensor = torch._scaled_mm(
            rows, weight.t(), scale_a=row_scales, scale_b=scales, out_dtype=torch.bfloat16
        )
    else:
        product = (rows.float() @ weight.t().float()) * row_scales * scales
    if bias is not None:
        product = product + bias
    return product.to(x.dtype)
