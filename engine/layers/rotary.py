"""Rotary position embedding: the angles of a step's positions."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """How Llama 3.1 and later stretch their angles over a longer context."""

    factor: float  # by which the slow pairs are slowed
    low_freq_factor: float  # pairs with fewer turns in the old context than this are slow
    high_freq_factor: float  # pairs with more turns than this are left alone
    original_max_position_embeddings: int  # tokens of the old context


class RotaryEmbedding:
    """Angle of pair i at position p is p × theta^(-2i / D). Made once a step, for all layers."""

    def __init__(
        self, head_dim: int, theta: float, scaling: Llama3Scaling | None, device: torch.device
    ) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self.frequencies = 1.0 / (theta**exponents)  # [D // 2] radians a token
        if scaling is not None:
            self.frequencies = _stretched(self.frequencies, scaling)

    def __call__(
        self,
        positions: Tensor,  # [T] int64
    ) -> tuple[Tensor, Tensor]:  # cos, sin: [T, D // 2] float32
        angles = positions.unsqueeze(1).float() * self.frequencies
        return angles.cos(), angles.sin()


def _stretched(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)  # 1 where left alone
    return frequencies * (kept + (1 - kept) / scaling.factor)
