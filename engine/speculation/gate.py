"""Whether drafts pay: what they are expected to bring, against what they add to a step's time.

Both are measured as the engine runs: the share of drafts that was confirmed, and a line through
the times of steps by their tokens. With few sequences a step's time is that of reading the weights,
and drafts cost little; with many it is that of the arithmetic, and each costs like a token. The
measures fade, so the gate follows a change of work; and now and then a step goes against its
answer, to have both to compare.
"""

from dataclasses import dataclass

FADING = 0.98  # of what is remembered, with each step
PROBE_EVERY = 32  # of so many steps one goes against the answer
FIRST_PROPOSED, FIRST_CONFIRMED = 16.0, 8.0  # what is believed before any draft was tried


@dataclass(slots=True)
class StepLine:
    """Seconds of a step as a line over its tokens: least squares of steps that fade."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        for name, value in (
            ("weight", 1.0),
            ("tokens", num_tokens),
            ("seconds", seconds),
            ("squares", num_tokens * num_tokens),
            ("products", num_tokens * seconds),
        ):
            setattr(self, name, getattr(self, name) * FADING + value)

    def growth(self, num_tokens: int, num_more: int) -> float:
        """How many times as long a step takes with more tokens; 1 where nothing tells."""
        if not self.weight or not self.seconds:
            return 1.0
        mean = self.tokens / self.weight
        spread = self.squares / self.weight - mean * mean
        if spread < 0.25:  # all steps alike
            return 1.0
        mean_s = self.seconds / self.weight
        slope = max(0.0, (self.products / self.weight - mean * mean_s) / spread)
        now_s = max(mean_s + slope * (num_tokens - mean), mean_s * 0.01)
        return 1.0 + slope * num_more / now_s


class Gate:
    """Told of every step that ran; asked before drafts are added to one."""

    def __init__(self) -> None:
        self._line = StepLine()
        self._proposed, self._confirmed = FIRST_PROPOSED, FIRST_CONFIRMED
        self._proposing_share = 0.0  # time to make drafts, as a part of the step's
        self._answer, self._num_alike = True, 0

    @property
    def acceptance(self) -> float:
        """The share of drafts that is confirmed, of late."""
        return self._confirmed / self._proposed

    def pays(self, *, num_drawing: int, num_tokens: int, num_drafts: int) -> bool:
        """Whether a step of `num_tokens`, in which `num_drawing` rows draw, is to have drafts."""
        gain = 1.0 + self.acceptance * num_drafts / max(1, num_drawing)
        cost = self._line.growth(num_tokens, num_drafts) + self._proposing_share
        answer = gain > cost
        # an answer that never changed would never be compared with the other one
        self._num_alike = self._num_alike + 1 if answer is self._answer else 1
        self._answer = answer
        return answer is not (self._num_alike % PROBE_EVERY == 0)

    def ran(
        self,
        *,
        num_tokens: int,
        num_drafts: int,
        num_confirmed: int,
        run_s: float,
        propose_s: float = 0.0,
    ) -> None:
        self._line.add(num_tokens, run_s)
        if num_drafts:
            self._proposed = self._proposed * FADING + num_drafts
            self._confirmed = self._confirmed * FADING + num_confirmed
            share = propose_s / max(run_s, 1e-9)
            self._proposing_share += (1.0 - FADING) * (share - self._proposing_share)
