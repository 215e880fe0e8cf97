"""Whole blocks of the KV cache copied to others, at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import reference

ELEMENTS = 8192  # that a program holds in registers: 64 for each of its threads
# a program holds a few numbers of every block that is copied: one kernel for each of these bounds
MOST_COPIES = (16, 128, 1024)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@triton.jit(do_not_specialize=["num_copies"])
def copy_slices(
    blocks,  # [num_blocks, SIZE], changed
    sources,  # [num_copies] int64
    destinations,  # [num_copies] int64
    num_copies,
    SIZE: tl.constexpr,
    COPIES: tl.constexpr,
    SLICE: tl.constexpr,
):
    """A program copies the same slice of every block: all are read before the first is written."""
    copies = tl.arange(0, COPIES)
    there = copies < num_copies
    element = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    mask = there[:, None] & (element < SIZE)[None, :]
    source = tl.load(sources + copies, mask=there, other=0)
    destination = tl.load(destinations + copies, mask=there, other=0)
    values = tl.load(blocks + source[:, None] * SIZE + element[None, :], mask=mask)
    # among copies a block may be both source and destination, of different threads
    tl.debug_barrier()
    tl.store(blocks + destination[:, None] * SIZE + element[None, :], values, mask=mask)


def copy_blocks(
    kv_cache: Tensor,  # [num_blocks, …] contiguous, changed
    sources: Tensor,  # [M] int64
    destinations: Tensor,  # [M] int64, no block twice
) -> None:
    """Copy whole blocks; all sources are read before any destination is written."""
    num_copies, size = len(sources), kv_cache[0].numel()
    if num_copies == 0:
        return
    if num_copies > MOST_COPIES[-1]:
        reference.copy_blocks(kv_cache, sources, destinations)
        return
    assert kv_cache.is_contiguous()
    most = next(most for most in MOST_COPIES if num_copies <= most)
    with torch.cuda.device_of(kv_cache):
        copy_slices[(triton.cdiv(size, ELEMENTS // most),)](
            kv_cache.view(INTEGERS[kv_cache.itemsize]),
            sources.contiguous(),
            destinations.contiguous(),
            num_copies,
            SIZE=size,
            COPIES=most,
            SLICE=ELEMENTS // most,
            num_warps=4,
        )
