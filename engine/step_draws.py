"""From a step's logits to its result: what its rows draw, and the scores that they ask for.

At once, or begun on the device and read later. Owns what is remembered of sequences whose options
depend on their tokens; knows nothing of models, or of where logits come from.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine import logits_processors
from engine.draws import Draws
from engine.kernels.draws import BROKEN
from engine.kernels.memory import sent
from engine.kernels.registry import Kernels
from engine.logprobs import score
from engine.sampler import CompiledDraws, draw_on_device, sample
from engine.step_plan import ScheduledSequence
from engine.step_result import NOTHING_ALLOWED, Drawn, Known, Launched, OnDevice, StepResult
from engine.step_scores import confirm, score_drawn, score_known
from engine.token_rules import NO_RULES


class StepDraws:
    """Of one model runner."""

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        kernels: Kernels,
        compiled: CompiledDraws | None,  # of a CPU, where there are such
        *,
        by_kernels: bool,  # rows of all kinds at once
    ) -> None:
        self._draws_of = Draws(eos_token_ids)
        self._kernels = kernels
        self._compiled = compiled
        self._by_kernels = by_kernels

    def made(
        self,
        scheduled: Sequence[ScheduledSequence],
        logits: Tensor,  # [R + S, vocab] float32: what is drawn from, changed, then what is scored
    ) -> StepResult:
        """The result, waited for."""
        result = StepResult([None] * len(scheduled), {})
        # masks are made here, while a GPU computes the logits
        draws = [draw for row in scheduled if row.samples for draw in self._draws_of.of(row)]
        drawable, known = logits[: len(draws)], logits[len(draws) :]
        asked = [i for i, draw in enumerate(draws) if draw.row.params.logprobs is not None]
        # a copy: to draw changes logits where a row has options
        raw = drawable[asked] if asked else drawable[:0]
        on_device = self._kernels if self._by_kernels else None
        drawn = sample(drawable, [draw.row for draw in draws], self._compiled, on_device)
        drawn = [draw.error or token for draw, token in zip(draws, drawn, strict=True)]
        kept = confirm(result, scheduled, drawn)
        score_known(result, scheduled, known)
        score_drawn(result, scheduled, drawn, [(i, kept[i]) for i in asked], raw)
        return result

    def launched(self, scheduled: Sequence[ScheduledSequence], logits: Tensor) -> Launched:
        """A step whose draws begin now, or once the step before is known that they hang on.

        What beams find, what is drawn behind drafts and how known tokens score is waited for.
        """
        step = Undrawn(self, scheduled, logits)
        if any(map(_looks_back, scheduled)):
            return step
        return step.draw(range(len(scheduled)))

    def begun(self, scheduled: Sequence[ScheduledSequence], logits: Tensor) -> OnDevice:
        """One draw of each row that samples, without a wait for the device."""
        sampling = [row for row in scheduled if row.samples]
        draws = [draw for row in sampling for draw in self._draws_of.of(row)]
        rows = [draw.row for draw in draws]
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        at = sent(torch.tensor(asked, dtype=torch.int64), logits.device) if asked else None
        raw = None if at is None else logits[at]  # a copy: options change logits where they are
        sane = None
        if any(map(logits_processors.asks, rows)):
            sane = logits.amax(-1).isfinite()
            logits_processors.process(logits, rows, self._kernels.penalize)
        ids = draw_on_device(logits, rows, self._kernels)
        if sane is not None:
            ids = torch.where((ids == BROKEN) & sane, NOTHING_ALLOWED, ids)
        scores = None
        if at is not None and raw is not None:
            most = max(rows[i].params.logprobs or 0 for i in asked)
            scores = score(raw, ids[at].clamp(min=0), most)
        places = {row.sequence.seq_id: place for place, row in enumerate(sampling)}
        errors = {i: draw.error for i, draw in enumerate(draws) if draw.error is not None}
        return OnDevice(scheduled, Drawn(ids, places), errors=errors, scored=asked, scores=scores)


class Undrawn:
    """A step whose logits are on their way; what it draws hangs on what the one before has drawn.

    So masks and penalties are made while the device computes the logits.
    """

    drawn = None

    def __init__(
        self, draws: StepDraws, scheduled: Sequence[ScheduledSequence], logits: Tensor
    ) -> None:
        self._draws = draws
        self._scheduled = scheduled
        self._logits = logits
        # as the rows are now: some may have ended until they draw
        self._num_drawn = np.array(
            [len(row.draft_ids) + 1 if row.samples else 0 for row in scheduled]
        )
        self._num_scored = np.array([len(row.scored) for row in scheduled])

    @torch.inference_mode()
    def draw(self, live: Sequence[int]) -> Launched:
        rows = [self._scheduled[i] for i in live]
        logits = self._logits
        if len(rows) < len(self._scheduled):
            wanted = np.zeros(len(self._scheduled), dtype=bool)
            wanted[list(live)] = True
            counts = np.concatenate((self._num_drawn, self._num_scored))
            at = np.flatnonzero(np.repeat(np.tile(wanted, 2), counts))
            logits = logits[sent(torch.from_numpy(at), logits.device)]
        if any(self._num_scored) or any(map(_is_waited_for, rows)):
            return Known(self._draws.made(rows, logits))
        return self._draws.begun(rows, logits)

    def wait(self) -> StepResult:
        raise AssertionError("a step is read whose draws have not begun")


def _looks_back(row: ScheduledSequence) -> bool:
    """Whether what a row may draw hangs on the tokens before: they have to be known by then."""
    sequence = row.sequence
    return row.samples and (
        sequence.token_filter is not None
        or sequence.token_rules is not NO_RULES
        or sequence.params.penalizes
    )


def _is_waited_for(row: ScheduledSequence) -> bool:
    return row.sequence.params.num_beams > 1 or bool(row.draft_ids)
