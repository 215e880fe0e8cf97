"""Weights in 4 or 8 bits with a scale for each group of inputs: how they lie, and what they mean.

A weight is (integer - zero) × scale, rounded to the type it is multiplied in. Eight bits have no
zero, and may be float8 in place of an integer. The formats of checkpoints are turned into this one
when a model is loaded.

Of 4-bit integers one byte holds two: byte j of a run holds input j of the run in its low half and
input `half` + j in its high one. So a kernel that reads a run's bytes side by side has both halves'
inputs in order, and moves no number between threads.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.fp8 import quantize_rows

HALVES = (64, 32)  # of a run, the first that divides what it must


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    values: Tensor  # [out, in] int8 or float8 e4m3, or [out, in // 2] uint8
    scales: Tensor  # [out, in // group_size] of a float type
    zeros: Tensor | None  # [out, in // group_size] int8; None: 0
    group_size: int  # inputs that share a scale
    half: int  # of a run of 4-bit inputs; groups begin at its multiples
    # [in] int64, the input at each place, where groups are not of neighbours; None: its own
    inputs: Tensor | None = None

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def num_inputs(self) -> int:
        return self.values.shape[1] * (2 if self.bits == 4 else 1)

    @property
    def layout(self) -> tuple[object, ...]:
        """All that has to be the same of projections of one input."""
        inputs = None if self.inputs is None else tuple(self.inputs.tolist())
        return self.bits, self.group_size, self.half, self.zeros is None, inputs

    def to(self, device: torch.device) -> "PackedWeight":
        return replace(
            self,
            values=self.values.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            inputs=None if self.inputs is None else self.inputs.to(device),
        )

    def numbers(self) -> Tensor:  # [out, in] float32, zeros taken away
        values = self.values
        if self.bits == 4:
            runs = values.view(len(values), -1, 1, self.half)
            values = torch.cat((runs & 15, runs >> 4), dim=2).view(len(values), -1)
        numbers = values.float()
        if self.zeros is not None:
            numbers -= self.zeros.float().repeat_interleave(self.group_size, 1)
        return numbers

    def dequantized(self, dtype: torch.dtype) -> Tensor:  # [out, in], inputs in their own order
        scales = self.scales.float().repeat_interleave(self.group_size, 1)
        weight = (self.numbers() * scales).to(dtype)
        if self.inputs is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.inputs, weight)


def pack(
    integers: Tensor,  # [out, in] uint8 in [0, 16) of 4 bits, int8 or float8 of 8
    scales: Tensor,  # [out, in // group_size]
    zeros: Tensor | None,  # [out, in // group_size]
    inputs: Tensor | None = None,
) -> PackedWeight:
    """Raises ValueError where the groups do not fit the runs."""
    num_outputs, num_inputs = integers.shape
    group_size = num_inputs // scales.shape[1]
    whole = integers.dtype != torch.uint8 and scales.shape[1] == 1
    run = 2 if integers.dtype == torch.uint8 else 1
    for half in HALVES:
        if whole or (num_inputs % (run * half) == 0 and group_size % half == 0):
            break
    else:
        raise ValueError(
            f"{num_inputs} inputs in groups of {group_size} cannot be packed: groups must be "
            f"multiples of {HALVES[-1]}, inputs of {run * HALVES[-1]}"
        )
    if integers.dtype == torch.uint8:
        low, high = integers.view(num_outputs, -1, 2, half).unbind(2)
        integers = (low | high << 4).view(num_outputs, -1)
    return PackedWeight(
        values=integers.contiguous(),
        scales=scales.contiguous(),
        zeros=None if zeros is None else zeros.to(torch.int8).contiguous(),
        group_size=group_size,
        half=half,
        inputs=inputs,
    )


def stack(parts: list[PackedWeight]) -> PackedWeight:
    """Weights of the same inputs as one. Raises ValueError where their groups differ."""
    first = parts[0]
    if any(part.layout != first.layout for part in parts):
        raise ValueError("projections of one input have their groups in different places")
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return PackedWeight(
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
        group_size=first.group_size,
        half=first.half,
        inputs=first.inputs,
    )


def quantized_8(
    weight: Tensor,  # [out, in]
) -> PackedWeight:
    """Each output's largest weight as ±127, all rounded to the nearest."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True) / 127
    safe = torch.where(scales > 0, scales, 1.0)
    return pack((wide / safe).round().to(torch.int8), scales, None)


def quantized_fp8(
    weight: Tensor,  # [out, in]
) -> PackedWeight:
    """Each output's largest weight as 448, all rounded to the nearest of float8 e4m3."""
    values, scales = quantize_rows(weight)
    return pack(values, scales, None)


def quantized_4(
    weight: Tensor,  # [out, in]
    group_size: int = 128,
) -> PackedWeight:
    """Each group's range, 0 included, in 15 steps. Raises ValueError where groups do not fit."""
    num_outputs, num_inputs = weight.shape
    if num_inputs % group_size:
        raise ValueError(f"{num_inputs} inputs are no multiple of a group of {group_size}")
    groups = weight.float().view(num_outputs, -1, group_size)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = (high - low) / 15
    safe = torch.where(scales > 0, scales, 1.0).unsqueeze(2)
    zeros = (-low.unsqueeze(2) / safe).round()
    integers = ((groups / safe).round() + zeros).clamp(0, 15).to(torch.uint8)
    return pack(integers.view(num_outputs, num_inputs), scales, zeros.squeeze(2).to(torch.int8))


def packed_linear(
    x: Tensor,  # [T, in]
    weight: PackedWeight,
    bias: Tensor | None,  # [out]
) -> Tensor:  # [T, out]
    """x Wᵀ + b with the weight made anew in x's type: slow, and what kernels are tested against."""
    return F.linear(x, weight.dequantized(x.dtype), bias)
