"""The one matrix product with a weight that a model uses."""

import torch.nn.functional as F
from torch import Tensor


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
