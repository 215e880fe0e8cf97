"""What the engine keeps of a request while it runs: its samples, their text, its times.

Knows nothing of steps or blocks; the Scheduler owns the sequences.
"""

from dataclasses import dataclass, field

from engine.detokenizer import Detokenizer
from engine.outputs import Completion, Delta, RequestOutput, RequestStats, TokenLogprobs
from engine.parameter_error import ParameterError
from engine.repetition import LoopDetector
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason, Sequence


def check_types(params: object, priority: object, cache_salt: object) -> None:
    """Of what a program hands over as it likes, and a step relies on. Raises ParameterError."""
    for name, value, kind in (
        ("params", params, SamplingParams),
        ("priority", priority, int),
        ("cache_salt", cache_salt, bytes),
    ):
        if type(value) is not kind:
            raise ParameterError(
                name, f"{name} must be of type {kind.__name__}, got {type(value).__name__}"
            )


@dataclass(slots=True, eq=False)
class Sample:
    """A sequence and the text of it."""

    sequence: Sequence
    detokenizer: Detokenizer
    loop_detector: LoopDetector | None = None
    stop_reason: str | int | None = None
    num_seen: int = 0  # generated tokens that text has been made of
    scores: list[TokenLogprobs] = field(default_factory=list)  # of tokens in order, as asked for

    def take_in_tokens(self) -> tuple[Delta, FinishReason | None]:
        """Turn the sequence's new tokens into text. Returns it, and what the text says of the end.

        That is STOP with a stop string in it, whatever ended the sequence before, or REPETITION.
        Tokens behind such an end, of which a step with drafts may give some, are taken back.
        """
        sequence, detokenizer, before = self.sequence, self.detokenizer, self.num_seen
        new_ids = sequence.token_ids[sequence.num_prompt_tokens + self.num_seen :]
        params = sequence.params
        ending = sequence.finish_reason or sequence.ending
        ended_by_id = ending is FinishReason.STOP and self.stop_reason is None
        mute_end = ended_by_id and not params.include_stop_str_in_output
        spoken = new_ids[:-1] if mute_end else new_ids
        pieces, looped = [""] * len(new_ids), False
        for place, token_id in enumerate(spoken):
            self.num_seen += 1
            may_stop = self.num_seen > params.min_tokens
            pieces[place] = detokenizer.add([token_id], may_stop=may_stop)
            if self.loop_detector is not None:
                looped = self.loop_detector.add(token_id) and may_stop
            if (looped or detokenizer.stopped_by is not None) and self.num_seen < len(
                new_ids
            ) + before:
                del sequence.token_ids[sequence.num_prompt_tokens + self.num_seen :]
                new_ids = spoken = new_ids[: self.num_seen - before]
                ending, ended_by_id = None, False
                break
        text = "".join(pieces)
        if ending is not None or looped:
            text += detokenizer.flush(may_stop=self.num_seen > params.min_tokens)
        self.num_seen += len(new_ids) - len(spoken)
        delta = Delta(
            sample_index=sequence.sample_index,
            token_ids=tuple(new_ids),
            text=text,
            pieces=tuple(pieces[: len(new_ids)]),
            logprobs=self._logprobs(before, before + len(new_ids)),
        )
        if detokenizer.stopped_by is not None:
            stops = ending in (None, FinishReason.LENGTH, FinishReason.STOP)
            if stops:
                self.stop_reason = detokenizer.stopped_by
            return delta, FinishReason.STOP if stops else None
        if ended_by_id and new_ids and new_ids[-1] in params.stop_token_ids:
            self.stop_reason = new_ids[-1]
        return delta, FinishReason.REPETITION if looped and ending is None else None

    def completion(self, *, has_timeout: bool) -> Completion:
        assert self.sequence.finish_reason is not None
        return Completion(
            index=self.sequence.sample_index,
            token_ids=tuple(self.sequence.generated_ids),
            text=self.detokenizer.text,
            finish_reason=self.sequence.finish_reason,
            stop_reason=self.stop_reason,
            error=self.sequence.error,
            logprobs=self._logprobs(),
            timed_out=has_timeout and self.sequence.finish_reason is FinishReason.DEADLINE,
        )

    @property
    def num_prompt_scores(self) -> int:
        """How many of the scores are, or would be, the prompt's: all but its first token's."""
        sequence = self.sequence
        asked = sequence.params.prompt_logprobs is not None and sequence.sample_index == 0
        return sequence.num_prompt_tokens - 1 if asked else 0

    def _logprobs(self, first: int = 0, end: int | None = None) -> tuple[TokenLogprobs, ...] | None:
        if self.sequence.params.logprobs is None:
            return None
        before = self.num_prompt_scores
        end = self.sequence.num_generated_tokens if end is None else end
        return tuple(self.scores[before + first : before + end])


@dataclass(slots=True, eq=False)
class Request:
    """All samples of one prompt, and its times by the engine's clock."""

    request_id: str
    samples: list[Sample]
    arrived_at: float
    has_timeout: bool = False  # its own timeout_s comes before the deadline it was given
    first_scheduled_at: float | None = None
    first_token_at: float | None = None

    @property
    def ended(self) -> bool:
        return all(sample.sequence.finish_reason is not None for sample in self.samples)

    @property
    def choices(self) -> list[Sample]:
        """The samples that were asked for: a search may need more of them than that."""
        return self.samples[: self.samples[0].sequence.params.n]

    @property
    def checkpoint(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each choice so far. None of a search: it is begun again at the prompt."""
        if self.samples[0].sequence.params.num_beams > 1:
            return ((),) * len(self.choices)
        return tuple(tuple(sample.sequence.generated_ids) for sample in self.choices)

    def output(self, finished_at: float) -> RequestOutput:
        """The whole result; every sample must have ended."""
        sequences = [sample.sequence for sample in self.samples]
        return RequestOutput(
            request_id=self.request_id,
            prompt_logprobs=self._prompt_logprobs(),
            completions=tuple(
                sample.completion(has_timeout=self.has_timeout) for sample in self.choices
            ),
            stats=RequestStats(
                prompt_tokens=sequences[0].num_prompt_tokens,
                cached_tokens=sequences[0].num_cached_tokens,
                completion_tokens=sum(s.num_generated_tokens for s in sequences),
                num_preemptions=sum(s.num_preemptions for s in sequences),
                arrived_at=self.arrived_at,
                first_scheduled_at=self.first_scheduled_at,
                first_token_at=self.first_token_at,
                finished_at=finished_at,
            ),
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        leader = self.samples[0]
        if leader.sequence.params.prompt_logprobs is None:
            return None
        return (None, *leader.scores[: leader.num_prompt_scores])
