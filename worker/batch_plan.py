"""In which order a batch's rows run: those that begin alike next to each other, long ones first.

The engine keeps the KV blocks of a prompt's beginning while it has room, so that each beginning is
computed once if the rows that have it come one after another. Rows are compared by the JSON text of
what their prompt is made of, not by its tokens: to tokenize a million prompts takes minutes, and
texts that begin alike have tokens that do. Of a text the checksum of each PIECE from its beginning
is kept, so that a row takes a few bytes; sorted by these, rows come in the order of a walk through
the tree of their beginnings.

Before that, rows are sorted by how many tokens they may generate, in steps of four times as many: a
long one that begins last would run on alone when all the others have ended.

Rows that are the same come last where asked, all but the first of each kind: by then there is a
result that they may take. Each knows the one of its kind that comes before it.

Memory is bounded: a private database of SQLite's sorts on disk what is more than its cache.
"""

import sqlite3
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from jobs import openai
from jobs.openai import COMPLETIONS_MAX_TOKENS

PIECE = 64  # bytes of text: about a block of 16 tokens
MOST_PIECES = 1024  # of one row
CACHE_KB = 16_384


class Place(NamedTuple):
    """A row in the plan."""

    number: int
    start: int  # of its line
    previous: int | None  # the number of the row before it that is the same


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
            "CREATE TABLE plan (rank INT, beginning BLOB, number INTEGER, start INTEGER, same BLOB)"
        )
        self._some: list[tuple[int, bytes, int, int, bytes | None]] = []
        self._any_same = False
        self._taken: list[Place] = []  # the first of them is place `_first`
        self._first = 0
        self._further: Iterator[Place] | None = None

    def add(
        self,
        number: int,
        start: int,
        url: str,
        max_tokens: object,
        *texts: bytes,
        same: bytes | None = None,
    ) -> None:
        """A row: its number, where its line starts, and the JSON of what makes its prompt. `same`
        is equal for rows that are to be run once."""
        self.num_rows += 1
        self._any_same = self._any_same or same is not None
        if self._planned:
            rank = _rank(url, max_tokens)
            self._some.append((rank, beginning(b"".join(texts)), number, start, same))
        else:
            self._some.append((0, b"", number, start, same))
        if len(self._some) >= 2000:
            self._store()

    @property
    def num_same(self) -> int:
        """Rows that are the same as one before."""
        self._store()
        query = "SELECT count(same) - count(DISTINCT same) FROM plan"
        return int(self._database.execute(query).fetchone()[0])

    def rows(self, *, first: int = 0) -> Iterator[Place]:
        """In order, from the place `first` on."""
        self._store()
        previous = "NULL"
        if self._any_same:
            previous = (
                "CASE WHEN same IS NOT NULL THEN"
                " lag(number) OVER (PARTITION BY same ORDER BY number) END"
            )
        found = self._database.execute(
            f"SELECT number, start, {previous} AS previous FROM plan"
            " ORDER BY previous IS NOT NULL, rank, beginning, number LIMIT -1 OFFSET ?",
            (first,),
        )
        return (Place(*each) for each in found)

    def take(self, first: int, num: int) -> list[Place]:
        """So many rows from the place `first` on; quick where it is not before the last one's."""
        if self._further is None or first < self._first:
            self._further, self._taken, self._first = self.rows(first=first), [], first
        missing = first + num - self._first - len(self._taken)
        self._taken += islice(self._further, max(0, missing))
        del self._taken[: first - self._first]
        self._first = first
        return self._taken[:num]

    def close(self) -> None:
        self._database.close()

    def _store(self) -> None:
        self._database.execute("BEGIN")
        self._database.executemany("INSERT INTO plan VALUES (?, ?, ?, ?, ?)", self._some)
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
