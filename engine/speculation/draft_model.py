"""Drafts that another, smaller model of the same vocabulary draws.

It draws with the sequence's own noise, under its options and its form: where both models think
alike they draw the same, and where they do not the step's own draw stands. So drafts are confirmed
as a coupling of the two distributions would have it, and no text changes.

It has KV blocks of its own, with books and a prefix cache of their own, and a shadow of each
sequence: as far as it got with the same tokens. So a preempted sequence finds its drafts' keys
where it left them, and what the scheduler does with the model's blocks is of no concern here.
Sources: Leviathan et al. 2023 (draft models); Daliri et al. 2024 (drafts drawn with shared noise).
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from engine.block_manager import BlockManager
from engine.model_runner import Runner
from engine.sequence import Sequence as Generation
from engine.sequence import SequenceState
from engine.step_plan import ScheduledSequence, StepPlan


@dataclasses.dataclass(slots=True, eq=False)
class Shadow:
    """A sequence as the draft model has it."""

    copy: Generation  # the known tokens, and behind them what was guessed last
    num_known: int  # tokens that are the generation's own
    num_marked: int  # of them, computed and told the block manager


class DraftModelProposer:
    """Owns the shadows and the blocks they hold. `runner` draws as the engine's own does."""

    def __init__(
        self,
        runner: Runner,
        block_size: int,
        *,
        max_num_tokens: int,  # in one of its steps
        enable_prefix_caching: bool = True,
    ) -> None:
        self._runner = runner
        self._max_num_tokens = max_num_tokens
        self._blocks = BlockManager(
            runner.num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            model_id=runner.model_id,
        )
        self._shadows: dict[Generation, Shadow] = {}  # the one used longest ago first

    def propose(
        self, plan: StepPlan, counts: Sequence[int], pays: Callable[[int], bool]
    ) -> list[tuple[int, ...]]:
        """As many steps of the draft model as the longest drafts have tokens.

        A sequence that it has not caught up with gets none: what it lacks is computed first, as
        much as a step may have. Nor does one that finds no blocks.
        """
        for sequence in [s for s in self._shadows if s.state is SequenceState.FINISHED]:
            self._drop(sequence)
        most = self._runner.max_model_len
        wanted = {
            row.sequence: count
            for row, count in zip(plan.scheduled, counts, strict=True)
            if count and row.sequence.num_tokens + count <= most
        }
        drafts: dict[Generation, tuple[int, ...]] = {}
        if pays(sum(wanted.values())):
            try:
                drafts = self._drafts(wanted)
            except torch.OutOfMemoryError:
                # nobody knows how far the step came: nothing of it is trusted
                for sequence in list(self._shadows):
                    self._drop(sequence, forget=True)
        return [drafts.get(row.sequence, ()) for row in plan.scheduled]

    def check(self) -> None:
        """Assert that the books balance."""
        self._blocks.check([shadow.copy for shadow in self._shadows.values()])
        for sequence, shadow in self._shadows.items():
            own, known = shadow.copy.token_ids, shadow.num_known
            assert own[:known] == sequence.token_ids[:known], f"{sequence} has changed"
            assert shadow.num_marked <= known

    def _drafts(self, wanted: Mapping[Generation, int]) -> dict[Generation, tuple[int, ...]]:
        guessing = self._caught_up(wanted)
        for depth in range(1, max(wanted.values())):
            rows, copies = [], []
            for sequence in guessing:
                copy = self._shadows[sequence].copy
                if depth == wanted[sequence] or copy.reason_to_end(self._runner.eos_token_ids):
                    continue
                to_copy = self._prepare(copy, 1, wanted)
                if to_copy is not None:
                    rows.append(ScheduledSequence(copy, 1))
                    copies += to_copy
            # not told the block manager: a wrong guess is written over
            drew = self._run(rows, copies)
            for row in rows:
                row.sequence.num_computed_tokens += 1
            guessing = [sequence for sequence in guessing if self._shadows[sequence].copy in drew]
        drafts = {}
        for sequence in wanted:
            shadow = self._shadows.get(sequence)
            if shadow is not None:
                drafts[sequence] = tuple(shadow.copy.token_ids[shadow.num_known :])
                if shadow.copy.error is not None:
                    self._drop(sequence, forget=True)
        return drafts

    def _caught_up(self, wanted: Mapping[Generation, int]) -> list[Generation]:
        """Compute what shadows lack, in one step; returns the sequences that have a first draft."""
        rows, copies, left = [], [], self._max_num_tokens
        for sequence in wanted:
            shadow = self._shadow(sequence, wanted)
            if shadow is None or not left:
                continue
            num_tokens = min(left, shadow.copy.num_uncomputed_tokens)
            to_copy = self._prepare(shadow.copy, num_tokens, wanted)
            if to_copy is not None:
                rows.append(ScheduledSequence(shadow.copy, num_tokens))
                copies += to_copy
                left -= num_tokens
        counts = {row.sequence: row.num_scheduled_tokens for row in rows}
        drew = self._run(rows, copies)
        for sequence in wanted:
            shadow = self._shadows.get(sequence)
            if shadow is not None and shadow.copy in counts:
                self._blocks.mark_computed(shadow.copy, counts[shadow.copy])
                shadow.num_marked = shadow.copy.num_computed_tokens
        return [s for s in wanted if s in self._shadows and self._shadows[s].copy in drew]

    def _run(self, rows: list[ScheduledSequence], copies: list[tuple[int, int]]) -> set[Generation]:
        """A step of the draft model: appends what it draws, and returns the copies that drew."""
        if not rows:
            assert not copies
            return set()
        plan = StepPlan(tuple(rows), tuple(copies))
        drew = set()
        for row, token in zip(rows, self._runner.run(plan).tokens, strict=True):
            if isinstance(token, int):
                row.sequence.token_ids.append(token)
                drew.add(row.sequence)
            elif token is not None:
                row.sequence.error = str(token)
        return drew

    def _shadow(self, sequence: Generation, wanted: Collection[Generation]) -> Shadow | None:
        """The sequence's shadow with its known tokens; None where there are no blocks for one."""
        shadow = self._shadows.pop(sequence, None)
        if shadow is None:
            copy = _copied(sequence)
            while not self._blocks.fits(copy):
                if not self._drop_idle(wanted):
                    return None
            self._blocks.admit(copy)
            shadow = Shadow(copy, sequence.num_tokens, copy.num_computed_tokens)
        else:
            self._catch_up(shadow, sequence)
        self._shadows[sequence] = shadow
        return shadow

    def _catch_up(self, shadow: Shadow, sequence: Generation) -> None:
        """Take in the known tokens. What was guessed right stays computed; the last never does."""
        copy, known = shadow.copy, sequence.token_ids
        same = shadow.num_known
        assert len(known) >= same, f"{sequence} has lost tokens"
        while same < min(len(known), copy.num_tokens) and known[same] == copy.token_ids[same]:
            same += 1
        num_computed = min(same, copy.num_computed_tokens, len(known) - 1)
        copy.token_ids[same:] = known[same:]
        copy.num_computed_tokens = min(shadow.num_marked, num_computed)
        self._blocks.mark_computed(copy, num_computed - copy.num_computed_tokens)
        shadow.num_known, shadow.num_marked = len(known), num_computed

    def _prepare(
        self, copy: Generation, num_tokens: int, wanted: Collection[Generation]
    ) -> list[tuple[int, int]] | None:
        """As the block manager's, but that idle shadows give way."""
        while (to_copy := self._blocks.prepare(copy, num_tokens)) is None:
            if not self._drop_idle(wanted):
                return None
        return to_copy

    def _drop_idle(self, wanted: Collection[Generation]) -> bool:
        """Drop the shadow that was used longest ago; False where all are wanted now."""
        idle = next((sequence for sequence in self._shadows if sequence not in wanted), None)
        if idle is not None:
            self._drop(idle)
        return idle is not None

    def _drop(self, sequence: Generation, *, forget: bool = False) -> None:
        self._blocks.free(self._shadows.pop(sequence).copy, forget=forget)


def _copied(sequence: Generation) -> Generation:
    """A sequence of its own with the same tokens, whose draws are the same."""
    return Generation(
        seq_id=sequence.seq_id,
        request_id=sequence.request_id,
        sample_index=sequence.sample_index,
        token_ids=list(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        # nobody asks for its log-probabilities
        params=dataclasses.replace(sequence.params, logprobs=None, prompt_logprobs=None),
        seed=sequence.seed,
        token_rules=sequence.token_rules,
        token_filter=sequence.token_filter,
        cache_salt=sequence.cache_salt,
    )
