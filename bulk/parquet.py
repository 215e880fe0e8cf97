"""A Parquet file of records, and the schema that all shards of a dataset share."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 1000  # looked at, or put into a row group, together
AS_JSON = {b"tokenmill": b"json"}  # of a column whose values are of several kinds

Record = dict[str, Any]


def schema_of(records: Iterable[Record]) -> pa.Schema:
    """The kinds of all their values; a column of kinds that do not go together is JSON text."""
    found: dict[str, pa.DataType] = {}
    mixed: set[str] = set()
    for some in _parts(records):
        for name in dict.fromkeys(name for record in some for name in record):
            try:
                kind = pa.array([record.get(name) for record in some]).type
                if name in found:
                    both = [pa.schema([(name, found[name])]), pa.schema([(name, kind)])]
                    kind = pa.unify_schemas(both, promote_options="permissive").field(0).type
                found[name] = kind
            except (pa.ArrowException, OverflowError):
                mixed.add(name)
                found.setdefault(name, pa.string())
    mixed |= {name for name, kind in found.items() if _has_no_fields(kind)}
    return pa.schema(
        pa.field(name, pa.string(), metadata=AS_JSON)
        if name in mixed
        else pa.field(name, pa.string() if kind == pa.null() else kind)
        for name, kind in found.items()
    )


def write_parquet(path: Path, records: Iterable[Record], schema: pa.Schema) -> int:
    as_json = [field.name for field in schema if field.metadata == AS_JSON]
    num = 0
    with pq.ParquetWriter(path, schema) as writer:
        for some in _parts(records):
            for name in as_json:
                for record in some:
                    if record.get(name) is not None:
                        record[name] = json.dumps(record[name], ensure_ascii=False)
            columns = [
                _column([record.get(field.name) for record in some], field.type) for field in schema
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            num += len(some)
    return num


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_floating(kind):  # Arrow takes no integer that is none of its floats
        values = [None if value is None else float(value) for value in values]
    return pa.array(values, kind)


def _has_no_fields(kind: pa.DataType) -> bool:
    """Parquet has no word for it."""
    if pa.types.is_struct(kind):
        return kind.num_fields == 0 or any(_has_no_fields(field.type) for field in kind)
    return pa.types.is_list(kind) and _has_no_fields(kind.value_type)


def _parts(records: Iterable[Record]) -> Iterator[list[Record]]:
    some: list[Record] = []
    for record in records:
        some.append(record)
        if len(some) == ROWS:
            yield some
            some = []
    if some:
        yield some
