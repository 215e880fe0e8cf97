"""What a streamed job's tokens say, one by one: text, thought and calls, with their scores.

The same tokens always say the same, so an attempt that goes on from another's checkpoint goes on in
the midst of its stream: what it resumed is read again, and told no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.detokenizer import Detokenizer, token_bytes
from engine.outputs import TokenLogprobs
from engine.reply import Reply, ReplyParser
from engine.tokenizer import Tokenizer
from jobs import openai, openai_logprobs
from jobs.claims import Checkpoint
from jobs.streams import Piece, Run, StreamMode, plain, to_lines
from worker.messages import Delta
from worker.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Unstored:
    """Lines for the row, and up to which token of each sample they go."""

    lines: str
    ends: tuple[int, ...]


class Streaming:
    """The stream of one attempt. Not thread-safe."""

    def __init__(
        self,
        job_id: str,
        url: str,
        prompt: Prompt,
        resumed: Checkpoint,
        tokenizer: Tokenizer,
        *,
        kept: bool,
    ) -> None:
        self._job_id = job_id
        self._kept = kept
        self._samples = [_Sample(url, prompt, ids, tokenizer) for ids in resumed]
        self._starts = [len(ids) for ids in resumed]  # of the pieces below
        self._pieces: list[list[str | Piece]] = [[] for _ in resumed]

    def add(self, delta: Delta) -> Run:
        """What the newest tokens of a sample say."""
        sample = delta.sample_index
        start = self._starts[sample] + len(self._pieces[sample])
        scores: Sequence[TokenLogprobs | None] = delta.logprobs or [None] * len(delta.pieces)
        pieces = [
            plain(self._samples[sample].piece(token_id, text, score))
            for token_id, text, score in zip(delta.token_ids, delta.pieces, scores, strict=True)
        ]
        if self._kept:
            self._pieces[sample] += pieces
        else:
            self._starts[sample] += len(pieces)
        return Run(self._job_id, sample, start, pieces)

    def unstored(self) -> Unstored | None:
        """Of one that is kept, what no row has yet."""
        runs = [
            Run(self._job_id, sample, self._starts[sample], pieces)
            for sample, pieces in enumerate(self._pieces)
            if pieces
        ]
        if not runs:
            return None
        ends = tuple(s + len(p) for s, p in zip(self._starts, self._pieces, strict=True))
        return Unstored(to_lines(runs), ends)

    def stored(self, ends: Sequence[int]) -> None:
        """A row has it up to there."""
        for sample, end in enumerate(ends):
            if end > self._starts[sample]:
                del self._pieces[sample][: end - self._starts[sample]]
                self._starts[sample] = end


def streaming_of(
    job_id: str, url: str, mode: str | None, prompt: Prompt, resumed: Checkpoint, tok: Tokenizer
) -> Streaming | None:
    """None where nobody streams the job, or there is nothing to tell before its end: a search
    knows its texts then."""
    if mode is None or prompt.params.num_beams > 1:
        return None
    return Streaming(job_id, url, prompt, resumed, tok, kept=mode == StreamMode.KEPT)


class _Sample:
    """One sample's reply while it grows."""

    def __init__(
        self, url: str, prompt: Prompt, resumed: Sequence[int], tokenizer: Tokenizer
    ) -> None:
        params = prompt.params
        self._chat = url != openai.COMPLETIONS
        self._num_top = params.logprobs or 0
        self._parser = ReplyParser(prompt.reply_form)
        self._spell = partial(token_bytes, tokenizer)
        new = partial(
            Detokenizer,
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            in_form=params.structured_outputs is not None,
        )
        self._raw = new()  # nothing held back: where a token's text begins
        self._raw_length = 0
        if resumed:  # as engine.requests does it
            shown = new(stop=params.stop, include_stop=params.include_stop_str_in_output)
            for place, token_id in enumerate(resumed, start=1):
                self._parser.add(shown.add([token_id], may_stop=place > params.min_tokens))
            self._raw_length = len(self._raw.add(resumed))

    def piece(self, token_id: int, text: str, score: TokenLogprobs | None) -> Piece:
        reply = self._parser.add(text) if text else Reply()
        return Piece(
            reply.content,
            reply.reasoning,
            tuple((call.name, call.arguments) for call in reply.calls),
            None if score is None else self._logprobs(token_id, score),
        )

    def _logprobs(self, token_id: int, score: TokenLogprobs) -> dict[str, Any]:
        if self._chat:
            return openai_logprobs.chat_logprobs([score], self._spell)
        offset, released = self._raw_length, self._raw.add([token_id])
        self._raw_length += len(released)
        return openai_logprobs.completion_logprobs(
            [(token_id, score)], [offset], self._num_top, self._spell
        )
