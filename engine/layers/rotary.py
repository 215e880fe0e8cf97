"""Rotary position embedding: the angles of a step's positions."""

import torch
from torch import Tensor


class RotaryEmbedding:
    """Angle of pair i at position p is p × theta^(-2i / D). Made once a step, for all layers."""

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self.inverse_frequencies = 1.0 / (theta**exponents)  # [D // 2]

    def __call__(
        self,
        positions: Tensor,  # [T] int64
    ) -> tuple[Tensor, Tensor]:  # cos, sin: [T, D // 2] float32
        angles = positions.unsqueeze(1).float() * self.inverse_frequencies
        return angles.cos(), angles.sin()
