"""Where large tensors come from."""

import math

import numpy as np
import torch
from torch import Tensor


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor for long-lived, randomly read memory: weights and the KV cache.

    On the CPU the pages come from numpy, which asks for huge ones (torch does not): reads of
    random blocks gain 20-30 %. They are touched, and so counted, only when first written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
