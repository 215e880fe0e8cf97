"""What a request does to its logits before a token is chosen.

In this order: penalties, logit bias, then what may be drawn at all: allowed ids, a structured
output's mask, banned ids, and last a forced one. Every change is to one row and depends on that
row's own tokens alone; rows that ask for nothing are not looked at, and nothing loops over the
vocabulary in Python.

Sources: Keskar et al. 2019 (CTRL), repetition penalty; OpenAI's API reference, presence and
frequency penalty and logit bias; vLLM, bad words.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import draws
from engine.kernels.memory import sent
from engine.sampling_params import SamplingParams
from engine.token_masks import apply_masks
from engine.token_rules import TokenRules

# of `Kernels`
Penalize = Callable[[Tensor, Tensor, Tensor], None]


class TokenTally:
    """How often each token was generated, of those that a penalty touches."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.empty(16, dtype=np.int64)
        self._counts = np.zeros(16, dtype=np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._places)]

    def add(self, token_id: int, count: int) -> None:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token_id
        self._counts[place] += count

    def copy(self) -> "TokenTally":
        twin = TokenTally()
        twin._places = dict(self._places)
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        return twin


class TokenHistory:
    """What the options of one sequence have to know of its tokens.

    A function of the ids alone: kept up to date token by token, and the same when it is built anew
    from all of them.
    """

    def __init__(self, params: SamplingParams, rules: TokenRules, num_prompt_tokens: int) -> None:
        self.tally = TokenTally() if params.penalizes else None
        self._params = params
        self._rules = rules
        self._num_prompt_tokens = num_prompt_tokens
        self._num_seen = 0
        self._seen: Sequence[int] = ()
        self._thinks = False  # the newest of <think> and </think> is <think>
        self._num_thought = 0  # generated ids behind a <think>
        self._bans_after: dict[int, list[tuple[int, ...]]] = {}  # bad words by last id but one
        for word in rules.bad_words:
            if len(word) > 1:
                self._bans_after.setdefault(word[-2], []).append(word)
        self._always_banned = tuple(word[0] for word in rules.bad_words if len(word) == 1)

    def precedes(self, token_ids: Sequence[int]) -> bool:
        """Whether it can catch up: a beam's place may have taken another beam, as another list."""
        return self._seen is token_ids

    def copy(self) -> "TokenHistory":
        """Another that stands where this one does."""
        twin = copy.copy(self)
        twin.tally = None if self.tally is None else self.tally.copy()
        return twin

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that are new; `token_ids` holds the prompt's and all generated."""
        if self.tally is not None:
            self._count(self.tally, token_ids)
        if self._rules.thinking is not None:
            self._follow_thought(self._rules.thinking, token_ids)
        self._num_seen = len(token_ids)
        self._seen = token_ids

    def banned(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Ids that would complete a bad word made of generated tokens."""
        if len(token_ids) == self._num_prompt_tokens:
            return self._always_banned
        num_generated = len(token_ids) - self._num_prompt_tokens
        completing = tuple(
            word[-1]
            for word in self._bans_after.get(token_ids[-1], ())
            if len(word) - 1 <= num_generated
            and tuple(token_ids[len(token_ids) - len(word) + 1 :]) == word[:-1]
        )
        return self._always_banned + completing

    @property
    def forced(self) -> int | None:
        """The one id that may come next: the end of thinking, once its budget is spent."""
        budget = self._params.thinking_token_budget
        if budget is None or not self._thinks or self._num_thought < budget:
            return None
        assert self._rules.thinking is not None
        return self._rules.thinking[1]

    def _count(self, tally: TokenTally, token_ids: Sequence[int]) -> None:
        if self._num_seen == 0 and self._params.repetition_penalty != 1.0:
            for token_id in dict.fromkeys(token_ids[: self._num_prompt_tokens]):
                tally.add(token_id, 0)
        first = max(self._num_seen, self._num_prompt_tokens)
        for index in range(first, len(token_ids)):
            tally.add(token_ids[index], 1)

    def _follow_thought(self, thinking: tuple[int, int], token_ids: Sequence[int]) -> None:
        start, end = thinking
        for index in range(self._num_seen, len(token_ids)):
            token_id = token_ids[index]
            if token_id == end:
                self._thinks = False
            elif self._thinks:  # a second <think> in a thought is a thought like any other
                self._num_thought += index >= self._num_prompt_tokens
            else:
                self._thinks = token_id == start


class ProcessedRow(Protocol):
    """What of a row is looked at here."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def tally(self) -> TokenTally | None: ...

    @property
    def banned(self) -> tuple[int, ...]: ...

    @property
    def mask(self) -> bytes | None: ...

    @property
    def forced(self) -> int | None: ...


def process(
    logits: Tensor,  # [R, vocab] float32, changed
    rows: Sequence[ProcessedRow],  # [R]
    penalize: Penalize = draws.penalize,
) -> list[int]:
    """Apply each row's options to its logits; returns which rows were changed."""
    changed = [i for i, row in enumerate(rows) if asks(row)]
    if changed:
        with_tally = [(i, rows[i]) for i in changed if rows[i].tally is not None]
        _penalize(logits, with_tally, penalize)
        _add_bias(logits, [(i, rows[i]) for i in changed if rows[i].params.logit_bias])
        _allow(logits, [(i, ids) for i in changed if (ids := rows[i].params.allowed_token_ids)])
        apply_masks(logits, {i: mask for i in changed if (mask := rows[i].mask) is not None})
        _ban(logits, [(i, rows[i].banned) for i in changed if rows[i].banned])
        _force(logits, [(i, token) for i in changed if (token := rows[i].forced) is not None])
    return changed


def asks(row: ProcessedRow) -> bool:
    """Whether any option changes the row's logits."""
    params = row.params
    return bool(
        row.banned
        or row.mask is not None
        or row.tally is not None
        or params.logit_bias
        or params.allowed_token_ids
        or row.forced is not None
    )


def _penalize(logits: Tensor, rows: list[tuple[int, ProcessedRow]], penalize: Penalize) -> None:
    tallies = [(i, row.params, row.tally) for i, row in rows if row.tally is not None]
    tallies = [(i, params, tally) for i, params, tally in tallies if len(tally.ids)]
    if not tallies:
        return
    lengths = [len(tally.ids) for _, _, tally in tallies]

    def each(values: list[float]) -> Tensor:
        return _tensor(np.repeat(np.array(values, dtype=np.float32), lengths), logits)

    rows_of, ids_of = _places(logits, [(i, tally.ids) for i, _, tally in tallies])
    counts = _tensor(np.concatenate([tally.counts for _, _, tally in tallies]), logits)
    tiny = torch.finfo(logits.dtype).tiny
    terms = torch.stack(
        (
            counts,
            each([max(params.repetition_penalty, tiny) for _, params, _ in tallies]),
            each([params.frequency_penalty for _, params, _ in tallies]),
            each([params.presence_penalty for _, params, _ in tallies]),
        )
    )
    penalize(logits, rows_of * logits.shape[1] + ids_of, terms)


def _add_bias(logits: Tensor, rows: list[tuple[int, ProcessedRow]]) -> None:
    if rows:
        ids = [(i, np.array([v for v, _ in row.params.logit_bias])) for i, row in rows]
        bias = np.array([bias for _, row in rows for _, bias in row.params.logit_bias], np.float32)
        logits[_places(logits, ids)] += _tensor(bias, logits)


def _allow(logits: Tensor, rows: list[tuple[int, tuple[int, ...]]]) -> None:
    if rows:
        places = _places(logits, [(i, np.array(ids)) for i, ids in rows])
        values = logits[places]
        _blank(logits, [i for i, _ in rows])
        logits[places] = values


def _ban(logits: Tensor, rows: list[tuple[int, tuple[int, ...]]]) -> None:
    if rows:
        logits[_places(logits, [(i, np.array(ids)) for i, ids in rows])] = -torch.inf


def _force(logits: Tensor, rows: list[tuple[int, int]]) -> None:
    if rows:
        _blank(logits, [i for i, _ in rows])
        logits[_places(logits, [(i, np.array([token])) for i, token in rows])] = 0.0


def _blank(logits: Tensor, rows: list[int]) -> None:
    logits.index_fill_(0, _tensor(np.array(rows), logits), -torch.inf)


def _places(
    logits: Tensor, ids_by_row: Sequence[tuple[int, NDArray[np.int64]]]
) -> tuple[Tensor, Tensor]:
    """Indices of (row, id) pairs; an id stands once in a row, so that writes never collide."""
    rows = np.repeat([i for i, _ in ids_by_row], [len(ids) for _, ids in ids_by_row])
    return _tensor(rows, logits), _tensor(np.concatenate([ids for _, ids in ids_by_row]), logits)


def _tensor(array: NDArray[np.generic], like: Tensor) -> Tensor:
    return sent(torch.from_numpy(array), like.device)
