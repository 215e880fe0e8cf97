"""Masks of allowed tokens, from their packed form to logits.

A mask is bytes with one bit for each id, the lowest bit of the first byte for id 0; ids beyond its
end are not allowed. Packed until it is on the device: 6 KB instead of 49 for 49,152 ids.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.memory import sent


def apply_masks(
    logits: Tensor,  # [R, vocab], changed in the rows that have a mask
    masks: Mapping[int, bytes],  # by row
) -> None:
    """Leave the logits of allowed tokens, and -inf for the others."""
    if not masks:
        return
    vocab_size = logits.shape[1]
    num_bytes = -(-vocab_size // 8)
    packed = np.zeros((len(masks), num_bytes), dtype=np.uint8)
    for place, mask in enumerate(masks.values()):
        bits = np.frombuffer(mask, dtype=np.uint8)[:num_bytes]
        packed[place, : len(bits)] = bits
    on_cpu = logits.device.type == "cpu"
    unpacked = unpacked_here(packed) if on_cpu else unpacked_on(logits.device, packed)
    banned = ~unpacked[:, :vocab_size]
    rows = list(masks)
    if len(rows) == logits.shape[0]:
        logits.masked_fill_(banned, -torch.inf)
    else:
        at = sent(torch.tensor(rows), logits.device)
        logits[at] = logits[at].masked_fill_(banned, -torch.inf)


def unpacked_here(packed: NDArray[np.uint8]) -> Tensor:  # [R, 8 × bytes] bool
    """Less work for a CPU than shifting: 0.03 ms instead of 0.09 for a row of 49,152 ids."""
    return torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little").view(np.bool_))


def unpacked_on(device: torch.device, packed: NDArray[np.uint8]) -> Tensor:
    """The same, of bytes that are unpacked where they are needed."""
    on_device = sent(torch.from_numpy(packed), device)
    bit = torch.arange(8, dtype=torch.uint8, device=device)
    return ((on_device.unsqueeze(2) >> bit) & 1).view(len(packed), -1) != 0
