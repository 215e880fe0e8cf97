"""How far a dataset is: its rows, and each try at each sample of them, in a file beside the output.

The file is the truth of the command that makes the dataset. It may be killed at any moment: every
change is a transaction. A try takes one result, and what may follow from it is written together
with it, so that none is missed and none is counted twice. Others may read it meanwhile.

    planned → asked → delivered | invalid | failed | redone
    redone: another try, of the next round, has taken its place
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPEN = ("planned", "asked")
ENDED = ("delivered", "invalid", "failed")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rows (
    number INTEGER PRIMARY KEY, place TEXT NOT NULL, custom_id TEXT UNIQUE, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, file_id TEXT, batch_id TEXT,
    done INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS tries (
    row INTEGER NOT NULL, sample INTEGER NOT NULL, round INTEGER NOT NULL, state TEXT NOT NULL,
    rounds_left INTEGER NOT NULL, batch INTEGER, place INTEGER, kind TEXT, reason TEXT,
    output TEXT, details TEXT, prompt_tokens INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (row, sample, round)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tries_planned ON tries (round, row, sample) WHERE state = 'planned';
CREATE INDEX IF NOT EXISTS tries_asked ON tries (batch, place) WHERE state = 'asked';
CREATE TABLE IF NOT EXISTS shards (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, num_rows INTEGER NOT NULL,
    bytes INTEGER NOT NULL, sha256 TEXT NOT NULL);
"""
_TRY = "t.row, t.sample, t.round, t.rounds_left, r.place, r.content"


@dataclass(frozen=True, slots=True)
class Try:
    row: int
    sample: int
    round: int
    rounds_left: int  # that may follow it if its output is refused
    place: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a try."""

    row: int
    sample: int
    round: int
    state: str
    kind: str | None = None  # why it was not delivered: one of few words
    reason: str | None = None  # the same for a reader
    output: str | None = None
    details: dict[str, Any]
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class OpenBatch:
    number: int
    key: str  # under which it is created, once
    file_id: str | None
    batch_id: str | None


class State:
    """One process writes, by itself; any number read."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, timeout=30.0)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # -- facts

    def fact(self, name: str) -> Any:
        found = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if found is None else json.loads(found[0])

    def note(self, **facts: Any) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO facts VALUES (?, ?)",
            [(name, json.dumps(value)) for name, value in facts.items()],
        )

    # -- rows

    def num_rows(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM rows").fetchone()[0])

    def add_rows(
        self, rows: Sequence[tuple[int, str, str | None, str]], *, samples: int, rounds: int
    ) -> None:
        """Number, place, custom_id and content of each. Raises sqlite3.IntegrityError where a
        custom_id is there already, and then adds none."""
        with self.transaction():
            self._db.executemany("INSERT INTO rows VALUES (?, ?, ?, ?)", rows)
            self._db.executemany(
                "INSERT INTO tries (row, sample, round, state, rounds_left)"
                " VALUES (?, ?, 0, 'planned', ?)",
                ((row[0], sample, rounds) for row in rows for sample in range(samples)),
            )

    def place_of(self, custom_id: str) -> str | None:
        found = self._db.execute("SELECT place FROM rows WHERE custom_id = ?", (custom_id,))
        return next((place for (place,) in found), None)

    def contents(self) -> Iterator[dict[str, Any]]:
        for (content,) in self._each("SELECT content FROM rows ORDER BY number"):
            yield json.loads(content)

    # -- batches of tries

    def num_planned(self) -> int:
        query = "SELECT count(*) FROM tries WHERE state = 'planned'"
        return int(self._db.execute(query).fetchone()[0])

    def begin_batch(self, key: str, num_tries: int) -> OpenBatch:
        """Takes so many of the planned tries, those of earlier rounds first."""
        with self.transaction():
            number = self._db.execute("INSERT INTO batches (key) VALUES (?)", (key,)).lastrowid
            assert number is not None
            some = self._db.execute(
                "SELECT row, sample, round FROM tries WHERE state = 'planned'"
                " ORDER BY round, row, sample LIMIT ?", (num_tries,),
            ).fetchall()  # fmt: skip
            self._db.executemany(
                "UPDATE tries SET state = 'asked', batch = ?, place = ?"
                " WHERE row = ? AND sample = ? AND round = ?",
                ((number, place, *key) for place, key in enumerate(some)),
            )
        return OpenBatch(number, key, None, None)

    def shorten_batch(self, number: int, num_tries: int) -> None:
        """Those behind the first so many are planned again."""
        self._db.execute(
            "UPDATE tries SET state = 'planned', batch = NULL, place = NULL"
            " WHERE state = 'asked' AND batch = ? AND place >= ?", (number, num_tries),
        )  # fmt: skip

    def drop_batch(self, number: int) -> None:
        """Its tries without a result are planned again."""
        with self.transaction():
            self.shorten_batch(number, 0)
            self._db.execute("DELETE FROM batches WHERE number = ?", (number,))

    def sent(self, number: int, **ids: str) -> None:
        assert ids.keys() <= {"file_id", "batch_id"}
        for name, value in ids.items():
            self._db.execute(f"UPDATE batches SET {name} = ? WHERE number = ?", (value, number))

    def open_batches(self) -> list[OpenBatch]:
        query = "SELECT number, key, file_id, batch_id FROM batches WHERE NOT done ORDER BY number"
        return [OpenBatch(*row) for row in self._db.execute(query)]

    def asked(self, number: int) -> Iterator[Try]:
        """A batch's tries that have no result, in the order of its file."""
        return self._tries("t.state = 'asked' AND t.batch = ? ORDER BY t.place", number)

    def first_asked(self, number: int, place: int) -> int | None:
        """The place of a batch's first try without a result, from this one on."""
        query = "SELECT min(place) FROM tries WHERE state = 'asked' AND batch = ? AND place >= ?"
        found = self._db.execute(query, (number, place)).fetchone()[0]
        return None if found is None else int(found)

    def num_asked(self, number: int) -> int:
        """A batch's tries that have no result."""
        query = "SELECT count(*) FROM tries WHERE state = 'asked' AND batch = ?"
        return int(self._db.execute(query, (number,)).fetchone()[0])

    def try_of(self, row: int, sample: int, round_: int) -> Try:
        where = "t.row = ? AND t.sample = ? AND t.round = ?"
        return next(self._tries(where, row, sample, round_))

    def one(self, row: int, sample: int, round_: int) -> tuple[Try, Result] | None:
        where = "t.row = ? AND t.sample = ? AND t.round = ?"
        return next(self._results(where, row, sample, round_), None)

    def last_round(self, row: int, sample: int) -> int | None:
        query = "SELECT max(round) FROM tries WHERE row = ? AND sample = ?"
        found = self._db.execute(query, (row, sample)).fetchone()[0]
        return None if found is None else int(found)

    def record(self, batch: int, results: Iterable[Result], *, done: bool = False) -> list[Result]:
        """Those that were new. What is `redone` gets another try. A try that has a result keeps
        it."""
        new = []
        with self.transaction():
            for each in results:
                key = (each.row, each.sample, each.round)
                changed = self._db.execute(
                    "UPDATE tries SET state = ?, kind = ?, reason = ?, output = ?, details = ?,"
                    " prompt_tokens = ?, completion_tokens = ?"
                    " WHERE row = ? AND sample = ? AND round = ? AND state = 'asked' AND batch = ?",
                    (each.state, each.kind, each.reason, each.output,
                     json.dumps(each.details, ensure_ascii=False), each.prompt_tokens,
                     each.completion_tokens, *key, batch),
                )  # fmt: skip
                if not changed.rowcount:
                    continue
                new.append(each)
                if each.state == "redone":
                    self._plan_again(key, "rounds_left - 1")
            self._db.execute("UPDATE batches SET done = ? WHERE number = ?", (done, batch))
        return new

    def _plan_again(self, key: tuple[int, int, int], rounds_left: str) -> None:
        self._db.execute(
            "INSERT INTO tries (row, sample, round, state, rounds_left)"
            f" SELECT row, sample, round + 1, 'planned', {rounds_left} FROM tries"
            " WHERE row = ? AND sample = ? AND round = ?", key,
        )  # fmt: skip

    def retry(self, *, rounds: int, not_kinds: Sequence[str] = ()) -> int:
        """Plan another try for each sample that was not delivered; how many."""
        marks = ", ".join("?" * len(not_kinds))
        with self.transaction():
            some = self._db.execute(
                "SELECT row, sample, round FROM tries WHERE state IN ('invalid', 'failed')"
                f" AND coalesce(kind, '') NOT IN ({marks})", tuple(not_kinds),
            ).fetchall()  # fmt: skip
            for key in some:
                self._plan_again(key, str(int(rounds)))
                self._db.execute(
                    "UPDATE tries SET state = 'redone' WHERE row = ? AND sample = ? AND round = ?",
                    key,
                )
            self._db.execute("DELETE FROM shards")
        return len(some)

    # -- what has come of it

    def counts(self) -> dict[tuple[str, int, str | None], tuple[int, int, int]]:
        """By state, round and kind: tries, prompt tokens, completion tokens."""
        query = (
            "SELECT state, round, kind, count(*), sum(prompt_tokens), sum(completion_tokens)"
            " FROM tries GROUP BY state, round, kind"
        )
        return {(row[0], row[1], row[2]): row[3:] for row in self._db.execute(query)}

    def saved_tokens(self) -> int:
        """Of tries that took the answer of another."""
        query = (
            "SELECT coalesce(sum(json_extract(details, '$.saved_tokens')), 0) FROM tries"
            " WHERE details LIKE '%\"saved_tokens\"%'"
        )
        return int(self._db.execute(query).fetchone()[0])

    def is_settled(self, first: int, end: int) -> bool:
        """Whether no sample of these rows is open."""
        query = (
            "SELECT 1 FROM tries WHERE row >= ? AND row < ?"
            " AND state IN ('planned', 'asked') LIMIT 1"
        )
        return self._db.execute(query, (first, end)).fetchone() is None

    def results(
        self, states: Sequence[str], first: int = 0, end: int = 2**62
    ) -> Iterator[tuple[Try, Result]]:
        """In input order."""
        marks = ", ".join("?" * len(states))
        where = (
            f"t.row >= ? AND t.row < ? AND t.state IN ({marks}) ORDER BY t.row, t.sample, t.round"
        )
        return self._results(where, first, end, *states)

    # -- shards

    def shards(self) -> dict[int, dict[str, Any]]:
        query = "SELECT number, name, num_rows, bytes, sha256 FROM shards ORDER BY number"
        names = ("name", "rows", "bytes", "sha256")
        return {row[0]: dict(zip(names, row[1:], strict=True)) for row in self._db.execute(query)}

    def shard_written(
        self, number: int, name: str, num_rows: int, num_bytes: int, sha256: str
    ) -> None:
        values = (number, name, num_rows, num_bytes, sha256)
        self._db.execute("INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?, ?)", values)

    def _tries(self, where: str, *values: Any) -> Iterator[Try]:
        query = f"SELECT {_TRY} FROM tries t JOIN rows r ON r.number = t.row WHERE {where}"
        for row in self._each(query, *values):
            yield _try(row)

    def _results(self, where: str, *values: Any) -> Iterator[tuple[Try, Result]]:
        query = (
            f"SELECT {_TRY}, t.state, t.kind, t.reason, t.output, t.details, t.prompt_tokens,"
            f" t.completion_tokens FROM tries t JOIN rows r ON r.number = t.row WHERE {where}"
        )
        for row in self._each(query, *values):
            each = _try(row)
            yield each, Result(
                row=each.row, sample=each.sample, round=each.round, state=row[6], kind=row[7],
                reason=row[8], output=row[9], details=json.loads(row[10] or "{}"),
                prompt_tokens=row[11], completion_tokens=row[12],
            )  # fmt: skip

    def _each(self, query: str, *values: Any) -> Iterator[Any]:
        """Rows of a cursor of its own, some at a time."""
        with closing(self._db.cursor()) as cursor:
            cursor.arraysize = 256
            cursor.execute(query, values)
            yield from cursor


def _try(row: Any) -> Try:
    return Try(row[0], row[1], row[2], row[3], row[4], json.loads(row[5]))


def failures(counts: dict[tuple[str, int, str | None], tuple[int, int, int]]) -> Counter[str]:
    """By kind: what was not delivered in the end."""
    found: Counter[str] = Counter()
    for (state, _, kind), (num, _, _) in counts.items():
        if state in ("invalid", "failed"):
            found[kind or state] += num
    return found
