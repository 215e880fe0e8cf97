"""Streaming at OpenAI's chat and completions: what a body may ask, and the chunks of its reply.

Chunks are made of pieces (`jobs.streams`) as they come, and at the end of what the whole response
has beyond them: joined they say what the response says.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jobs import openai_fields as fields
from jobs import openai_tools
from jobs.openai_fields import BodyError, UnsupportedValue
from jobs.streams import Piece, Run, whole

# of a whole prompt, which is known before the first token: who wants it can wait
_NOT_STREAMED = ("echo", "prompt_logprobs")


def check(given: Mapping[str, Any], *, streams: bool) -> None:
    """Raises BodyError."""
    stream = fields.boolean("stream", given.get("stream", False))
    if stream and not streams:
        raise UnsupportedValue("stream", "stream is not supported for jobs: poll or wait for one")
    options = fields.record(
        "stream_options",
        given.get("stream_options", {}),
        ("include_usage", "include_obfuscation"),
    )
    if options and not stream:
        raise BodyError("stream_options", "stream_options needs stream to be true")
    fields.boolean("stream_options.include_usage", options.get("include_usage", False))
    name = "stream_options.include_obfuscation"
    if fields.boolean(name, options.get("include_obfuscation", False)):
        raise UnsupportedValue(name, f"{name} is not supported yet")
    for name in _NOT_STREAMED:
        if stream and given.get(name) not in (None, False):
            raise UnsupportedValue(name, f"{name} is not supported with stream")


class Chunks:
    """The chunks of one streamed reply of chat or completions."""

    def __init__(
        self, *, chat: bool, reply_id: str, job_id: str, model: str, created: float, usage: bool
    ) -> None:
        self._chat = chat
        self._job_id = job_id
        self._usage = usage
        self._frame = {
            "id": reply_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(created),
            "model": model,
        }
        self._shown: dict[int, _Shown] = {}

    def begin(self, num_samples: int) -> Iterator[dict[str, Any]]:
        """What a client is told before there is any text."""
        if self._chat:
            for sample in range(num_samples):
                yield self._chunk(sample, {"role": "assistant", "content": "", "refusal": None})

    def of(self, run: Run, first: int = 0) -> Iterator[dict[str, Any]]:
        """What tokens say; nothing where they let out no text yet. `first` is the index of the
        job's first sample, of a reply of several jobs."""
        said = _sum([whole(piece) for piece in run.pieces if piece])
        if said:
            yield self._say(first + run.sample, said)

    def end(self, output: Mapping[str, Any], first: int = 0) -> Iterator[dict[str, Any]]:
        """The rest of a job's whole response, and why each sample ended."""
        for choice in output["choices"]:
            index = first + choice["index"]
            rest = self._rest(choice, index)
            if rest:
                yield self._say(index, rest)
            marker = {name: choice[name] for name in ("stop_reason",) if name in choice}
            yield self._chunk(index, {}, finish_reason=choice["finish_reason"], **marker)

    def usage(self, output: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What the whole response cost, where that was asked for."""
        if self._usage:
            yield self._frame | {"choices": [], "usage": output["usage"]}

    def _say(self, index: int, said: Piece) -> dict[str, Any]:
        shown = self._shown.get(index, _NOTHING)
        delta: dict[str, Any] = {}
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.content or not (said.reasoning or said.calls):
            delta["content"] = said.content
        if said.calls:
            delta["tool_calls"] = [
                openai_tools.call_object(self._job_id, index, n, *call) | {"index": n}
                for n, call in enumerate(said.calls, start=shown.calls)
            ]
        self._shown[index] = shown.after(said)
        return self._chunk(index, delta, logprobs=said.logprobs)

    def _rest(self, choice: Mapping[str, Any], index: int) -> Piece:
        """What the choice says beyond what was shown of it."""
        shown = self._shown.get(index, _NOTHING)
        if not self._chat:
            return Piece(choice["text"][shown.content :])
        message = choice["message"]
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        return Piece(
            (message["content"] or "")[shown.content :],
            message.get("reasoning_content", "")[shown.reasoning :],
            tuple(calls[shown.calls :]),
        )

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        **marker: Any,
    ) -> dict[str, Any]:
        said: dict[str, Any] = (
            {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        )
        choice = {
            "index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason, **marker,
        }  # fmt: skip
        return self._frame | {"choices": [choice]} | ({"usage": None} if self._usage else {})


class _Shown(NamedTuple):
    """How much of a sample was sent: characters, and calls."""

    content: int
    reasoning: int
    calls: int

    def after(self, said: Piece) -> "_Shown":
        return _Shown(
            self.content + len(said.content),
            self.reasoning + len(said.reasoning),
            self.calls + len(said.calls),
        )


_NOTHING = _Shown(0, 0, 0)


def _sum(pieces: Sequence[Piece]) -> Piece:
    """Pieces of one sample in a row, as one."""
    return Piece(
        "".join(piece.content for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
        _joined([piece.logprobs for piece in pieces if piece.logprobs is not None]),
    )


def _joined(logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Every list of the endpoint's shape behind that of the piece before."""
    if not logprobs:
        return None
    return {
        name: [each for part in logprobs for each in part[name]]
        if isinstance(value, list)
        else value
        for name, value in logprobs[0].items()
    }
