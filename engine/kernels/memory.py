"""Where large tensors come from, and how small ones get to a device."""

import math

import numpy as np
import torch
from torch import Tensor

LINE = 64  # bytes that a cache holds together: vectors that straddle two are read twice


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor for long-lived, randomly read memory: weights and the KV cache.

    On the CPU the pages come from numpy, which asks for huge ones (torch does not): reads of
    random blocks gain 20-30 %. They are touched, and so counted, only when first written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + LINE, np.uint8)
    first = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(shape)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """On the device, without a wait for it."""
    if device.type != "cuda":
        return values.to(device)
    # from memory that is not pinned the copy would be made before the call returns
    return values.pin_memory().to(device, non_blocking=True)
