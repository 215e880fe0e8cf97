"""Steps of decodes alone, captured once for some sizes and replayed: one launch for a whole model.

A step is padded to the next size that was captured. What is padded belongs to no sequence: it has a
token and a position, but no slot to store to, and attention passes it over. All sizes read from the
same inputs; on a GPU they share one pool of memory, the largest being captured first.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.kernels.reference import NO_SLOT
from engine.layers.attention import AttentionMetadata
from engine.step_batch import StepArrays, StepBatch

logger = logging.getLogger(__name__)

MOST_SEQUENCES = 512  # of a captured step; larger ones keep a GPU busy without
FINE_STEPS = 128  # up to here sizes are 8 apart, then 32
Forward = Callable[[StepBatch], Tensor]


class Graph(Protocol):
    def replay(self) -> None:
        """Do again what was captured, from and to the same memory."""


# runs a function once more, captured; gives what replays it and what the function gave
Capture = Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]]


def sizes_for(max_num_seqs: int) -> list[int]:
    """Sequences of the steps to capture, ascending."""
    most = min(max_num_seqs, MOST_SEQUENCES)
    fine = range(8, min(most, FINE_STEPS), 8)
    coarse = range(FINE_STEPS, most, 32)
    return [*(size for size in (1, 2, 4, *fine, *coarse) if size < most), most]


def padding(size: int, max_blocks: int, device: torch.device) -> StepBatch:
    """A step of tokens that belong to no sequence."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return StepBatch(
        token_ids=zeros(size),
        positions=zeros(size),
        metadata=AttentionMetadata(
            cu_query_lens=zeros(size + 1, dtype=torch.int32),
            seq_lens=zeros(size, dtype=torch.int32),
            slot_mapping=zeros(size) + NO_SLOT,
            block_tables=zeros(size, max_blocks, dtype=torch.int32),
        ),
        logit_rows=torch.arange(size, device=device),
    )


class DecodeGraphs:
    """The captured steps of one model and KV cache, and the memory they read from."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        sizes: Sequence[int],  # ascending
        max_blocks: int,  # of a sequence
        device: torch.device,
    ) -> None:
        self._inputs = padding(sizes[-1], max_blocks, device)
        self._captured: dict[int, tuple[Graph, Tensor]] = {}
        for count, size in enumerate(reversed(sizes), start=1):
            batch = self._part(size)
            self._captured[size] = capture(lambda batch=batch: forward(batch))  # type: ignore[misc]
            logger.info("captured %d of %d: steps of %d sequences", count, len(sizes), size)
        self._sizes = list(sizes)

    def takes(self, arrays: StepArrays) -> bool:
        """Whether a step is one token of each of some sequences, all of which draw."""
        num_tokens = len(arrays.token_ids)
        return (
            num_tokens <= self._sizes[-1]
            and num_tokens == len(arrays.seq_lens)
            and np.array_equal(arrays.logit_rows, np.arange(num_tokens))
        )

    def inputs(self, arrays: StepArrays) -> StepBatch:
        """The step where it is read from. The next call overwrites it."""
        num_sequences = len(arrays.seq_lens)
        padded = arrays.padded(self._size_for(num_sequences))
        batch = self._part(len(padded.seq_lens))
        into, given = batch.metadata, padded.to(batch.token_ids.device)
        batch.token_ids.copy_(given.token_ids)
        batch.positions.copy_(given.positions)
        into.cu_query_lens.copy_(given.metadata.cu_query_lens)
        into.seq_lens.copy_(given.metadata.seq_lens)
        into.slot_mapping.copy_(given.metadata.slot_mapping)
        width = padded.block_tables.shape[1]
        into.block_tables[:, :width].copy_(given.metadata.block_tables)
        return batch

    def replay(self, num_sequences: int) -> Tensor:  # [num_sequences, vocab]
        """The logits of what `inputs` was given. The next replay overwrites them."""
        graph, logits = self._captured[self._size_for(num_sequences)]
        graph.replay()
        return logits[:num_sequences]

    def _size_for(self, num_sequences: int) -> int:
        return next(size for size in self._sizes if size >= num_sequences)

    def _part(self, size: int) -> StepBatch:
        inputs, metadata = self._inputs, self._inputs.metadata
        return StepBatch(
            token_ids=inputs.token_ids[:size],
            positions=inputs.positions[:size],
            metadata=AttentionMetadata(
                cu_query_lens=metadata.cu_query_lens[: size + 1],
                seq_lens=metadata.seq_lens[:size],
                slot_mapping=metadata.slot_mapping[:size],
                block_tables=metadata.block_tables[:size],
            ),
            logit_rows=inputs.logit_rows[:size],
        )


def cuda_capture() -> Capture:
    """Captures on the current CUDA device, all into one pool."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        # once outside: kernels are compiled, and libraries take the memory that they keep
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            run()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = run()
        return graph, result

    return capture
