"""Which tokens are computed in the next step.

The one rule: a sequence has tokens known (prompt and generated) and tokens computed, and a step
hands out a budget of tokens until computed catches up with known. Chunked prefill, decode, a hit in
the prefix cache, recompute after preemption and resuming from a checkpoint are the same thing, and
nothing here asks which of them it is looking at.

Knows nothing of text, models or memory; imports no torch, reads no clock, draws no random number.
Sources: Yu et al. 2022 (Orca), iteration-level scheduling; Agrawal et al. 2024 (Sarathi-Serve),
chunked prefill beside decodes; Kwon et al. 2023 (PagedAttention), preemption by recompute.
"""

from bisect import insort
from collections import abc

from engine.beam_groups import BeamGroup, stalled_sequences
from engine.beam_search import BeamSearch, Candidates
from engine.block_manager import BlockManager
from engine.capacity import check_capacity
from engine.deadlines import Deadlines
from engine.drafts import with_drafts
from engine.sampling_params import MAX_N, ParameterError, SamplingParams
from engine.seats import Seats
from engine.sequence import COMPLETE, FinishReason, Sequence, SequenceState, rank
from engine.step_budget import MAX_PASSED, StepBudget
from engine.step_plan import ScheduledSequence, StepPlan
from engine.token_rules import NO_RULES, TokenRules


class Scheduler:
    """Owns every unfinished sequence, from `add` to its finish reason.

    Progress: while anything is unfinished, each step computes at least one token of the running
    sequence that ranks first, and only a higher priority can ever take its blocks away.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_scored_tokens: int = 2**31,  # whose logits a step holds beside those it draws from
        eos_token_ids: frozenset[int] = frozenset(),
        enable_prefix_caching: bool = True,
        model_id: bytes = b"",
    ) -> None:
        assert min(max_num_seqs, max_num_batched_tokens, max_model_len) >= 1
        self._blocks = BlockManager(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            model_id=model_id,
        )
        self._budget = StepBudget(max_num_batched_tokens, max_num_scored_tokens)
        self._seats = Seats(self._blocks, self._budget, max_num_seqs)
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._requests: dict[str, list[Sequence]] = {}  # unfinished sequences
        self._running = self._seats.running
        self._waiting: list[Sequence] = []  # by rank
        self._held: dict[str, list[Sequence]] = {}  # samples that wait for sample 0's prompt
        self._beams: dict[str, BeamGroup] = {}
        self._deadlines = Deadlines()
        self.untold: list[Sequence] = []  # by us, not yet told of by `update`
        self._num_arrivals = 0
        self._num_blocks_wanted = 0  # at most, by all unfinished sequences, if nothing were shared
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + sum(map(len, self._held.values()))

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free_blocks

    @property
    def unfinished(self) -> bool:
        """Whether there is anything left to schedule, or an end that `update` has yet to tell."""
        return bool(self._requests or self.untold)

    @property
    def promised_tokens(self) -> int:
        """KV tokens that unfinished sequences may take beyond the blocks they hold.

        An upper bound: every token allowed is generated, and nothing more is shared.
        """
        held = self._blocks.num_blocks_kept(self._running)
        return (self._num_blocks_wanted - held) * self._blocks.block_size

    def add(
        self,
        request_id: str,
        prompt_ids: abc.Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        priority: int = 0,
        deadline: float | None = None,
        generated: abc.Sequence[abc.Sequence[int]] = (),
        cache_salt: bytes = b"",
        token_rules: TokenRules = NO_RULES,
    ) -> list[Sequence]:
        """Take in a request: one sequence for each of its `n` samples, which wait to be scheduled.

        `generated` holds the tokens each sample has from an earlier attempt; a sample that these
        complete is finished at once. Raises ParameterError, and CapacityError when the request can
        never fit; then nothing has changed.
        """
        self.check_request(request_id, len(prompt_ids), params, generated)
        arrival = self._num_arrivals
        self._num_arrivals += 1
        sequences = [
            Sequence(
                seq_id=arrival * MAX_N + index,
                request_id=request_id,
                sample_index=index,
                token_ids=[*prompt_ids, *(generated[index] if index < len(generated) else ())],
                num_prompt_tokens=len(prompt_ids),
                params=params,
                seed=(seed + index) % 2**64,
                priority=priority,
                arrival=arrival,
                cache_salt=cache_salt,
                token_rules=token_rules,
            )
            for index in range(params.num_seqs)
        ]
        if deadline is not None:
            self._deadlines.add(request_id, deadline, arrival)
        self._enter(request_id, sequences)
        return sequences

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step. Its result must be taken in, or assumed, before the next call."""
        self._expire(now)
        first_without_room = self._admit_waiting()
        for sequence in stalled_sequences(self._beams, self._running, first_without_room):
            self._preempt(sequence)
        if not self._running:
            self._admit_waiting()
        scheduled: list[ScheduledSequence] = []
        copies: list[tuple[int, int]] = []
        budget, num_complete = self._budget.num_tokens, 0
        to_score = self._budget.num_scored
        asked_behind = sum(map(self._budget.asked, self._running))
        while len(scheduled) + num_complete < len(self._running):
            sequence = self._running[len(scheduled) + num_complete]
            asked_behind -= self._budget.asked(sequence)
            if sequence.is_complete:
                num_complete += 1
                continue
            num_behind = len(self._running) - len(scheduled) - num_complete - 1
            num_tokens = self._budget.share(sequence, budget, num_behind, asked_behind)
            num_tokens = min(num_tokens, sequence.num_tokens_to_score(to_score))
            assert num_tokens > 0, f"{sequence} has nothing to compute: its last row gave no token"
            to_copy = self._blocks.prepare(sequence, num_tokens)
            if to_copy is None:
                asked_behind += self._budget.asked(sequence)
                asked_behind -= self._budget.asked(self._running[-1])
                self._preempt(self._running[-1])  # perhaps itself
                continue
            copies += to_copy
            scheduled.append(ScheduledSequence(sequence, num_tokens))
            budget -= num_tokens
            to_score = max(0, to_score - len(scheduled[-1].scored))
        return StepPlan(tuple(scheduled), tuple(copies))

    def with_drafts(self, plan: StepPlan, drafts: abc.Sequence[tuple[int, ...]]) -> StepPlan:
        """The plan with `drafts[i]` behind row i, or what of them there is room for."""
        num_tokens, num_growing = self._budget.num_tokens, len(self._running)
        return with_drafts(plan, drafts, self._blocks, num_tokens, num_growing)

    def update(
        self, plan: StepPlan, sampled: abc.Sequence[int | list[int] | Candidates | None], now: float
    ) -> list[Sequence]:
        """Take in a step's result: `sampled[i]` is row i's next token, None where it has none.

        A beam's row has candidates in its place, one with drafts all that were drawn.

        Returns every sequence that got a token or was ended here since the last update. Rows whose
        sequence was finished or aborted since the plan was made are passed over. A row that should
        have sampled and has None must be finished before the next `schedule`.
        """
        changed: list[Sequence] = []
        for row, token_id in zip(plan.scheduled, sampled, strict=True):
            sequence = row.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue
            assert token_id is None or row.samples, f"{sequence} got a token it did not ask for"
            if isinstance(token_id, tuple):
                group = self._beams[sequence.request_id]
                group.offers[sequence] = (row.num_scheduled_tokens, token_id)
                continue
            num_confirmed = 0
            if token_id is not None:
                drawn = token_id if isinstance(token_id, list) else [token_id]
                num_confirmed = sequence.take_in(drawn, self._eos_token_ids) - 1
                changed.append(sequence)
            self._blocks.mark_computed(sequence, row.num_scheduled_tokens + num_confirmed)
            if sequence.num_computed_tokens >= sequence.num_prompt_tokens:
                self._release_held(sequence)
            sequence.mark_scored()
            if token_id is not None or (sequence.ending and not sequence.num_uncomputed_tokens):
                self._end_if_complete(sequence)
        for request_id, group in list(self._beams.items()):
            if group.advance(self._blocks, self._seats, self._waiting):
                self.untold += self._end_request(request_id, FinishReason.STOP)
        self._expire(now)
        changed += self.untold
        self.untold.clear()
        return list(dict.fromkeys(changed))

    def finish(self, sequence: Sequence, reason: FinishReason, *, error: str | None = None) -> None:
        """End a sequence for a reason seen from above, and free its blocks at once.

        On one that has just ended here, the reason from above takes the place of ours: a stop
        string completed by the last token allowed is a stop. With ERROR, nothing the sequence has
        computed can be found in the prefix cache any more; call it before `update` sees the row.
        A sequence that is complete but has tokens without their log-probability ends after them.
        """
        if sequence.num_unscored_tokens and reason in COMPLETE:
            sequence.ending = reason
            return
        if sequence.request_id in self._beams:
            for place in self._end_request(sequence.request_id, reason):
                place.error = error
        elif sequence.state is not SequenceState.FINISHED:
            self._end(sequence, reason)
        sequence.finish_reason = reason
        sequence.error = error

    def abort(self, request_id: str) -> list[Sequence]:
        """End what is left of a request and free its blocks at once. Returns what was ended."""
        return self._end_request(request_id, FinishReason.ABORT)

    def check(self) -> None:
        """Assert that the books balance: every sequence in one place, every block accounted for."""
        held = [sequence for children in self._held.values() for sequence in children]
        unfinished = [sequence for group in self._requests.values() for sequence in group]
        self._seats.check(self._waiting, held, unfinished)
        assert self._num_blocks_wanted == sum(map(self._seats.num_blocks_at_most, unfinished))
        self._blocks.check(self._running)

    def check_request(
        self,
        request_id: str,
        num_prompt_tokens: int,
        params: SamplingParams,
        generated: abc.Sequence[abc.Sequence[int]],
    ) -> None:
        """Raises what `add` would, which may be called later."""
        if request_id in self._requests:
            raise ParameterError("request_id", f"request {request_id!r} is already here")
        counts = [len(token_ids) for token_ids in generated]
        most = 0 if params.num_beams > 1 else params.max_tokens  # a search begins at the prompt
        if len(counts) not in (0, params.n) or max(counts, default=0) > most:
            raise ParameterError(
                "generated",
                f"generated must have {params.n} samples of at most {most} tokens, got {counts}",
            )
        check_capacity(
            num_prompt_tokens,
            params,
            max_model_len=self._max_model_len,
            max_num_seqs=self._seats.max_num_seqs,
            num_blocks=self._blocks.num_blocks,
            block_size=self._blocks.block_size,
        )

    def _enter(self, request_id: str, sequences: list[Sequence]) -> None:
        self._requests[request_id] = list(sequences)
        self._num_blocks_wanted += sum(map(self._seats.num_blocks_at_most, sequences))
        leader, *children = sequences
        insort(self._waiting, leader, key=rank)
        if children:
            self._held[request_id] = children
        if leader.params.num_beams > 1:
            search = BeamSearch(leader.params, leader.params.stop_ids(self._eos_token_ids))
            self._beams[request_id] = BeamGroup(search, {search.live[0]: leader}, children)
        for sequence in sequences:
            if sequence.num_generated_tokens or not sequence.params.max_tokens:
                self._end_if_complete(sequence)

    def _expire(self, now: float) -> None:
        while (request_id := self._deadlines.pop(now)) is not None:
            self.untold += self._end_request(request_id, FinishReason.DEADLINE)

    def _admit_waiting(self) -> Sequence | None:
        """Let waiting sequences run, in rank order, up to the one returned that lacks room.

        In order as far as seats and blocks go: were a small prompt to pass a large one that does
        not fit yet, a stream of small ones could keep the large one waiting for ever. A long prompt
        that only waits until steps have tokens for it is passed by short ones, which leave the
        blocks that it will need.
        """
        num_passed = num_blocks_passed = 0
        while num_passed < min(len(self._waiting), MAX_PASSED):
            sequence = self._waiting[num_passed]
            if (
                self._budget.demand(self._seats.ahead(sequence), sequence)
                >= self._budget.num_tokens
            ):
                num_passed += 1
                num_blocks_passed += self._blocks.num_blocks_for(sequence.num_tokens)
                continue
            if not self._make_room(sequence, num_blocks_passed):
                return sequence
            del self._waiting[num_passed]
            self._blocks.admit(sequence)
            self._seats.take(sequence)
            if sequence.num_preemptions == 0:
                sequence.num_cached_tokens = min(
                    sequence.num_computed_tokens, sequence.num_prompt_tokens
                )
        return None

    def _make_room(self, sequence: Sequence, num_blocks_passed: int) -> bool:
        """Whether a sequence can run now; preempts what has less priority if that is what it takes.

        The fewest that make room are preempted, and none if even all of them would not.
        """
        victims = self._seats.victims(sequence, num_blocks_passed)
        for victim in victims or ():
            self._preempt(victim)
        return victims is not None

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks: what it knows stays, what it has computed is computed again."""
        self._running.remove(sequence)
        self._blocks.free(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=rank)

    def _release_held(self, leader: Sequence) -> None:
        """Let the other samples go once sample 0 has computed their prompt, or has ended.

        They fork it while there is a seat and a block to copy to for each who runs; the others, and
        those that already know tokens of their own, wait as all do and find the prompt in the
        prefix cache.
        """
        if leader.request_id in self._beams:
            return
        for child in self._held.pop(leader.request_id, ()):
            computed = leader.num_computed_tokens >= leader.num_prompt_tokens == child.num_tokens
            if not (computed and self._seats.may_fork()):
                insort(self._waiting, child, key=rank)
                continue
            self._blocks.fork(leader, child)
            child.num_cached_tokens = child.num_computed_tokens
            self._seats.take(child)

    def _end_if_complete(self, sequence: Sequence) -> None:
        reason = sequence.reason_to_end(self._eos_token_ids)
        if reason is not None:
            self.finish(sequence, reason)
            self.untold += [sequence] if sequence.finish_reason is not None else []

    def _end_request(self, request_id: str, reason: FinishReason) -> list[Sequence]:
        group = list(self._requests.get(request_id, ()))
        for sequence in reversed(group):  # sample 0 last: its end lets the others go
            self._end(sequence, reason)
        if request_id in self._beams:
            del self._held[request_id]
            self._beams.pop(request_id).settle(group, reason)
        return group

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        group = self._requests[sequence.request_id]
        group.remove(sequence)
        if not group:
            del self._requests[sequence.request_id]
            self._deadlines.drop(sequence.request_id)
        self._num_blocks_wanted -= self._seats.num_blocks_at_most(sequence)
        held = self._held.get(sequence.request_id, [])
        if sequence in held:
            held.remove(sequence)
        else:
            self._release_held(sequence)
            if sequence.state is SequenceState.RUNNING:
                self._running.remove(sequence)
                self._blocks.free(sequence, forget=reason is FinishReason.ERROR)
            else:
                self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
