"""The gated feed-forward layer (SwiGLU)."""

from torch import Tensor

from engine.kernels.registry import Kernels
from engine.layers.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) × up(x)), gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear, kernels: Kernels) -> None:
        self.gate_up = gate_up
        self.down = down
        self.kernels = kernels

    def __call__(
        self,
        x: Tensor,  # [T, hidden]
    ) -> Tensor:  # [T, hidden]
        return self.down(self.kernels.silu_mul(self.gate_up(x)))
