"""Token ids to text while a sequence grows: whole characters only, and nothing of a stop string.

Owns one sequence's text. The cost of a whole sequence is linear in its length: no id is decoded
more than three times. Knows nothing of sampling; the caller tells it when a stop string may count.
"""

import codecs
import string
from collections.abc import Sequence
from typing import Protocol

from engine.tokenizer import Tokenizer


class Detokenizer:
    """Incremental text of one sequence.

    All text ever returned is a prefix of the final text, which is what `Tokenizer.decode` makes of
    all ids at once, cut before the first stop string, or behind it. One counts as soon as it is
    complete; if the same tokens complete several, the one that starts first cuts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,  # the stop string is part of the text
        skip_special_tokens: bool = True,
        in_form: bool = False,
    ) -> None:
        self.stopped_by: str | None = None
        self._stream: _TextStream
        if tokenizer.is_byte_level:
            self._stream = _ByteLevelStream(tokenizer, skip_special_tokens)
        else:
            self._stream = _WindowStream(tokenizer, skip_special_tokens, in_form=in_form)
        self._stop = stop
        self._include_stop = include_stop
        self._first_chars = frozenset(text[0] for text in stop)
        self._longest_stop = max(map(len, stop), default=0)
        self._released: list[str] = []
        self._held = ""  # whole characters that may yet prove to be the start of a stop string

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def add(self, token_ids: Sequence[int], *, may_stop: bool = True) -> str:
        """Take in new ids; return the text that has become safe to show.

        With `may_stop` false (below `min_tokens`) a stop string that these ids complete is text.
        After a stop nothing more is taken in.
        """
        if self.stopped_by is not None:
            return ""
        return self._take(self._stream.add(token_ids), may_stop=may_stop)

    def flush(self, *, may_stop: bool = True) -> str:
        """The sequence has ended: return what was held back, which may yet hold a stop string."""
        if self.stopped_by is not None:
            return ""
        safe = self._take(self._stream.end(), may_stop=may_stop)
        return safe + self._release(len(self._held))

    def _take(self, text: str, *, may_stop: bool) -> str:
        num_held = len(self._held)
        self._held += text
        if may_stop and text:
            # one that was whole before was passed over: it is text
            matches = [
                (at, stop)
                for stop in self._stop
                if (at := self._held.find(stop, max(0, num_held - len(stop) + 1))) >= 0
            ]
            if matches:
                at, self.stopped_by = min(matches, key=lambda match: match[0])
                safe = self._release(at + len(self.stopped_by) * self._include_stop)
                self._held = ""
                return safe
        return self._release(self._start_of_possible_stop())

    def _start_of_possible_stop(self) -> int:
        """Where the longest end of the held text begins that a stop string could go on from."""
        for at in range(max(0, len(self._held) - self._longest_stop + 1), len(self._held)):
            if self._held[at] in self._first_chars:
                end = self._held[at:]
                if any(len(end) < len(stop) and stop.startswith(end) for stop in self._stop):
                    return at
        return len(self._held)

    def _release(self, count: int) -> str:
        safe, self._held = self._held[:count], self._held[count:]
        if safe:
            self._released.append(safe)
        return safe


class _TextStream(Protocol):
    """Ids in, text out; the concatenation of all text equals decoding all ids at once."""

    def add(self, token_ids: Sequence[int]) -> str: ...

    def end(self) -> str: ...


class _ByteLevelStream:
    """For vocabularies whose tokens spell bytes: an incremental UTF-8 decoder is all it takes."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # "replace" makes one U+FFFD of each maximal invalid part, as Rust's from_utf8_lossy does
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(
            b"".join(
                _bytes_of(self._tokenizer.token(token_id))
                for token_id in token_ids
                if not self._skip_special_tokens or self._tokenizer.is_visible(token_id)
            )
        )

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """For all other vocabularies: decodes the newest ids behind the ones before them.

    A decoder looks at a token's neighbours (it strips the first space of a text, joins bytes), so
    new ids are decoded together with the last released ones, and that text is cut off again.
    Byte tokens (`<0xE2>`) wait for a token that is none: only then is it settled whether they spell
    characters, since one bad byte makes the decoder give up the whole run.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, *, in_form: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._shown = _some_text(tokenizer) if in_form else []
        self._waiting: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        # ids without text would stand between the neighbours; a decoder never sees them
        self._waiting += [i for i in token_ids if self._has_text(i)]
        if self._waiting and _is_byte_token(self._tokenizer.token(self._waiting[-1])):
            return ""
        return self.end()

    def end(self) -> str:
        if not self._waiting:
            return ""
        before = len(self._decode(self._shown))
        text = self._decode(self._shown + self._waiting)[before:]
        self._shown, self._waiting = self._waiting, []
        return text

    def _has_text(self, token_id: int) -> bool:
        if self._skip_special_tokens:
            return self._tokenizer.is_visible(token_id)
        return self._tokenizer.token(token_id) != ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _some_text(tokenizer: Tokenizer) -> list[int]:
    """Ids of a letter, to stand before others; none where every letter is spelled in bytes."""
    for letter in string.ascii_lowercase:
        token_ids = tokenizer.encode_word(letter)
        in_bytes = any(_is_byte_token(tokenizer.token(token_id)) for token_id in token_ids)
        if not in_bytes and tokenizer.decode(token_ids) == letter:
            return token_ids
    return []


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself where it is printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:  # an added token, spelled in plain text
        return token.encode("utf-8")


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What a token spells by itself; a special token its name."""
    token = tokenizer.token(token_id)
    if tokenizer.is_byte_level:
        return _bytes_of(token)
    if _is_byte_token(token):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()  # SentencePiece's space


def text_offsets(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
    in_form: bool = False,
) -> list[int]:
    """Where in the ids' text each begins, in characters: a part of one where the whole begins."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, in_form=in_form)
    offsets, length = [], 0
    for token_id in token_ids:
        released = detokenizer.add([token_id])
        own = token_bytes(tokenizer, token_id).decode(errors="replace")
        # bytes before it that turned out to be no character are released with it
        before = len(released) - len(own) if released.endswith(own) else 0
        offsets.append(length + before)
        length += len(released)
    return offsets


def _is_byte_token(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
