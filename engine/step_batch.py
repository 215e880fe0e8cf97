"""A step's tokens of all sequences, end to end: as arrays, and as tensors on the device.

Knows what is computed where; nothing of models, or of what is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.memory import sent
from engine.kernels.reference import NO_SLOT
from engine.layers.attention import AttentionMetadata
from engine.step_plan import ScheduledSequence


class Stretch(NamedTuple):
    """Consecutive tokens of one sequence, and where its keys and values lie."""

    token_ids: list[int]
    first: int  # the position of the first of them
    block_table: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What a model computes in one step."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    metadata: AttentionMetadata
    logit_rows: Tensor  # [R] int64, the tokens whose logits are wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """The same before it is on a device; all of int64."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    cu_query_lens: NDArray[np.int64]  # [N + 1]
    seq_lens: NDArray[np.int64]  # [N]
    slot_mapping: NDArray[np.int64]  # [T]
    block_tables: NDArray[np.int64]  # [N, max_blocks], right-padded with 0
    logit_rows: NDArray[np.int64]  # [R]

    def check(self, *, vocab_size: int, num_blocks: int, max_model_len: int) -> None:
        """What becomes an index on the device: out of range it would take down all."""
        assert len(self.token_ids) == self.cu_query_lens[-1]
        assert self.token_ids.min() >= 0
        assert self.token_ids.max() < vocab_size
        assert self.block_tables.min() >= 0
        assert self.block_tables.max() < num_blocks
        assert self.seq_lens.max() <= max_model_len

    def padded(self, num_sequences: int, num_tokens: int) -> "StepArrays":
        """With tokens at the end that belong to no sequence, and sequences that have none.

        The logits of any token are wanted until there are as many of them as there are tokens.
        """
        more, others = num_tokens - len(self.token_ids), num_sequences - len(self.seq_lens)
        width = self.block_tables.shape[1]
        return StepArrays(
            token_ids=np.pad(self.token_ids, (0, more)),
            positions=np.pad(self.positions, (0, more)),
            cu_query_lens=np.pad(self.cu_query_lens, (0, others), mode="edge"),
            seq_lens=np.pad(self.seq_lens, (0, others)),
            slot_mapping=np.pad(self.slot_mapping, (0, more), constant_values=NO_SLOT),
            block_tables=np.concatenate((self.block_tables, np.zeros((others, width), np.int64))),
            logit_rows=np.pad(self.logit_rows, (0, num_tokens - len(self.logit_rows))),
        )

    def to(self, device: torch.device) -> StepBatch:
        def tensor(array: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
            small = array if dtype == torch.int64 else array.astype(np.int32)
            return sent(torch.from_numpy(small), device)

        return StepBatch(
            token_ids=tensor(self.token_ids, torch.int64),
            positions=tensor(self.positions, torch.int64),
            metadata=AttentionMetadata(
                cu_query_lens=tensor(self.cu_query_lens, torch.int32),
                seq_lens=tensor(self.seq_lens, torch.int32),
                slot_mapping=tensor(self.slot_mapping, torch.int64),
                block_tables=tensor(self.block_tables, torch.int32),
            ),
            logit_rows=tensor(self.logit_rows, torch.int64),
        )


def plan_arrays(scheduled: Sequence[ScheduledSequence], block_size: int) -> StepArrays:
    """Of a plan's rows. The logits wanted are of what is drawn, in order, then of what is scored.

    A row that samples draws behind its last known token, and behind each of its drafts.
    """
    stretches = []
    for row in scheduled:
        first = row.sequence.num_computed_tokens
        known = row.sequence.token_ids[first : first + row.num_scheduled_tokens]
        stretches.append(Stretch([*known, *row.draft_ids], first, row.sequence.block_table))
    ends = np.cumsum([row.num_tokens for row in scheduled])
    drawing = [
        end - 1 - num_after
        for end, row in zip(ends, scheduled, strict=True)
        if row.samples
        for num_after in range(len(row.draft_ids), -1, -1)
    ]
    # the logits at a place are for the token behind it
    scoring = [
        end - row.num_tokens - row.sequence.num_computed_tokens + place - 1
        for end, row in zip(ends, scheduled, strict=True)
        for place in row.scored
    ]
    return flat_arrays(stretches, np.array([*drawing, *scoring], dtype=np.int64), block_size)


def flat_arrays(
    stretches: Sequence[Stretch], logit_rows: NDArray[np.int64], block_size: int
) -> StepArrays:
    """Put stretches end to end; `logit_rows` counts through all their tokens."""
    tokens = np.array([i for stretch in stretches for i in stretch.token_ids], dtype=np.int64)
    query_lens = np.array([len(stretch.token_ids) for stretch in stretches], dtype=np.int64)
    computed = np.array([stretch.first for stretch in stretches], dtype=np.int64)
    seq_lens = computed + query_lens
    cu_query_lens = np.concatenate(([0], query_lens.cumsum()))
    # a row's tokens are consecutive: count through the batch, then move each row to its start
    positions = np.arange(len(tokens)) + np.repeat(computed - cu_query_lens[:-1], query_lens)
    num_blocks = -(-seq_lens // block_size)
    block_tables = np.zeros((len(stretches), int(num_blocks.max())), dtype=np.int64)
    for table, stretch, count in zip(block_tables, stretches, num_blocks, strict=True):
        table[:count] = stretch.block_table[:count]
    owner = np.repeat(np.arange(len(stretches)), query_lens)
    blocks = block_tables[owner, positions // block_size]
    return StepArrays(
        token_ids=tokens,
        positions=positions,
        cu_query_lens=cu_query_lens,
        seq_lens=seq_lens,
        slot_mapping=blocks * block_size + positions % block_size,
        block_tables=block_tables,
        logit_rows=logit_rows,
    )
