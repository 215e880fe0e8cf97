"""Root-mean-square norm, alone or with the residual stream's addition."""

from torch import Tensor

from engine.kernels.registry import Kernels


class RMSNorm:
    def __init__(
        self,
        weight: Tensor,  # [D]
        eps: float,
        kernels: Kernels,
    ) -> None:
        self.weight = weight
        self.eps = eps
        self.kernels = kernels

    def __call__(
        self,
        x: Tensor,  # [..., D]
    ) -> Tensor:  # [..., D]
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(
        self,
        x: Tensor,  # [T, D]
        residual: Tensor,  # [T, D], changed: x is added to it
    ) -> Tensor:  # [T, D]
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
