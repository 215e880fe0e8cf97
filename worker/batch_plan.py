"""In which order a batch's rows run: those that begin alike next to each other, long ones first.

The engine keeps the KV blocks of a prompt's beginning while it has room, so that each beginning is
computed once if the rows that have it come one after another. Rows are compared by the JSON text of
what their prompt is made of, not by its tokens: to tokenize a million prompts takes minutes, and
texts that begin alike have tokens that do. Of a text the checksum of each PIECE from its beginning
is kept, so that a row takes a few bytes; sorted by these, rows come in the order of a walk through
the tree of their beginnings.

Before that, rows are sorted by how many tokens they may generate, in steps of four times as many: a
long one that begins last would run on alone when all the others have ended.

Memory is bounded: a private database of SQLite's sorts on disk what is more than its cache.
"""

import sqlite3
import zlib
from collections.abc import Iterator

from jobs import openai
from jobs.openai import COMPLETIONS_MAX_TOKENS

PIECE = 64  # bytes of text: about a block of 16 tokens
MOST_PIECES = 1024  # of one row
CACHE_KB = 16_384


class Plan:
    """Give it every row, in any order, then ask for the order they are to run in."""

    def __init__(self, *, planned: bool = True) -> None:
        self.num_rows = 0
        self._planned = planned  # else the order of the file
        # "": a file of its own in the folder for temporary ones, gone when this is closed
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute(f"PRAGMA cache_size = -{CACHE_KB}")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(
            "CREATE TABLE plan (rank INT, beginning BLOB, number INTEGER, start INTEGER)"
        )
        self._some: list[tuple[int, bytes, int, int]] = []

    def add(self, number: int, start: int, url: str, max_tokens: object, *texts: bytes) -> None:
        """A row: its number, where its line starts, and the JSON of what makes its prompt."""
        self.num_rows += 1
        if self._planned:
            self._some.append((_rank(url, max_tokens), beginning(b"".join(texts)), number, start))
        else:
            self._some.append((0, b"", number, start))
        if len(self._some) >= 2000:
            self._store()

    def rows(self, *, first: int = 0) -> Iterator[tuple[int, int]]:
        """Number and start of each row, from the place `first` on."""
        self._store()
        return self._database.execute(
            "SELECT number, start FROM plan ORDER BY rank, beginning, number LIMIT -1 OFFSET ?",
            (first,),
        )

    def close(self) -> None:
        self._database.close()

    def _store(self) -> None:
        self._database.execute("BEGIN")
        self._database.executemany("INSERT INTO plan VALUES (?, ?, ?, ?)", self._some)
        self._database.execute("COMMIT")
        self._some.clear()


def beginning(text: bytes) -> bytes:
    """Equal for texts that are equal in their first pieces, as far as those are equal."""
    checksum, checksums = 0, []
    for start in range(0, min(len(text), PIECE * MOST_PIECES) - PIECE + 1, PIECE):
        checksum = zlib.crc32(text[start : start + PIECE], checksum)
        checksums.append(checksum.to_bytes(4))
    return b"".join(checksums)


def _rank(url: str, max_tokens: object) -> int:
    """The lower the earlier; what has no limit of its own may become as long as the model takes."""
    most = max_tokens
    if not isinstance(most, int) or isinstance(most, bool):
        if url != openai.COMPLETIONS:
            return -64
        most = COMPLETIONS_MAX_TOKENS
    return -(min(abs(most), 2**60).bit_length() // 2)
