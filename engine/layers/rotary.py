"""Rotary position embedding: the angles of a step's positions, and how families stretch them."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RopeScaling(Protocol):
    """How a family fits a longer context into the angles that it was trained on."""

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        ...

    def stretch(
        self,
        frequencies: Tensor,  # [D // 2] radians a token
        theta: float,
    ) -> Tensor:  # [D // 2]
        ...


class RotaryEmbedding:
    """Angle of pair i at position p is p × theta^(-2i / D). Made once a step, for all layers."""

    def __init__(
        self,
        rotary_dim: int,  # D: the part of each head that is turned
        theta: float,
        scaling: RopeScaling | None,
        device: torch.device,
    ) -> None:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        self.frequencies = 1.0 / (theta**exponents)  # [D // 2] radians a token
        self.attention_factor = 1.0
        if scaling is not None:
            self.frequencies = scaling.stretch(self.frequencies, theta)
            self.attention_factor = scaling.attention_factor

    def __call__(
        self,
        positions: Tensor,  # [T] int64
    ) -> tuple[Tensor, Tensor]:  # cos, sin: [T, D // 2] float32
        angles = positions.unsqueeze(1).float() * self.frequencies
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All angles slowed alike (Chen et al. 2023, position interpolation)."""

    factor: float
    attention_factor: float = 1.0

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Slow pairs slowed, fast ones left, a ramp between: Llama 3.1 and later."""

    factor: float  # by which the slow pairs are slowed
    low_freq_factor: float  # pairs with fewer turns in the old context than this are slow
    high_freq_factor: float  # pairs with more turns than this are left alone
    original_max_position_embeddings: int  # tokens of the old context
    attention_factor: float = 1.0

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        turns = frequencies * (self.original_max_position_embeddings / (2 * math.pi))
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / span).clamp(0, 1)  # 1 where left alone
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """As Llama 3's, with a ramp over pairs instead of turns (Peng et al. 2023, section 3)."""

    factor: float  # by which the slow pairs are slowed
    beta_fast: float  # pairs with more turns in the old context than this are left alone
    beta_slow: float  # pairs with fewer turns than this are slow
    original_max_position_embeddings: int  # tokens of the old context
    truncate: bool  # the ramp begins and ends at whole pairs
    attention_factor: float

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        num_pairs = len(frequencies)

        def pair_with(turns: float) -> float:
            old_context = self.original_max_position_embeddings
            return num_pairs * math.log(old_context / (turns * 2 * math.pi)) / math.log(theta)

        first, last = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # bounds and the step at a ramp of no length are those of the reference implementation
        first, last = max(first, 0), min(last, 2 * num_pairs - 1)
        span = last - first or 0.001
        pairs = torch.arange(num_pairs, dtype=torch.float32, device=frequencies.device)
        slowed = ((pairs - first) / span).clamp(0, 1)  # 1 where slow
        return frequencies * (1 - slowed) + frequencies / self.factor * slowed


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Each pair slowed by a factor of its own (Ding et al. 2024), up to the old context's length.

    Past it another set of factors holds, for the tokens before it too. A cache keeps keys that are
    turned already, so a sequence has to end there.
    """

    short_factor: tuple[float, ...]  # of each pair
    attention_factor: float

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / torch.tensor(self.short_factor, device=frequencies.device)
