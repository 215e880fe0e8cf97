"""The text of a chat's reply, read while it comes: thought, content and tool calls.

Owns what belongs to which. A tag is never shown half, nor a call before it is whole: a call that
cannot be used is content, letter by letter. White space around a thought or a call is the format's
and not part of it. Knows no token ids, but for counting those of a thought.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from engine.json_object import ObjectScanner, Progress, members

MAX_CALLS = 128
MAX_OPENINGS = 1024  # of calls, usable or not: behind so many no more are looked for
THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


class ToolFormat(Enum):
    """How a model writes a call of a function."""

    # <tool_call>{"name": …, "arguments": {…}}</tool_call>, anywhere: Hermes 2 Pro, Qwen
    TAGGED_JSON = "tagged_json"
    # {"name": …, "parameters": {…}} as the beginning of the reply; more behind ";": Llama 3
    BARE_JSON = "bare_json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyForm:
    """How one generation's text is to be read. By default all of it is content."""

    thinks: bool = False  # a thought may open the reply
    in_thought: bool = False  # the prompt has opened it already
    thinking_ids: tuple[int, int] | None = None  # of the two tags, where each is one token
    tool_format: ToolFormat | None = None  # None: no calls are looked for
    tool_names: frozenset[str] = frozenset()  # what may be called
    max_calls: int = MAX_CALLS


PLAIN = ReplyForm()


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # the text of a JSON object, as the model wrote it


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply, or what was added to one; empty where there is nothing of a kind."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __add__(self, later: "Reply") -> "Reply":
        return Reply(
            self.content + later.content,
            self.reasoning + later.reasoning,
            self.calls + later.calls,
        )


def parse_reply(text: str, form: ReplyForm) -> Reply:
    """All of a reply at once: the sum of what a ReplyParser makes of it, however it is cut."""
    parser = ReplyParser(form)
    return parser.add(text) + parser.end()


def num_reasoning_tokens(token_ids: Sequence[int], thinking_ids: tuple[int, int]) -> int:
    """Of the ids of a reply that opens with a thought, those between its tags."""
    start, end = thinking_ids
    thought = list(token_ids)
    if end in thought:
        thought = thought[: thought.index(end)]
    if start in thought:
        thought = thought[thought.index(start) + 1 :]
    return len(thought)


class ReplyParser:
    """Takes in a reply's text piece by piece and gives out what has become certain."""

    def __init__(self, form: ReplyForm) -> None:
        self._form = form
        self._held = ""  # not given out: it may be part of a tag or a call
        self._reasoning = _Trimmed()
        self._content = _Trimmed()
        self._calls: list[ToolCall] = []
        self._num_calls = 0
        self._num_openings = 0
        self._scanner = ObjectScanner()
        self._body_at = self._read_to = self._give_up_at = 0  # places in what is held, see _in_call
        self._state: Callable[[bool], bool] = (
            self._opening if form.thinks or form.in_thought else self._in_content
        )

    def add(self, text: str) -> Reply:
        self._held += text
        return self._read(final=False)

    def end(self) -> Reply:
        """The reply has ended: what is left. Nothing more may be added."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> Reply:
        while self._state(final):
            pass
        assert not final or not self._held, "text was lost"
        calls, self._calls = tuple(self._calls), []
        return Reply(self._content.shown(final), self._reasoning.shown(final), calls)

    # -- states: each takes what it can of the held text, and says whether another has to go on

    def _opening(self, final: bool) -> bool:
        text = self._held.lstrip()
        if len(text) < len(THINK) and THINK.startswith(text) and not final:
            return False
        tagged = text.startswith(THINK)  # some models repeat the tag their prompt ends with
        if tagged:
            self._held = text[len(THINK) :]
        if tagged or self._form.in_thought:
            self._reasoning.touch()
            self._state = self._in_thought
        else:
            self._state = self._in_content
        return True

    def _in_thought(self, final: bool) -> bool:
        thought, tag, rest = self._held.partition(END_THINK)
        if not tag:
            self._held = self._reasoning.take_before(END_THINK, self._held, final)
            return False
        self._reasoning.take(thought)
        self._reasoning.touch()
        self._content.touch()
        self._held = rest
        self._state = self._in_content
        return True

    def _in_content(self, final: bool) -> bool:
        calls_may_come = (
            self._num_calls < self._form.max_calls and self._num_openings < MAX_OPENINGS
        )
        if self._form.tool_format is ToolFormat.TAGGED_JSON and calls_may_come:
            content, tag, rest = self._held.partition(CALL)
            if not tag:
                self._held = self._content.take_before(CALL, self._held, final)
                return False
            self._content.take(content)
            self._held = tag + rest
            return self._begin_call(body_at=len(CALL), give_up_at=len(CALL))
        if (
            self._form.tool_format is ToolFormat.BARE_JSON
            and calls_may_come
            and not self._content.begun
        ):
            between = re.match(r"\s*;?\s*" if self._num_calls else r"\s*", self._held)
            assert between is not None
            at = between.end()
            if at == len(self._held) and not final:
                return False
            if self._held[at : at + 1] == "{":
                return self._begin_call(body_at=at, give_up_at=at + 1)
        self._content.take(self._held)
        self._held = ""
        return False

    def _begin_call(self, *, body_at: int, give_up_at: int) -> bool:
        """The held text begins with what may be a call: its object is at `body_at`, and what stands
        before `give_up_at` is content if it is none."""
        self._num_openings += 1
        self._scanner = ObjectScanner()
        self._body_at = self._read_to = body_at
        self._give_up_at = give_up_at
        self._state = self._in_call
        return True

    def _in_call(self, final: bool) -> bool:
        self._read_to = self._scanner.read(self._held, self._read_to)
        end = self._end_of_call(final)
        if end is None:
            return False
        call = self._call(self._held[self._body_at : self._read_to]) if end else None
        if call is None:
            self._content.take(self._held[: self._give_up_at])
            self._held = self._held[self._give_up_at :]
        else:
            self._calls.append(call)
            self._num_calls += 1
            self._content.touch()
            self._held = self._held[end:]
        self._state = self._in_content
        return True

    def _end_of_call(self, final: bool) -> int | None:
        """Where the held text goes on behind the call; 0 if it is none, None until that is known.

        A reply may end without the closing tag: nothing of the call is missing then.
        """
        if self._scanner.progress is Progress.BROKEN:
            return 0
        if self._scanner.progress is Progress.OPEN:
            return 0 if final else None
        if self._form.tool_format is ToolFormat.BARE_JSON:
            return self._read_to
        rest = self._held[self._read_to :].lstrip()
        if rest.startswith(END_CALL):
            return len(self._held) - len(rest) + len(END_CALL)
        if not final and END_CALL.startswith(rest):
            return None
        return len(self._held) if not rest else 0

    def _call(self, text: str) -> ToolCall | None:
        """The call that an object is; None when it is none of the request's functions."""
        fields = members(text) or {}
        quoted = fields.pop("name", "")
        kind = fields.pop("type", '"function"')
        if not quoted.startswith('"') or kind != '"function"' or len(fields) != 1:
            return None
        name = json.loads(quoted)
        key, arguments = fields.popitem()
        if (
            name not in self._form.tool_names
            or key not in ("arguments", "parameters")
            or not arguments.startswith("{")
        ):
            return None
        return ToolCall(name, arguments)


class _Trimmed:
    """Text of one kind. White space waits until what follows it is known: beside a tag it is the
    format's, unless it stands between two pieces of text."""

    def __init__(self) -> None:
        self.begun = False  # more than white space was taken
        self._space = ""
        self._touches_tag = False
        self._taken: list[str] = []

    def touch(self) -> None:
        """Here a tag or a call stands."""
        self._touches_tag = True

    def take(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if not body:
            return
        if self._touches_tag and not self.begun:
            body = body.lstrip()
        self._taken.append(body)
        self.begun = True
        self._touches_tag = False

    def take_before(self, tag: str, text: str, final: bool) -> str:
        """Take what cannot be the beginning of `tag`; returns the rest."""
        cut = len(text)
        if not final:
            ends = range(min(len(tag) - 1, len(text)), 0, -1)
            cut -= next((length for length in ends if text.endswith(tag[:length])), 0)
        self.take(text[:cut])
        return text[cut:]

    def shown(self, final: bool) -> str:
        """What was taken since the last call."""
        if final and not self._touches_tag:
            self._taken.append(self._space)
        shown, self._taken = "".join(self._taken), []
        return shown
