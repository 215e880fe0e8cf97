"""What decides the draws of a plan's rows, next to their logits; and which drafts they confirm.

A row draws behind its last known token, and behind each of its drafts as if the drafts before were
drawn. Noise is a function of seed and position: each draw is the very one that a step without
drafts would make, as long as the drafts before it are what was drawn. So a draft is kept if the
draw at its place is the draft, and the text is the same with and without drafts, sampled or greedy.
"""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from engine.beam_search import Candidates, num_candidates
from engine.logits_processors import TokenHistory
from engine.sampler import NothingAllowedError, NumericalError, SampledRow
from engine.sequence import Sequence as Generation
from engine.step_plan import ScheduledSequence
from engine.token_rules import NO_RULES


class Draw(NamedTuple):
    row: SampledRow
    error: NothingAllowedError | None  # the row's form allows nothing here


class Draws:
    """Owns what is remembered of sequences whose options depend on their tokens."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._histories: WeakKeyDictionary[Generation, TokenHistory] = WeakKeyDictionary()

    def of(self, row: ScheduledSequence) -> list[Draw]:
        """One more than the row has drafts."""
        sequence = row.sequence
        history = self._history(sequence)
        draws = [self._draw(sequence, sequence.token_ids, history)]
        for end in range(1, len(row.draft_ids) + 1):
            token_ids = [*sequence.token_ids, *row.draft_ids[:end]]
            if history is not None:
                history = history.copy()
                history.catch_up(token_ids)
            draws.append(self._draw(sequence, token_ids, history))
        return draws

    def _draw(
        self, sequence: Generation, token_ids: list[int], history: TokenHistory | None
    ) -> Draw:
        """Of the token behind these."""
        params = sequence.params
        stop_ids = params.stop_ids(self._eos_token_ids)
        banned: tuple[int, ...] = ()
        if history is not None:
            banned = history.banned(token_ids)
        if len(token_ids) - sequence.num_prompt_tokens < params.min_tokens:
            # what would end the generation is not drawn; passed over, it would stand in the text
            banned += tuple(sorted(stop_ids))
        mask = _mask(sequence, token_ids)
        error = mask if isinstance(mask, NothingAllowedError) else None
        row = SampledRow(
            params=params,
            seed=sequence.seed,
            position=len(token_ids),
            banned=banned,
            mask=b"" if isinstance(mask, NothingAllowedError) else mask,
            tally=None if history is None else history.tally,
            forced=None if history is None else history.forced,
            num_candidates=num_candidates(params, len(stop_ids)),
        )
        return Draw(row, error)

    def _history(self, sequence: Generation) -> TokenHistory | None:
        """What is known of the tokens of a sequence with options that depend on them."""
        if not sequence.params.penalizes and sequence.token_rules is NO_RULES:
            return None
        history = self._histories.get(sequence)
        if history is None or not history.precedes(sequence.token_ids):
            history = self._histories[sequence] = TokenHistory(
                sequence.params, sequence.token_rules, sequence.num_prompt_tokens
            )
        history.catch_up(sequence.token_ids)
        return history


def confirmed(draft_ids: Sequence[int], drawn: Sequence[int | Candidates | NumericalError]) -> int:
    """How many leading draws count: one, and one more for each draft that was drawn, too.

    A draw that went wrong ends them; if it is the first it counts.
    """
    count = 1
    for draft_id, token in zip(draft_ids, drawn, strict=False):
        if token != draft_id or isinstance(drawn[count], NumericalError):
            break
        count += 1
    return count


def _mask(sequence: Generation, token_ids: list[int]) -> bytes | NothingAllowedError | None:
    """What the sequence's form allows behind these; or why nothing. None without a form."""
    if sequence.token_filter is None:
        return None
    try:
        return sequence.token_filter.mask(token_ids[sequence.num_prompt_tokens :])
    except ValueError as error:
        param = sequence.params.structured_outputs and sequence.params.structured_outputs.param
        return NothingAllowedError(f"{param} allows no further token: {error}")
