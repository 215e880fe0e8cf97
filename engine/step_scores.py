"""Which draws of a step count, and the scores that it gives.

Knows logits and plans; nothing of models.
"""

import math
from collections import abc

from torch import Tensor

from engine.beam_search import Candidates
from engine.draws import confirmed
from engine.logprobs import token_logprobs
from engine.sampler import NumericalError
from engine.step_plan import ScheduledSequence
from engine.step_result import StepResult


def score_known(
    result: StepResult,
    scheduled: abc.Sequence[ScheduledSequence],
    logits: Tensor,  # [S, vocab]
) -> None:
    """Score prompts, and what an earlier attempt has generated."""
    if logits.shape[0] == 0:
        return
    places = [(i, row.sequence, place) for i, row in enumerate(scheduled) for place in row.scored]
    num_top = [
        (s.params.prompt_logprobs if place < s.num_prompt_tokens else s.params.logprobs) or 0
        for _, s, place in places
    ]
    scores = token_logprobs(logits, [s.token_ids[place] for _, s, place in places], num_top)
    for (i, _, place), score in zip(places, scores, strict=True):
        if math.isnan(score.logprob):
            result.tokens[i] = NumericalError(
                f"the logits for token {place} are not finite numbers"
            )
        result.scores.setdefault(i, []).append(score)


def confirm(
    result: StepResult,
    scheduled: abc.Sequence[ScheduledSequence],
    drawn: abc.Sequence[int | Candidates | NumericalError],
) -> list[int | None]:
    """Give each row the draws that count; returns to which row each draw counts, if it does."""
    owners: list[int | None] = []
    for i, row in enumerate(scheduled):
        if not row.samples:
            continue
        start, num_draws = len(owners), len(row.draft_ids) + 1
        own = drawn[start : start + num_draws]
        count = confirmed(row.draft_ids, own)
        owners += [i] * count + [None] * (num_draws - count)
        tokens = [token for token in own[:count] if isinstance(token, int)]
        result.tokens[i] = tokens if row.draft_ids and tokens else own[0]
    return owners


def score_drawn(
    result: StepResult,
    scheduled: abc.Sequence[ScheduledSequence],
    drawn: abc.Sequence[object],
    asked: list[tuple[int, int | None]],  # draws to score, and to which row each counts, if it does
    logits: Tensor,  # [len(asked), vocab], as the model gave them
) -> None:
    """Score the tokens that this step drew for rows that ask for it."""
    kept = [
        (n, i, token)
        for n, (draw, i) in enumerate(asked)
        if i is not None and isinstance(token := drawn[draw], int)
    ]
    if not kept:
        return
    num_top = [scheduled[i].sequence.params.logprobs or 0 for _, i, _ in kept]
    scores = token_logprobs(logits[[n for n, _, _ in kept]], [t for _, _, t in kept], num_top)
    for (_, i, _), score in zip(kept, scores, strict=True):
        result.scores.setdefault(i, []).append(score)
