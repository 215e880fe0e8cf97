"""What one step computes: the scheduler's word to the model runner."""

from dataclasses import dataclass

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A row of a step: tokens [num_computed_tokens, num_computed_tokens + this many).

    Behind the last known token may stand drafts: tokens that are guessed to come next, computed
    with it. They are tokens known but not yet computed, for this step alone.
    """

    sequence: Sequence
    num_scheduled_tokens: int
    draft_ids: tuple[int, ...] = ()  # only of a row that samples

    @property
    def num_tokens(self) -> int:
        """What the row costs."""
        return self.num_scheduled_tokens + len(self.draft_ids)

    @property
    def samples(self) -> bool:
        """Computed catches up with known, so the row's last logits give the next token.

        True of the plan until `update` has taken its result in.
        """
        return (
            self.num_scheduled_tokens == self.sequence.num_uncomputed_tokens
            and self.sequence.ending is None
        )

    @property
    def scored(self) -> range:
        """Places of known tokens whose asked-for log-probability the row's logits tell.

        The logits at place p are for token p + 1. A next token that the row draws is not among
        them.
        """
        sequence = self.sequence
        if sequence.num_scored_tokens is None or not sequence.num_unscored_tokens:
            return range(0)
        first = sequence.num_scored_tokens
        assert sequence.num_computed_tokens < first, f"{sequence} skipped logits it needs"
        end = sequence.num_computed_tokens + self.num_scheduled_tokens + 1
        return range(first, min(end, first + sequence.num_unscored_tokens))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the model runner does in one step: first the copies, in order, then the rows."""

    scheduled: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...]  # (source, destination): copy-on-write

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.scheduled)

    @property
    def num_drafts(self) -> int:
        return sum(len(row.draft_ids) for row in self.scheduled)

    @property
    def empty(self) -> bool:
        return not self.scheduled

    def half(self) -> "StepPlan":
        """The first half of its known tokens, at least one; the last row may be cut short."""
        budget = max(1, (self.num_tokens - self.num_drafts) // 2)
        rows = []
        for row in self.scheduled:
            num_tokens = min(row.num_scheduled_tokens, budget)
            if num_tokens == 0:
                break
            rows.append(ScheduledSequence(row.sequence, num_tokens))
            budget -= num_tokens
        return StepPlan(tuple(rows), self.block_copies)
