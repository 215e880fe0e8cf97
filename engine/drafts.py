"""Guessed tokens behind the known ones: they take what room a step leaves, and no one else's.

A step is planned without them. Where it has tokens to spare, and there are more free blocks than
running sequences could want in the next one, rows that sample get their drafts. So no draft holds
up a prompt, or costs anybody a block. Blocks that rejected drafts took stay with their sequence,
which grows into them.
"""

import dataclasses
from collections.abc import Sequence

from engine.block_manager import BlockManager
from engine.step_plan import ScheduledSequence, StepPlan


def max_num_drafts(row: ScheduledSequence) -> int:
    """Beside the token that is drawn behind them, and no more than may be generated at all."""
    sequence = row.sequence
    if not row.samples or sequence.params.num_beams > 1:
        return 0
    return max(0, sequence.params.max_tokens - sequence.num_generated_tokens - 1)


def with_drafts(
    plan: StepPlan,
    drafts: Sequence[tuple[int, ...]],  # of each row
    blocks: BlockManager,
    max_num_tokens: int,  # of a step
    num_growing: int,  # sequences that may want another block in the next step
) -> StepPlan:
    """The plan with as many drafts as there is room for."""
    rows, copies = [], list(plan.block_copies)
    left = max_num_tokens - plan.num_tokens
    for row, draft_ids in zip(plan.scheduled, drafts, strict=True):
        kept = draft_ids[: min(left, max_num_drafts(row))]
        if kept and blocks.num_free_blocks > num_growing + blocks.num_blocks_for(len(kept)):
            to_copy = blocks.prepare(row.sequence, row.num_scheduled_tokens + len(kept))
            assert to_copy is not None, f"{row.sequence} needs more blocks than its drafts have"
            copies += to_copy
            left -= len(kept)
            row = dataclasses.replace(row, draft_ids=kept)
        rows.append(row)
    return StepPlan(tuple(rows), tuple(copies))
