"""What a step gave its rows: known at once, or on its way from the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.beam_search import Candidates
from engine.kernels.draws import BROKEN
from engine.logprobs import Scores, told
from engine.outputs import TokenLogprobs
from engine.sampler import NumericalError, not_finite, nothing_allowed
from engine.step_plan import ScheduledSequence

NOTHING_ALLOWED = -2  # in place of an id, where a row's own options leave no token


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave its rows, each at its place in the plan.

    A row's token is None where it does not sample, a NumericalError where its logits are not
    numbers; a beam has its candidates there, a row with drafts a list of those that were drawn
    indeed, and of one more. Scores are of known tokens first, then of those drawn; only rows that
    ask have any.
    """

    tokens: list[int | list[int] | Candidates | NumericalError | None]
    scores: dict[int, list[TokenLogprobs]]


class Launched(Protocol):
    """A step that a runner has begun."""

    @property
    def drawn(self) -> "Drawn | None":
        """Where its tokens will be, for the next step to find; None where that has to wait."""
        ...

    def draw(self, live: Sequence[int]) -> "Launched | None":
        """Begin draws that had to wait until the step before is taken in, of these rows alone.

        Returns the step of these rows; None where the draws of all had begun before.
        """
        ...

    def wait(self) -> StepResult:
        """The result, once the device has it."""
        ...


class Known(NamedTuple):
    """A step whose result is there."""

    result: StepResult
    drawn: None = None

    def draw(self, live: Sequence[int]) -> None:
        """Nothing is left to draw."""

    def wait(self) -> StepResult:
        return self.result


class Drawn(NamedTuple):
    """Tokens on the device."""

    ids: Tensor  # [R] int64; below 0 where no token could be drawn
    places: dict[int, int]  # in it, by seq_id


class OnDevice:
    """A step whose draws are copied back while others are made: one copy, and no wait before it."""

    def __init__(
        self,
        scheduled: Sequence[ScheduledSequence],
        drawn: Drawn,
        *,
        errors: Mapping[int, NumericalError] | None = None,  # by place in the draws, known already
        scored: Sequence[int] = (),  # places in the draws whose log-probabilities are asked for
        scores: Scores | None = None,  # of these
    ) -> None:
        self.drawn = drawn
        # as the rows are now: the next plan is made before this is read
        self._rows = [
            (row.sequence.num_tokens, drawn.places.get(row.sequence.seq_id)) for row in scheduled
        ]
        self._errors = errors or {}
        places = {place: i for i, (_, place) in enumerate(self._rows) if place is not None}
        self._scored = [
            (places[place], scheduled[places[place]].sequence.params.logprobs or 0)
            for place in scored
        ]
        self._arriving = _Arriving((drawn.ids, *(scores or ())))

    def draw(self, live: Sequence[int]) -> None:
        """Nothing is left to draw."""

    def wait(self) -> StepResult:
        arrived, *scores = self._arriving.wait()
        ids = arrived.tolist()
        tokens = [self._token(ids, position, place) for position, place in self._rows]
        found: dict[int, list[TokenLogprobs]] = {}
        if scores:
            owners, num_top = zip(*self._scored, strict=True)
            drawn = [token if isinstance(token := tokens[i], int) else 0 for i in owners]
            for i, told_of in zip(owners, told(Scores(*scores), drawn, num_top), strict=True):
                if isinstance(tokens[i], int):
                    found[i] = [told_of]
        return StepResult(tokens, found)

    def _token(
        self, ids: list[int], position: int, place: int | None
    ) -> int | list[int] | Candidates | NumericalError | None:
        if place is None:
            return None
        if place in self._errors:
            return self._errors[place]
        if ids[place] == BROKEN:
            return not_finite(position)
        return nothing_allowed(position) if ids[place] == NOTHING_ALLOWED else ids[place]


class _Arriving:
    """Tensors on their way from the device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._copied: torch.cuda.Event | None = None
        if self._tensors[0].is_cuda:
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> list[Tensor]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors
