"""What grids and tiles are fitted to: how many processors a device has, and of which generation.

A CPU stands for a device here, where Triton's interpreter runs kernels for tests.
"""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    capability: int  # compute capability: 80 for 8.0
    num_processors: int  # streaming multiprocessors

    @property
    def generation(self) -> int:
        """By how it multiplies: 8, warp by warp from registers (Ampere, Ada, a PC's Blackwell);
        9, four warps from shared memory (Hopper); 10, into memory of its own (Blackwell)."""
        major = self.capability // 10
        return major if major in (9, 10) else 8


# of two processors, so that programs in the interpreter have more than one item each
INTERPRETER = Device(capability=80, num_processors=2)


@functools.cache
def device_of(device: torch.device) -> Device:
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Device(
        capability=properties.major * 10 + properties.minor,
        num_processors=properties.multi_processor_count,
    )
