"""What the engine keeps of a request while it runs: its samples, their text, its times.

Knows nothing of steps or blocks; the Scheduler owns the sequences.
"""

from dataclasses import dataclass

from engine.detokenizer import Detokenizer
from engine.outputs import Completion, Delta, RequestOutput, RequestStats
from engine.sequence import FinishReason, Sequence


@dataclass(slots=True, eq=False)
class Sample:
    """A sequence and the text of it."""

    sequence: Sequence
    detokenizer: Detokenizer
    stop_reason: str | int | None = None
    num_seen: int = 0  # generated tokens that text has been made of

    def take_in_tokens(self) -> tuple[Delta, bool]:
        """Turn the sequence's new tokens into text. Returns it, and whether a stop string is in it.

        If so, the sequence is to be finished with STOP, whatever ended it before.
        """
        sequence, detokenizer = self.sequence, self.detokenizer
        new_ids = sequence.token_ids[sequence.num_prompt_tokens + self.num_seen :]
        ended_by_id = sequence.finish_reason is FinishReason.STOP and self.stop_reason is None
        spoken = new_ids[:-1] if ended_by_id else new_ids
        text = ""
        for token_id in spoken:
            self.num_seen += 1
            may_stop = self.num_seen > sequence.params.min_tokens
            text += detokenizer.add([token_id], may_stop=may_stop)
        if sequence.finish_reason is not None:
            text += detokenizer.flush()
        self.num_seen += len(new_ids) - len(spoken)
        delta = Delta(sample_index=sequence.sample_index, token_ids=tuple(new_ids), text=text)
        if detokenizer.stopped_by is not None:
            stops = sequence.finish_reason in (None, FinishReason.LENGTH, FinishReason.STOP)
            if stops:
                self.stop_reason = detokenizer.stopped_by
            return delta, stops
        if ended_by_id and new_ids and new_ids[-1] in sequence.params.stop_token_ids:
            self.stop_reason = new_ids[-1]
        return delta, False

    def completion(self) -> Completion:
        assert self.sequence.finish_reason is not None
        return Completion(
            index=self.sequence.sample_index,
            token_ids=tuple(self.sequence.generated_ids),
            text=self.detokenizer.text,
            finish_reason=self.sequence.finish_reason,
            stop_reason=self.stop_reason,
            error=self.sequence.error,
        )


@dataclass(slots=True, eq=False)
class Request:
    """All samples of one prompt, and its times by the engine's clock."""

    request_id: str
    samples: list[Sample]
    arrived_at: float
    first_scheduled_at: float | None = None
    first_token_at: float | None = None

    @property
    def ended(self) -> bool:
        return all(sample.sequence.finish_reason is not None for sample in self.samples)

    def output(self, finished_at: float) -> RequestOutput:
        """The whole result; every sample must have ended."""
        sequences = [sample.sequence for sample in self.samples]
        return RequestOutput(
            request_id=self.request_id,
            completions=tuple(sample.completion() for sample in self.samples),
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
