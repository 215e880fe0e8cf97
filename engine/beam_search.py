"""Beam search: which beams live on with which tokens, and which texts are found.

The books of one request, after each step: candidates of every live beam in, the next live beams
out. Knows nothing of blocks, batches or where a beam's tokens lie; imports no torch.

A lone group follows transformers 5 (`GenerationMixin._beam_search`): sums of log-probabilities as
the request's options leave them, rounded to float32 as there; a pool of the best ended beams by
sum / length ** length_penalty; `early_stopping` says when the pool is final. Several groups follow
Vijayakumar et al. 2016 (Diverse Beam Search) as transformers 4 had it: groups take their turns, and
a token that beams of earlier groups have just got costs a later group `diversity_penalty` each. A
beam that the options leave no token is not made up for by one of no probability, as it is there.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from struct import pack, unpack

from engine.sampling_params import SamplingParams

# (id, log-probability), falling: as many as a search may have to look at
Candidates = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A text as its last token and the beam it goes on from."""

    score: float  # float32: log-probability of the tokens generated
    token_id: int = -1
    parent: "Beam | None" = None  # None: the prompt

    @property
    def generated_ids(self) -> list[int]:
        token_ids = []
        beam = self
        while beam.parent is not None:
            token_ids.append(beam.token_id)
            beam = beam.parent
        return token_ids[::-1]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam that has ended, or was cut off."""

    beam: Beam
    score: float  # with the length penalty
    stopped: bool  # by an id that ends it


def num_candidates(params: SamplingParams, num_stop_ids: int) -> int:
    """How many of a beam's likeliest tokens a search may have to look at; 0 without beams.

    Of those kept in a group, each beam may meet every id that ends it. Tokens that earlier groups
    have made dearer may drop out, as many as those have beams.
    """
    if params.num_beams == 1:
        return 0
    size = params.num_beams // params.num_beam_groups
    return _num_kept(size, num_stop_ids) + params.num_beams - size


def _num_kept(size: int, num_stop_ids: int) -> int:
    return max(2, 1 + num_stop_ids) * size


class BeamSearch:
    """One request's search, from the prompt to its texts."""

    def __init__(self, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        self._diversity_penalty = params.diversity_penalty
        root = Beam(0.0)
        self._groups = [_Group(params, stop_ids, root) for _ in range(params.num_beam_groups)]

    @property
    def live(self) -> list[Beam]:
        """Beams that need candidates to go on, each once."""
        return list(dict.fromkeys(beam for group in self._groups for beam in group.live))

    def advance(self, candidates: Mapping[Beam, Candidates]) -> None:
        """Take in the candidates of every live beam; then other beams are live, or none."""
        num_taken: Counter[int] = Counter()
        for group in self._groups:
            num_taken.update(group.advance(candidates, num_taken, self._diversity_penalty))

    def best(self, *, cut: bool = False) -> list[Hypothesis]:
        """Texts of all groups, best first; with `cut`, those of live beams as they are too."""
        found = [each for group in self._groups for each in group.found(cut=cut)]
        return sorted(found, key=lambda each: -each.score)


class _Group:
    def __init__(self, params: SamplingParams, stop_ids: frozenset[int], root: Beam) -> None:
        self.live = [root]
        self._pool: list[Hypothesis] = []  # best first, as many as the group has beams
        self._length = 0  # tokens generated in each live beam
        self._stop_ids = stop_ids
        self._size = params.num_beams // params.num_beam_groups
        self._is_one_of_many = params.num_beam_groups > 1
        self._max_tokens = params.max_tokens
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping

    def advance(
        self,
        candidates: Mapping[Beam, Candidates],
        num_taken: Mapping[int, int],
        diversity_penalty: float,
    ) -> Sequence[int]:
        """One step of the group; returns the tokens it went on with."""
        if not self.live:
            return ()
        children = [
            Beam(_float32(_penalized(logprob, taken) + beam.score), token_id, beam)
            for beam in self.live
            for token_id, logprob in candidates[beam]
            for taken in (diversity_penalty * num_taken.get(token_id, 0),)
        ]
        children.sort(key=lambda child: -child.score)
        children = children[: _num_kept(self._size, len(self._stop_ids))]
        self._length += 1
        # only the top ones may end: those behind are there to have enough that go on
        self._keep(child for child in children[: self._size] if child.token_id in self._stop_ids)
        going = [child for child in children if child.token_id not in self._stop_ids][: self._size]
        hopes = children if self._is_one_of_many else going  # transformers 4 hoped for ended ones
        is_final = self._is_final(hopes[0].score if hopes else -inf)
        is_full = self._length >= self._max_tokens
        if is_full and not (is_final and self._is_one_of_many):
            self._keep(going)
        self.live = [] if is_full or is_final else going
        return [child.token_id for child in going]

    def found(self, *, cut: bool) -> list[Hypothesis]:
        if not cut or not self._length:
            return self._pool
        return self._pool + [self._hypothesis(beam) for beam in self.live]

    def _keep(self, ended: Iterable[Beam]) -> None:
        self._pool += [self._hypothesis(beam) for beam in ended]
        self._pool.sort(key=lambda each: -each.score)
        del self._pool[self._size :]

    def _hypothesis(self, beam: Beam) -> Hypothesis:
        score = self._scored(beam.score, self._length)
        return Hypothesis(beam, score, stopped=beam.token_id in self._stop_ids)

    def _is_final(self, best_sum: float) -> bool:
        """No live beam will come into the pool, as far as `early_stopping` cares to know."""
        if len(self._pool) < self._size:
            return False
        if self._early_stopping is True:
            return True
        length = self._length
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            length = self._max_tokens
        return self._scored(best_sum, length) <= self._pool[-1].score

    def _scored(self, log_probability: float, length: int) -> float:
        return _float32(log_probability / _float32(length**self._length_penalty))


def _penalized(logprob: float, penalty: float) -> float:
    return _float32(logprob - penalty) if penalty else logprob


def _float32(number: float) -> float:
    """The nearest float32. A sum or quotient of two of them is rounded as float32 arithmetic does,
    for a double has more than twice their bits."""
    rounded: float = unpack("f", pack("f", number))[0]
    return rounded
