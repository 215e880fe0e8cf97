"""act(gate) × up, the gated half of a feed-forward layer: read once, written once.

SiLU as in SwiGLU (Shazeer 2020); GELU by its approximation (Hendrycks and Gimpel 2016), which with
(1 + tanh y) / 2 = sigmoid(2y) is gate × a sigmoid, too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # 8 numbers for each of a program's 128 threads
SQRT_8_OVER_PI: tl.constexpr = tl.constexpr(1.5957691216057308)


@triton.jit
def gate_row(
    out,  # [T, D]
    gate_up,  # [T, 2 × D]
    stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < D
    gate = tl.load(gate_up + row * stride + d, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_up + row * stride + D + d, mask=mask, other=0).to(tl.float32)
    argument = gate
    if GELU:
        argument = SQRT_8_OVER_PI * (gate + 0.044715 * gate * gate * gate)
    small = tl.exp(-tl.abs(argument))  # of the sign that cannot overflow
    sigmoid = tl.where(argument < 0, small, 1.0) / (1 + small)
    tl.store(out + row * D + d, gate * sigmoid * up, mask=mask)


def silu_mul(
    gate_up: Tensor,  # [T, 2 × D] gate, then up
) -> Tensor:  # [T, D]
    """Computed in float32, rounded once."""
    return _gated(gate_up, gelu=False)


def gelu_mul(
    gate_up: Tensor,  # [T, 2 × D] gate, then up
) -> Tensor:  # [T, D]
    """Computed in float32, rounded once."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() > 0:
        with torch.cuda.device_of(gate_up):
            gate_row[(num_rows, triton.cdiv(size, BLOCK))](
                out, gate_up, gate_up.stride(0), D=size, BLOCK=BLOCK, GELU=gelu, num_warps=4
            )
    return out
