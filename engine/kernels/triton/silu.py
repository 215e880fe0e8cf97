"""silu(gate) × up, the gated half of a SwiGLU layer (Shazeer 2020): read once, written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # 8 numbers for each of a program's 128 threads


@triton.jit
def gate_row(
    out,  # [T, D]
    gate_up,  # [T, 2 × D]
    stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < D
    gate = tl.load(gate_up + row * stride + d, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_up + row * stride + D + d, mask=mask, other=0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # of the sign that cannot overflow
    sigmoid = tl.where(gate < 0, small, 1.0) / (1 + small)
    tl.store(out + row * D + d, gate * sigmoid * up, mask=mask)


def silu_mul(
    gate_up: Tensor,  # [T, 2 × D] gate, then up
) -> Tensor:  # [T, D]
    """Computed in float32, rounded once."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() > 0:
        with torch.cuda.device_of(gate_up):
            gate_row[(num_rows, triton.cdiv(size, BLOCK))](
                out, gate_up, gate_up.stride(0), D=size, BLOCK=BLOCK, num_warps=4
            )
    return out
