"""The events of a streamed response: a function of what its tokens say and of how it ended.

The same pieces always make the same events under the same numbers, whoever asks, whenever: that is
what `starting_after` refers to. Each event is made from the pieces, never stored.
"""

from collections.abc import Iterator
from typing import Any

from jobs import openai_response_object as objects
from jobs.lifecycle import JobState
from jobs.openai_tools import ToolCall
from jobs.records import JobRecord
from jobs.streams import Piece, Run, whole

Event = dict[str, Any]


class ResponseEvents:
    """Events in order, from the first."""

    def __init__(self, record: JobRecord) -> None:
        self._job_id = record.id
        self._number = 0
        self._begun = False
        self._reasoning, self._content = "", ""  # told so far
        self._logprobs: list[Any] = []
        self._calls: list[ToolCall] = []  # told at the end, behind the text
        self._open: str | None = None  # the item that grows: reasoning, message
        self._output: list[dict[str, Any]] = []  # items told whole
        self._record = record

    @property
    def next_number(self) -> int:
        return self._number

    def begin(self) -> Iterator[Event]:
        """What is true of every response."""
        queued = self._snapshot("queued")
        yield self._event("response.created", response=queued)
        if queued["background"]:
            yield self._event("response.queued", response=queued)

    def started(self) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            snapshot = self._snapshot("in_progress")
            yield self._event("response.in_progress", response=snapshot)

    def of(self, run: Run) -> Iterator[Event]:
        """What tokens say, an event for each that lets out text."""
        yield from self.started()
        for piece in map(whole, run.pieces):
            yield from self._say(piece)

    def end(self, record: JobRecord) -> Iterator[Event]:
        """What is left of the whole response, and its one last event."""
        yield from self.started()
        response = objects.of_record(record)
        if record.state == JobState.SUCCEEDED:
            yield from self._say(self._rest(response))
            yield from self._close()
            if not any(item["type"] == "message" for item in self._output) and not self._calls:
                yield from self._open_item("message")
                yield from self._close()
            for index, call in enumerate(self._calls):
                yield from self._call(index, call)
        kind = response["status"] if response["status"] in ("completed", "incomplete") else "failed"
        yield self._event(f"response.{kind}", response=response)

    def end_of_deleted(self) -> Iterator[Event]:
        """The one last event of a response whose row has gone meanwhile."""
        error = {"code": "server_error", "message": "the response was deleted"}
        response = self._snapshot("cancelled") | {"error": error}
        yield self._event("response.failed", response=response)

    def skip_to(self, number: int) -> None:
        """Give the next event no smaller number: its stream was longer when it was heard live."""
        self._number = max(self._number, number)

    def _say(self, piece: Piece) -> Iterator[Event]:
        if piece.reasoning:
            yield from self._grow("reasoning", piece.reasoning, ())
        scores = (piece.logprobs or {}).get("content") or ()
        self._logprobs += scores
        if piece.content:
            yield from self._grow("message", piece.content, scores)
        self._calls += [ToolCall(*call) for call in piece.calls]

    def _rest(self, response: dict[str, Any]) -> Piece:
        said = {"reasoning": "", "message": ""}
        calls = []
        for item in response["output"]:
            if item["type"] == "function_call":
                calls.append((item["name"], item["arguments"]))
            else:
                said[item["type"]] = "".join(part["text"] for part in item["content"])
        return Piece(
            said["message"][len(self._content) :],
            said["reasoning"][len(self._reasoning) :],
            tuple(calls[len(self._calls) :]),
        )

    def _grow(self, kind: str, text: str, scores: Any) -> Iterator[Event]:
        if self._open != kind:
            yield from self._close()
            yield from self._open_item(kind)
        if kind == "reasoning":
            self._reasoning += text
            yield self._part_event("response.reasoning_text.delta", delta=text)
        else:
            self._content += text
            yield self._part_event("response.output_text.delta", delta=text, logprobs=list(scores))

    def _open_item(self, kind: str) -> Iterator[Event]:
        self._open = kind
        item = (
            objects.reasoning_item(self._job_id, "")
            if kind == "reasoning"
            else objects.message_item(self._job_id, None, status="in_progress")
        )
        yield self._event("response.output_item.added", output_index=self._index, item=item)
        yield self._part_event("response.content_part.added", part=self._part(""))

    def _close(self) -> Iterator[Event]:
        """End the item that grows."""
        if self._open is None:
            return
        if self._open == "reasoning":
            item = objects.reasoning_item(self._job_id, self._reasoning)
            yield self._part_event("response.reasoning_text.done", text=self._reasoning)
        else:
            item = objects.message_item(
                self._job_id, self._content, status="completed", logprobs=self._logprobs
            )
            yield self._part_event(
                "response.output_text.done", text=self._content, logprobs=list(self._logprobs)
            )
        text = self._reasoning if self._open == "reasoning" else self._content
        yield self._part_event("response.content_part.done", part=self._part(text))
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._output.append(item)
        self._open = None

    def _call(self, index: int, call: ToolCall) -> Iterator[Event]:
        at = self._index
        item = objects.call_item(self._job_id, index, call.name, "", status="in_progress")
        place = {"item_id": item["id"], "output_index": at}
        yield self._event("response.output_item.added", output_index=at, item=item)
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self._event(
            "response.function_call_arguments.done",
            **place, name=call.name, arguments=call.arguments,
        )  # fmt: skip
        item = objects.call_item(self._job_id, index, call.name, call.arguments)
        yield self._event("response.output_item.done", output_index=at, item=item)
        self._output.append(item)

    @property
    def _index(self) -> int:
        return len(self._output)

    def _part(self, text: str) -> dict[str, Any]:
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return objects.text_part(text, self._logprobs if text else ())

    def _part_event(self, kind: str, **values: Any) -> Event:
        item_id = objects.item_id("rs" if self._open == "reasoning" else "msg", self._job_id)
        return self._event(
            kind, item_id=item_id, output_index=self._index, content_index=0, **values
        )

    def _event(self, kind: str, **values: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **values}

    def _snapshot(self, status: str) -> dict[str, Any]:
        """The response before it had an end, whenever it is asked for."""
        return objects.before_its_end(self._record) | {"status": status}
