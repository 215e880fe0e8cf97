"""Which sequences run, and whether one more could: seats, tokens of a step and blocks together.

Knows nothing of requests. Who is let in, and who is preempted for it, the Scheduler decides.
"""

from bisect import bisect_left, insort
from itertools import pairwise

from engine.block_manager import BlockManager
from engine.sequence import Sequence, SequenceState, rank
from engine.step_budget import StepBudget


class Seats:
    """Owns the list of running sequences, ordered by rank."""

    def __init__(self, blocks: BlockManager, budget: StepBudget, max_num_seqs: int) -> None:
        # every running sequence gets at least one token of each step
        self.max_num_seqs = min(max_num_seqs, budget.num_tokens)
        self.running: list[Sequence] = []
        self._blocks = blocks
        self._budget = budget

    def take(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=rank)

    def ahead(self, sequence: Sequence) -> list[Sequence]:
        return self.running[: bisect_left(self.running, rank(sequence), key=rank)]

    def num_blocks_at_most(self, sequence: Sequence) -> int:
        return self._blocks.num_blocks_for(sequence.num_prompt_tokens + sequence.params.max_tokens)

    def may_fork(self) -> bool:
        """Whether one who holds no block of its own may run beside those who do."""
        num_running = len(self.running)
        return (
            num_running < self.max_num_seqs
            and self._num_growing(num_running) < self._blocks.num_free_blocks
        )

    def victims(self, sequence: Sequence, num_blocks_passed: int) -> list[Sequence] | None:
        """Whom to preempt, last first, so that a sequence can run now; None where it cannot.

        All have less priority. The fewest that make room, and none if even all would not.
        """
        ahead = self.ahead(sequence)
        demand = self._budget.demand(ahead, sequence)
        for num_kept in range(len(self.running), -1, -1):
            victims = self.running[num_kept:]
            if victims and victims[0].priority >= sequence.priority:
                return None
            spare = self._num_growing(num_kept) + num_blocks_passed
            if (
                num_kept < self.max_num_seqs
                and demand + max(0, num_kept - len(ahead)) < self._budget.num_tokens
                and self._blocks.fits(sequence, spare=spare, without=victims)
            ):
                return victims[::-1]
        return None

    def check(
        self, waiting: list[Sequence], held: list[Sequence], unfinished: list[Sequence]
    ) -> None:
        """Assert that each unfinished sequence is in one place, and in order there."""
        placed = [*self.running, *waiting, *held]
        assert len(placed) == len(unfinished), "a sequence is lost or in two places"
        assert set(placed) == set(unfinished), "a sequence is lost or in two places"
        for queue in (self.running, waiting):
            assert all(rank(a) < rank(b) for a, b in pairwise(queue)), "out of order"
        assert all(s.state is SequenceState.RUNNING for s in self.running)
        for sequence in (*waiting, *held):
            assert sequence.state is SequenceState.WAITING, sequence
            assert not sequence.block_table, sequence
            assert not sequence.num_computed_tokens, sequence
        assert len(self.running) <= self.max_num_seqs

    def _num_growing(self, num_kept: int) -> int:
        """Of the first `num_kept` running sequences, those that may yet take another block.

        A block is left for each: then all of them can go on in the next step, and nobody is let in
        only to be preempted at once.
        """
        return sum(
            self._blocks.num_blocks_kept([sequence]) < self.num_blocks_at_most(sequence)
            for sequence in self.running[:num_kept]
        )
