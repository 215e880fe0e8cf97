"""Values on their way into and out of SQL: JSON columns, and a list of rows as one argument.

`given` lets one constant statement act on any number of rows. PostgreSQL takes an array for each
column, SQLite one JSON text: no limit on variables, nothing compiled anew for each batch size.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Double,
    Select,
    Table,
    Text,
    bindparam,
    column,
    func,
    literal_column,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.types import TypeEngine

_TYPES: dict[type, TypeEngine[Any]] = {str: Text(), int: BigInteger(), float: Double()}


@dataclass(frozen=True, slots=True)
class Given:
    """Rows to join with: the columns for the statement, the parameters for its execution."""

    columns: Mapping[str, ColumnElement[Any]]
    parameters: Mapping[str, Any]

    def __getitem__(self, name: str) -> ColumnElement[Any]:
        return self.columns[name]


def given(
    connection: Connection, columns: Mapping[str, type], rows: Sequence[tuple[Any, ...]]
) -> Given:
    """`rows` as a table called given; each row has its values in the order of `columns`."""
    dialect = connection.dialect.name
    if dialect == "postgresql":
        arrays = zip(*rows, strict=True) if rows else ([] for _ in columns)
        parameters = {f"given_{name}": list(a) for name, a in zip(columns, arrays, strict=True)}
        return Given(given_columns(dialect, columns), parameters)
    return Given(given_columns(dialect, columns), {"given": json.dumps(rows)})


# made once: it takes longer than many a statement that they are part of


def given_columns(dialect: str, columns: Mapping[str, type]) -> Mapping[str, ColumnElement[Any]]:
    """What a statement that is made once has of rows to be given to it."""
    return (_arrays if dialect == "postgresql" else _json)(tuple(columns.items()))


@cache
def _arrays(columns: tuple[tuple[str, type], ...]) -> Mapping[str, ColumnElement[Any]]:
    table = (
        func.unnest(
            *(bindparam(f"given_{name}", type_=ARRAY(_TYPES[kind])) for name, kind in columns)
        )
        .table_valued(*(column(name, _TYPES[kind]) for name, kind in columns), name="given")
        .render_derived()
    )
    return {name: table.c[name] for name, _ in columns}


@cache
def _json(columns: tuple[tuple[str, type], ...]) -> Mapping[str, ColumnElement[Any]]:
    each = func.json_each(bindparam("given", type_=Text())).table_valued("value")
    # materialized: else SQLite extracts a value anew for each use, and may join jobs first
    extracted = (
        select(
            *(
                func.json_extract(
                    each.c.value, literal_column(f"'$[{i}]'"), type_=_TYPES[kind]
                ).label(name)
                for i, (name, kind) in enumerate(columns)
            )
        )
        .cte("given")
        .prefix_with("MATERIALIZED")
    )
    return {name: extracted.c[name] for name, _ in columns}


def insert_into(connection: Connection, table: Table) -> Any:
    """An INSERT that may have ON CONFLICT in it, in the dialect of the connection."""
    return inserting(connection.dialect.name, table)


def inserting(dialect: str, table: Table) -> Any:
    """The same, for a statement that is made once."""
    return (postgresql if dialect == "postgresql" else sqlite).insert(table)


def picked(candidates: Select[str]) -> Select[str]:
    """Ids picked once, before the statement around them changes any row.

    PostgreSQL may run a plain subquery with LIMIT once for every row it joins with: each run finds
    other rows to take, and the limit holds for none.
    """
    cte = candidates.cte("picked").prefix_with("MATERIALIZED")
    return select(cte.c.id)


def encode(value: object) -> str:
    """JSON text that both databases store and give back exactly, U+0000 and all.

    Control characters are escaped by JSON itself. A lone surrogate is no UTF-8: only then is the
    rest of the text escaped too. Raises ValueError on NaN and infinity.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text


def decode(text: str | None) -> Any:
    """The value behind a JSON column; None for null."""
    return None if text is None else json.loads(text)
