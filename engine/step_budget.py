"""How the tokens of a step are shared out when the sequences want more than it has.

Every running sequence gets one token at least, so that no prompt holds up another's decode. A long
prompt takes what is left, but lets short ones pass: they may have up to half of the step. Source of
the first half: Agrawal et al. 2024 (Sarathi-Serve).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.sequence import Sequence

MAX_PASSED = 64  # waiting long prompts that a short one may pass: bounds the work of a step


@dataclass(frozen=True, slots=True)
class StepBudget:
    num_tokens: int  # of one step
    num_scored: int = 2**31  # known tokens that one step may score, about: each costs its logits

    @property
    def for_short(self) -> int:
        """Tokens of a step that a long prompt leaves to short ones behind it, if they want them."""
        return self.num_tokens // 2

    def is_short(self, sequence: Sequence) -> bool:
        """What it has to compute may go beside a long prompt in the same step."""
        return sequence.num_uncomputed_tokens <= self.for_short

    def asked(self, sequence: Sequence) -> int:
        """Tokens that those ahead leave for a running sequence, as far as they can."""
        return sequence.num_uncomputed_tokens if self.is_short(sequence) else 1

    def share(self, sequence: Sequence, left: int, num_behind: int, asked_behind: int) -> int:
        """Tokens a running sequence gets of those left, given what the ones behind it ask for."""
        kept = num_behind
        if not self.is_short(sequence):
            kept = max(kept, min(asked_behind, left // 2))
        return min(sequence.num_uncomputed_tokens, left - kept)

    def demand(self, ahead: Iterable[Sequence], sequence: Sequence) -> int:
        """Tokens of the next step that go to those ahead, and not to this one."""
        short = long = 0
        for each in ahead:
            if self.is_short(each):
                short += each.num_uncomputed_tokens
            else:
                long += each.num_uncomputed_tokens
        if self.is_short(sequence):
            long = min(long, self.num_tokens - self.for_short)
        return short + long
