"""Follows the text of one JSON object while it comes: where it ends, or that it is none.

Owns strictness: what is complete here, any JSON parser reads (RFC 8259), and a fault is found at
the character that makes it one. Reads no values: numbers and strings stay the text they are.
"""

import json
import re
from enum import Enum, auto

MAX_DEPTH = 32  # levels, the object's own included
MAX_WORD_CHARS = 1024  # of a number; one without end would be read again with every delta

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(
    r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null", re.ASCII
)
# numbers stay text: Python refuses integers of many digits
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)


class Progress(Enum):
    OPEN = auto()  # all so far can be the beginning of an object
    COMPLETE = auto()
    BROKEN = auto()


class _Next(Enum):
    """What may come next, besides white space."""

    OBJECT = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_OR_END = auto()
    COMMA_OR_END = auto()


_VALUES = (_Next.VALUE, _Next.VALUE_OR_END)
_KEYS = (_Next.KEY, _Next.KEY_OR_END)
_ENDS = (_Next.KEY_OR_END, _Next.VALUE_OR_END, _Next.COMMA_OR_END)


class ObjectScanner:
    """Reads a text that grows at its end. Reads no character twice, but for a word or an escape."""

    def __init__(self) -> None:
        self.progress = Progress.OPEN
        self._next = _Next.OBJECT
        self._closers: list[str] = []  # of what is open, outermost first
        self._in_string = False

    def read(self, text: str, at: int) -> int:
        """Go on at `at`, where the last call stopped; returns where this one does.

        That is behind the object once it is complete. While it is open, more text is needed.
        """
        while self.progress is Progress.OPEN:
            before = at
            at = self._string(text, at) if self._in_string else self._token(text, at)
            if at == before:
                break
        return at

    def _string(self, text: str, at: int) -> int:
        at = _end(_PLAIN, text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            self._in_string = False
            self._next = _Next.COLON if self._next in _KEYS else _Next.COMMA_OR_END
            return at + 1
        if (escape := _ESCAPE.match(text, at)) is not None:
            return escape.end()
        if _ESCAPE_BEGUN.fullmatch(text, at) is None:
            self.progress = Progress.BROKEN
        return at

    def _token(self, text: str, at: int) -> int:
        at = _end(_SPACE, text, at)
        if at == len(text):
            return at
        char, state = text[at], self._next
        if char == '"' and (state in _KEYS or state in _VALUES):
            self._in_string = True
        elif char in "{[" and (state in _VALUES or (state is _Next.OBJECT and char == "{")):
            self._open(char)
        elif char in "}]" and state in _ENDS and self._closers[-1] == char:
            self._close()
        elif char == ":" and state is _Next.COLON:
            self._next = _Next.VALUE
        elif char == "," and state is _Next.COMMA_OR_END:
            self._next = _Next.KEY if self._closers[-1] == "}" else _Next.VALUE
        elif state in _VALUES:
            return self._word(text, at)
        else:
            self.progress = Progress.BROKEN
        return at + 1

    def _open(self, char: str) -> None:
        if len(self._closers) == MAX_DEPTH:
            self.progress = Progress.BROKEN
            return
        self._closers.append("}" if char == "{" else "]")
        self._next = _Next.KEY_OR_END if char == "{" else _Next.VALUE_OR_END

    def _close(self) -> None:
        self._closers.pop()
        self._next = _Next.COMMA_OR_END
        if not self._closers:
            self.progress = Progress.COMPLETE

    def _word(self, text: str, at: int) -> int:
        end = _end(_WORD, text, at)
        if end - at > MAX_WORD_CHARS:
            self.progress = Progress.BROKEN
        elif end == len(text):
            return at  # it may go on
        elif _SCALAR.fullmatch(text, at, end) is None:
            self.progress = Progress.BROKEN
        else:
            self._next = _Next.COMMA_OR_END
        return end


def members(text: str) -> dict[str, str] | None:
    """The values of a complete object by their keys, each as its own text.

    None when a key is given twice: two readers could read it differently.
    """
    found: dict[str, str] = {}
    at = _end(_SPACE, text, text.index("{") + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        at = _end(_SPACE, text, text.index(":", at) + 1)
        _, end = _DECODER.raw_decode(text, at)
        if key in found:
            return None
        found[key] = text[at:end]
        at = _end(_SPACE, text, end)
        if text[at] == ",":
            at = _end(_SPACE, text, at + 1)
    return found


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None, "the pattern matches nothing at all"
    return match.end()
