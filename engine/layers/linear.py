"""The matrix products with a weight that a model uses: whole, in 4 or 8 bits, or in float8."""

import torch.nn.functional as F
from torch import Tensor

from engine.collectives import Group
from engine.kernels.fp8 import quantize_rows
from engine.kernels.packed_weight import PackedWeight, quantized_4, quantized_8
from engine.kernels.registry import Kernels


class Linear:
    """y = x Wᵀ + b. Several projections of the same input are one Linear with stacked rows."""

    def __init__(
        self,
        weight: Tensor,  # [out, in]
        bias: Tensor | None = None,  # [out]
    ) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(
        self,
        x: Tensor,  # [T, in]
    ) -> Tensor:  # [T, out]
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """The same with integers and scales for a weight; what it is multiplied with stays as it is."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None, kernels: Kernels) -> None:
        self.packed = packed
        self.bias = bias
        self._multiply = kernels.packed_linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.packed, self.bias)


class Fp8Linear:
    """The same in float8: a weight when it is loaded, what it is multiplied with each time."""

    def __init__(
        self,
        values: Tensor,  # [out, in] float8 e4m3
        scales: Tensor,  # [1, out] float32
        bias: Tensor | None,
        kernels: Kernels,
    ) -> None:
        self.values = values
        self.scales = scales
        self.bias = bias
        self._multiply = kernels.fp8_linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.values, self.scales, self.bias)


class SummedLinear:
    """A product whose inputs lie in parts on several ranks: the sum of what each makes of its."""

    def __init__(
        self,
        part: "Linear | PackedLinear | Fp8Linear",  # without a bias
        bias: Tensor | None,  # [out]
        group: Group,
    ) -> None:
        self.part = part
        self.bias = bias
        self.group = group

    def __call__(
        self,
        x: Tensor,  # [T, this rank's part of in]
    ) -> Tensor:  # [T, out]
        y = self.group.sum(self.part(x))
        return y if self.bias is None else y + self.bias


AnyLinear = Linear | PackedLinear | Fp8Linear | SummedLinear


def quantized(
    weight: Tensor, bias: Tensor | None, kind: str, kernels: Kernels
) -> PackedLinear | Fp8Linear:
    """A weight kept as a setting says. Raises ValueError where its size does not fit."""
    if kind == "fp8":
        if weight.shape[0] % 16 or weight.shape[1] % 16:
            raise ValueError(f"float8 needs multiples of 16, got a weight of {[*weight.shape]}")
        values, scales = quantize_rows(weight)
        return Fp8Linear(values, scales.T.contiguous(), bias, kernels)
    pack = {"int8": quantized_8, "int4": quantized_4}[kind]
    return PackedLinear(pack(weight), bias, kernels)
