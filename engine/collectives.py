"""What the ranks of one model tell each other while they compute a step.

A step's input comes by another way (`engine.crew`); here are sums and logits alone, by
torch.distributed: NCCL between GPUs, gloo between processes on a CPU. Every rank calls the same
operations in the same order.
"""

from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.shards import Shard

JOIN_TIMEOUT = timedelta(seconds=60)  # all ranks have said before that they are here


class Group(Protocol):
    """The ranks that compute one model."""

    shard: Shard

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, on every rank; may change the part."""

    def columns(
        self,
        part: Tensor,  # [R, W]
    ) -> Tensor:  # [R, size × W] on rank 0; the others' is of no use
        """All ranks' parts beside each other."""

    def least(self, number: int) -> int:
        """The least of all ranks' numbers, on every rank."""


class Alone:
    """One process that computes a whole model."""

    shard = Shard()

    def sum(self, part: Tensor) -> Tensor:
        return part

    def columns(self, part: Tensor) -> Tensor:
        return part

    def least(self, number: int) -> int:
        return number


ALONE = Alone()


class ProcessGroup:
    """One of several processes of a machine, by torch's default process group."""

    def __init__(self, shard: Shard, meeting_place: Path, device: torch.device) -> None:
        """Returns once all ranks are connected; `meeting_place` is a file none has made."""
        self.shard = shard
        self._device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=meeting_place.as_uri(),
            rank=shard.rank,
            world_size=shard.size,
            timeout=JOIN_TIMEOUT,
        )
        self.least(0)  # NCCL connects at the first operation

    def sum(self, part: Tensor) -> Tensor:
        dist.all_reduce(part)
        return part

    def columns(self, part: Tensor) -> Tensor:
        parts = None
        if self.shard.rank == 0:
            parts = [torch.empty_like(part) for _ in range(self.shard.size)]
        dist.gather(part.contiguous(), parts, dst=0)
        return part if parts is None else torch.cat(parts, dim=1)

    def least(self, number: int) -> int:
        least = torch.tensor(number, dtype=torch.int64, device=self._device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least.item())

    def leave(self) -> None:
        dist.destroy_process_group()
