"""Steps of a few tokens of each sequence, captured for some shapes and replayed in one launch.

A shape is a number of sequences and how many tokens each may have: one, where nothing is guessed,
and as many as drafts are verified at once, or as a draft model has to catch up with. A step is
padded to the next shape that was captured. What is padded belongs to no sequence: it has a token
and a position, but no slot to store to, and attention passes it over; it counts through lengths on
the device, so that sequences may have fewer tokens than the shape has room for. All shapes read
from the same inputs; on a GPU they share one pool of memory, the largest being captured first.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.kernels.reference import NO_SLOT
from engine.layers.attention import AttentionMetadata
from engine.step_batch import StepArrays, StepBatch

logger = logging.getLogger(__name__)

MOST_TOKENS = 512  # of a captured step; larger ones keep a GPU busy without
FINE_STEPS = 128  # up to here numbers of sequences are 8 apart, then 32
Forward = Callable[[StepBatch], Tensor]


class Graph(Protocol):
    def replay(self) -> None:
        """Do again what was captured, from and to the same memory."""


# runs a function once more, captured; gives what replays it and what the function gave
Capture = Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]]


class Shape(NamedTuple):
    """Of a captured step."""

    num_sequences: int
    width: int  # tokens of each, at most

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.width


def shapes_for(max_num_seqs: int, width: int) -> list[Shape]:
    """What to capture: steps of one token of each sequence, and of up to `width`; ascending."""
    return [
        Shape(size, each)
        for each in sorted({1, width})
        for size in _sizes(min(max_num_seqs, MOST_TOKENS // each))
    ]


def _sizes(most: int) -> list[int]:
    fine = range(8, min(most, FINE_STEPS), 8)
    coarse = range(FINE_STEPS, most, 32)
    return [*(size for size in (1, 2, 4, *fine, *coarse) if size < most), most]


def padding(
    num_sequences: int, num_tokens: int, max_blocks: int, device: torch.device
) -> StepBatch:
    """A step of tokens that belong to no sequence."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return StepBatch(
        token_ids=zeros(num_tokens),
        positions=zeros(num_tokens),
        metadata=AttentionMetadata(
            cu_query_lens=zeros(num_sequences + 1, dtype=torch.int32),
            seq_lens=zeros(num_sequences, dtype=torch.int32),
            slot_mapping=zeros(num_tokens) + NO_SLOT,
            block_tables=zeros(num_sequences, max_blocks, dtype=torch.int32),
        ),
        logit_rows=zeros(num_tokens),
    )


class StepGraphs:
    """The captured steps of one model and KV cache, and the memory they read from."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        shapes: Sequence[Shape],
        max_blocks: int,  # of a sequence
        device: torch.device,
    ) -> None:
        most = max(shape.num_sequences for shape in shapes)
        self._inputs = padding(most, max(s.num_tokens for s in shapes), max_blocks, device)
        # the first that a step fits in is the one that pads it least
        self._shapes = sorted(shapes, key=lambda shape: (shape.width, shape.num_sequences))
        self._captured: dict[Shape, tuple[Graph, Tensor]] = {}
        largest_first = sorted(shapes, key=lambda shape: -shape.num_tokens)
        for count, shape in enumerate(largest_first, start=1):
            batch = self._part(shape)
            self._captured[shape] = capture(lambda batch=batch: forward(batch))  # type: ignore[misc]
            logger.info(
                "captured %d of %d: steps of %d sequences with %d tokens each",
                count, len(shapes), shape.num_sequences, shape.width,
            )  # fmt: skip

    def shape_for(self, arrays: StepArrays) -> Shape | None:
        """The least padded one that has room for a step, if any has."""
        num_sequences = len(arrays.seq_lens)
        width = int(np.diff(arrays.cu_query_lens).max())
        fits = (
            shape
            for shape in self._shapes
            if shape.num_sequences >= num_sequences
            and shape.width >= width
            and shape.num_tokens >= len(arrays.logit_rows)
        )
        return next(fits, None)

    def inputs(self, arrays: StepArrays, shape: Shape) -> StepBatch:
        """The step where a shape's is read from. The next call overwrites it."""
        batch = self._part(shape)
        into = batch.metadata
        given = arrays.padded(shape.num_sequences, shape.num_tokens).to(batch.token_ids.device)
        batch.token_ids.copy_(given.token_ids)
        batch.positions.copy_(given.positions)
        batch.logit_rows.copy_(given.logit_rows)
        into.cu_query_lens.copy_(given.metadata.cu_query_lens)
        into.seq_lens.copy_(given.metadata.seq_lens)
        into.slot_mapping.copy_(given.metadata.slot_mapping)
        width = given.metadata.block_tables.shape[1]
        into.block_tables[:, :width].copy_(given.metadata.block_tables)
        return batch

    def replay(self, shape: Shape, num_rows: int) -> Tensor:  # [num_rows, vocab]
        """The logits wanted of what `inputs` was given. The next replay overwrites them."""
        graph, logits = self._captured[shape]
        graph.replay()
        return logits[:num_rows]

    def _part(self, shape: Shape) -> StepBatch:
        inputs, metadata = self._inputs, self._inputs.metadata
        num_sequences, num_tokens = shape.num_sequences, shape.num_tokens
        return StepBatch(
            token_ids=inputs.token_ids[:num_tokens],
            positions=inputs.positions[:num_tokens],
            metadata=AttentionMetadata(
                cu_query_lens=metadata.cu_query_lens[: num_sequences + 1],
                seq_lens=metadata.seq_lens[:num_sequences],
                slot_mapping=metadata.slot_mapping[:num_tokens],
                block_tables=metadata.block_tables[:num_sequences],
            ),
            logit_rows=inputs.logit_rows[:num_tokens],
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
