"""Beams as sequences: where each lies, and how a step's decision becomes forks.

A request with beams has a place, a Sequence, for each of them; those without a beam hold nothing.
The prompt is computed in the first place. From then on all beams advance in lockstep: a decision is
made in a step in which every one of them got its candidates. In any other step (one of them is
being recomputed, or waits for blocks) the rest compute their last token once more, so that
nothing has to be kept of them and any may be preempted at any time.

Source: Kwon et al. 2023 (PagedAttention), section 4.4: beams share blocks until one writes.
"""

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.beam_search import Beam, BeamSearch, Candidates, Hypothesis
from engine.block_manager import BlockManager
from engine.seats import Seats
from engine.sequence import FinishReason, Sequence, SequenceState, rank


@dataclass(slots=True)
class BeamGroup:
    """The beams of one request."""

    search: BeamSearch
    places: dict[Beam, Sequence]  # of each live beam
    spare: list[Sequence]  # the scheduler's list of the request's places that hold nothing
    # this step's, by live place: tokens computed, and candidates for the next
    offers: dict[Sequence, tuple[int, Candidates]] = field(default_factory=dict)

    @property
    def is_stalled(self) -> bool:
        """Some of its beams run, and wait for others that do not."""
        states = {sequence.state for sequence in self.places.values()}
        return len(states) > 1

    def advance(self, blocks: BlockManager, seats: Seats, waiting: list[Sequence]) -> bool:
        """Decide on what the step has given; returns whether the search is over.

        Where a beam lacks candidates nothing is decided, and the last token of the others counts as
        not computed. `waiting` is ordered by rank; a child without a seat goes there.
        """
        offers, self.offers = self.offers, {}
        complete = len(offers) == len(self.places)
        for sequence, (num_computed, _) in offers.items():
            blocks.mark_computed(sequence, num_computed if complete else num_computed - 1)
        if not complete:
            return False
        self.search.advance({beam: offers[place][1] for beam, place in self.places.items()})
        if not self.search.live:
            return True
        self._refork(blocks, seats, waiting)
        return False

    def settle(self, places: list[Sequence], reason: FinishReason) -> None:
        """Give the ended places their texts, best first. The reason STOP is that of the search.

        A search that was cut short gives what it has found and its live beams as they are.
        """
        stopped = reason is FinishReason.STOP
        num_wanted = places[0].params.n
        found: list[Hypothesis] = []
        if reason is not FinishReason.ERROR:
            found = self.search.best(cut=not stopped)[:num_wanted]
        for place in places:
            del place.token_ids[place.num_prompt_tokens :]
        for place, hypothesis in zip(places, found, strict=False):
            place.token_ids += hypothesis.beam.generated_ids
            if stopped and not hypothesis.stopped:
                place.finish_reason = FinishReason.LENGTH
        if stopped:
            for place in places[len(found) : num_wanted]:
                place.finish_reason = FinishReason.ERROR
                place.error = (
                    f"invalid_request: the options allow {len(found)} different outputs, "
                    f"n is {num_wanted}"
                )

    def _refork(self, blocks: BlockManager, seats: Seats, waiting: list[Sequence]) -> None:
        """A parent's first child takes its place; the others fork it into places that are free."""
        before, children = self.places, self.search.live
        heirs = {beam.parent: beam for beam in reversed(children)}
        vacated = [place for beam, place in before.items() if beam not in heirs]
        for place in vacated:
            blocks.free(place)
        self.places = {}
        for child in children:
            parent = before[_parent(child)]
            if heirs[child.parent] is child:
                self.places[child] = parent
                continue
            place = vacated.pop(0) if vacated else self.spare.pop(0)
            place.token_ids = [*parent.token_ids, child.token_id]
            place.block_keys = list(parent.block_keys)
            self.places[child] = place
            if place.state is not SequenceState.RUNNING:
                if not seats.may_fork():  # it waits as all do, and is computed from its tokens
                    insort(waiting, place, key=rank)
                    continue
                seats.take(place)
            blocks.fork(parent, place)
        for child in heirs.values():
            self.places[child].token_ids.append(child.token_id)
        for place in vacated:
            seats.running.remove(place)
            place.state = SequenceState.WAITING
            self.spare.append(place)


def stalled_sequences(
    groups: Mapping[str, BeamGroup],
    running: list[Sequence],
    first_without_room: Sequence | None,  # of those that wait: the ones behind it wait for it
) -> list[Sequence]:
    """Running beams that should make room, for their groups are stalled.

    Two stalled groups could hold each other's blocks for ever. The one that ranks first keeps what
    it has while anything else runs, which goes on and ends. Where nothing else does, it makes room
    too if its other beams wait behind somebody who waits for its blocks.
    """
    stalled = [group for group in groups.values() if group.is_stalled]
    if not stalled:
        return []
    stalled.sort(key=lambda group: min(map(rank, group.places.values())))
    beams = [
        [
            sequence
            for sequence in sorted(group.places.values(), key=rank, reverse=True)
            if sequence.state is SequenceState.RUNNING
        ]
        for group in stalled
    ]
    waits_for_itself = (
        first_without_room is not None
        and len(running) == sum(map(len, beams))
        and rank(first_without_room) < min(map(rank, stalled[0].places.values()))
    )
    num_kept = 0 if waits_for_itself else 1
    return [sequence for group in beams[num_kept:] for sequence in group]


def _parent(beam: Beam) -> Beam:
    assert beam.parent is not None
    return beam.parent
