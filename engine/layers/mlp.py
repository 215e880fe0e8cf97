"""The gated feed-forward layer (SwiGLU, and Gemma's with GELU), and a choice of many such."""

from collections.abc import Callable

from torch import Tensor

from engine.collectives import ALONE, Group
from engine.kernels.packed_weight import PackedWeight
from engine.kernels.registry import Kernels
from engine.layers.linear import AnyLinear


class GatedMLP:
    """down(activation(gate(x)) × up(x)), gate and up in one product."""

    def __init__(
        self,
        gate_up: AnyLinear,
        down: AnyLinear,
        activate: Callable[[Tensor], Tensor],  # silu_mul or gelu_mul
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activate = activate

    def __call__(
        self,
        x: Tensor,  # [T, hidden]
    ) -> Tensor:  # [T, hidden]
        return self.down(self.activate(self.gate_up(x)))


class Experts:
    """Some of many gated layers for each token, chosen by a router."""

    def __init__(
        self,
        router: AnyLinear,
        gate_up: Tensor | PackedWeight,  # [num_experts, 2 × D, hidden], or all rows packed
        down: Tensor | PackedWeight,  # [num_experts, hidden, D], or all rows packed
        *,
        num_per_token: int,
        normalized: bool,
        kernels: Kernels,
        summed_over: Group = ALONE,  # ranks that hold parts of each expert
    ) -> None:
        self.summed_over = summed_over
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.num_per_token = num_per_token
        self.normalized = normalized
        self.kernels = kernels

    def __call__(
        self,
        x: Tensor,  # [T, hidden]
    ) -> Tensor:  # [T, hidden]
        chosen = self.router(x)
        return self.summed_over.sum(
            self.kernels.moe(
                x, chosen, self.gate_up, self.down, self.num_per_token, self.normalized
            )
        )
