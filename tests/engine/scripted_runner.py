"""A runner that keeps ModelRunner's contract without a model, so an engine steps in no time."""

from collections.abc import Callable

from engine.sampler import NumericalError
from engine.sequence import Sequence
from engine.step_plan import StepPlan
from engine.step_result import StepResult


class Clock:
    """A millisecond passes between two looks at it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def hashed_token(vocab_size: int) -> Callable[[Sequence], int]:
    """A next token that depends on every known token, the sample and the seed, and nothing else."""

    def next_token(sequence: Sequence) -> int:
        state = 0 if sequence.params.greedy else sequence.seed * 31 + sequence.sample_index
        for token_id in sequence.token_ids:
            state = (state * 6364136223846793005 + token_id + 1442695040888963407) % 2**64
        return (state >> 33) % vocab_size

    return next_token


class ScriptedRunner:
    """Draws tokens from a function of the sequence; checks each plan against what it has seen.

    It remembers which sequence wrote each slot, and so fails when a row's earlier tokens do not lie
    where its block table says.
    """

    def __init__(
        self,
        next_token: Callable[[Sequence], int | NumericalError],
        *,
        vocab_size: int,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = 512
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.model_id = b"scripted"
        self.plans: list[StepPlan] = []
        self._next_token = next_token
        self._block_size = block_size
        self._cache: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, slot) -> tokens up to it

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        contents = [
            {slot: self._cache.get((source, slot)) for slot in range(self._block_size)}
            for source, _ in plan.block_copies
        ]
        for (_, destination), content in zip(plan.block_copies, contents, strict=True):
            for slot, tokens in content.items():
                if tokens is not None:
                    self._cache[destination, slot] = tokens
        for row in plan.scheduled:
            first = row.sequence.num_computed_tokens
            for position in range(first, first + row.num_scheduled_tokens):
                tokens = tuple(row.sequence.token_ids[: position + 1])
                self._cache[self._place(row.sequence, position)] = tokens
        for row in plan.scheduled:
            end = row.sequence.num_computed_tokens + row.num_scheduled_tokens
            for position in range(end):
                tokens = tuple(row.sequence.token_ids[: position + 1])
                assert self._cache[self._place(row.sequence, position)] == tokens
        return StepResult(
            [self._next_token(row.sequence) if row.samples else None for row in plan.scheduled], {}
        )

    def _place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // self._block_size], position % self._block_size

    def close(self) -> None:
        """Nothing to end."""
