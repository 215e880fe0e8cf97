"""What a step gave its rows: known at once, or on its way from the device."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.beam_search import Candidates
from engine.kernels.draws import BROKEN
from engine.outputs import TokenLogprobs
from engine.sampler import NumericalError
from engine.step_plan import StepPlan


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

    def wait(self) -> StepResult:
        """The result, once the device has it."""
        ...


class Known(NamedTuple):
    """A step whose result was there when its launch returned."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class Drawn(NamedTuple):
    """Tokens on the device."""

    ids: Tensor  # [R] int64, BROKEN where no token could be drawn
    places: dict[int, int]  # in it, by seq_id


class OnDevice:
    """A step whose draws are copied back while others are made: one copy, and no wait before it."""

    def __init__(self, plan: StepPlan, drawn: Drawn) -> None:
        self.drawn = drawn
        # as the rows are now: the next plan is made before this is read
        self._rows = [
            (row.sequence.num_tokens, drawn.places.get(row.sequence.seq_id))
            for row in plan.scheduled
        ]
        self._copied: torch.cuda.Event | None = None
        self._ids = drawn.ids
        if drawn.ids.is_cuda:
            self._ids = torch.empty(drawn.ids.shape, dtype=torch.int64, pin_memory=True)
            self._ids.copy_(drawn.ids, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> StepResult:
        if self._copied is not None:
            self._copied.synchronize()
        ids = self._ids.tolist()
        tokens: list[int | list[int] | Candidates | NumericalError | None] = []
        for position, place in self._rows:
            token = None if place is None else ids[place]
            if token == BROKEN:
                token = NumericalError(f"the logits for token {position} are not finite numbers")
            tokens.append(token)
        return StepResult(tokens, {})
