"""What one step computes: the scheduler's word to the model runner."""

from dataclasses import dataclass

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A row of a step: tokens [num_computed_tokens, num_computed_tokens + this many)."""

    sequence: Sequence
    num_scheduled_tokens: int

    @property
    def samples(self) -> bool:
        """Computed catches up with known, so the row's last logits give the next token.

        True of the plan until `update` has taken its result in.
        """
        return self.num_scheduled_tokens == self.sequence.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the model runner does in one step: first the copies, in order, then the rows."""

    scheduled: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...]  # (source, destination): copy-on-write

    @property
    def num_tokens(self) -> int:
        return sum(row.num_scheduled_tokens for row in self.scheduled)

    @property
    def empty(self) -> bool:
        return not self.scheduled
