"""What was delivered, as files in input order with the input's columns: JSON lines, CSV, Parquet.

A shard has the samples of a range of input rows; it is written as soon as none of them is open.
"""

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from bulk.atomic import written
from bulk.parquet import schema_of, write_parquet
from bulk.requests import Requests
from bulk.spec import Spec
from bulk.state import ENDED, State, Try

REJECTS = "rejects.jsonl"
# what is known about an output, as its column of details has it
DETAILS = {
    "row": pa.int64(), "sample": pa.int32(), "round": pa.int32(), "attempt": pa.int32(),
    "model": pa.string(), "model_fingerprint": pa.string(), "parameters": pa.string(),
    "seed": pa.int64(), "finish_reason": pa.string(), "flags": pa.list_(pa.string()),
    "prompt_tokens": pa.int64(), "completion_tokens": pa.int64(), "cached_tokens": pa.int64(),
    "saved_tokens": pa.int64(),
    "queue_s": pa.float64(), "ttft_s": pa.float64(), "tpot_s": pa.float64(),
    "total_s": pa.float64(),
}  # fmt: skip

Record = dict[str, Any]


class Outputs:
    def __init__(self, spec: Spec, state: State, folder: Path) -> None:
        self._spec = spec
        self._state = state
        self._folder = folder
        self._requests = Requests(spec)

    def write_settled(self) -> None:
        """Every shard whose samples have all ended and that is not there yet."""
        num_rows = self._state.fact("num_rows")
        step = self._spec.output.rows_per_shard
        num_shards = -(-num_rows // step)
        there = self._state.shards()
        for number in range(num_shards):
            if number in there:
                continue
            first, end = number * step, min((number + 1) * step, num_rows)
            if self._state.is_settled(first, end):
                name = f"data-{number:05}-of-{num_shards:05}.{self._spec.output.format}"
                num = self.write(self._folder / name, first=first, end=end)
                size, sha256 = measured(self._folder / name)
                self._state.shard_written(number, name, num, size, sha256)

    def write(
        self, path: Path, *, form: str | None = None, first: int = 0, end: int = 2**62
    ) -> int:
        """What these rows have delivered so far; how many samples."""
        form = form or self._spec.output.format
        records = self._records(first, end)
        with written(path) as draft:
            if form == "parquet":
                return write_parquet(draft, records, self._schema)
            if form == "csv":
                return _write_csv(draft, records, self._columns, self._spec.output.details)
            return _write_jsonl(draft, records)

    def write_rejects(self) -> int:
        """What was not delivered, each with its reason; how many samples."""
        states = tuple(state for state in ENDED if state != "delivered")
        records = (
            self._kept(each.values) | {
                "kind": result.kind, "reason": result.reason,
                self._spec.output.column: result.output,
                self._spec.output.details: self._details(result.details, each),
            }
            for each, result in self._state.results(states)
        )  # fmt: skip
        with written(self._folder / REJECTS) as draft:
            return _write_jsonl(draft, records)

    def _records(self, first: int, end: int) -> Iterator[Record]:
        for each, result in self._state.results(("delivered",), first, end):
            yield self._kept(each.values) | {
                self._spec.output.column: result.output,
                self._spec.output.details: self._details(result.details, each),
            }

    def _kept(self, values: Record) -> Record:
        if self._spec.prompt is None:  # requests
            return {"custom_id": values["custom_id"]}
        return values

    def _details(self, details: Record, each: Try) -> Record:
        model = self._state.fact("model") or {}
        parameters = self._requests.parameters(each.values)
        known = details | {
            "row": each.row, "sample": each.sample, "round": each.round,
            "model": self._spec.model, "model_fingerprint": model.get("fingerprint"),
            "parameters": json.dumps(parameters, ensure_ascii=False, sort_keys=True),
        }  # fmt: skip
        return {name: known.get(name) for name in DETAILS}

    @property
    def _columns(self) -> list[str]:
        """Of the input, those of any row, in the order they come up; looked for once."""
        found = self._state.fact("columns")
        if found is None:
            columns: dict[str, None] = {}
            for values in self._state.contents():
                columns.update(dict.fromkeys(self._kept(values)))
            found = list(columns)
            self._state.note(columns=found)
        return [*found, self._spec.output.column, self._spec.output.details]

    @property
    def _schema(self) -> pa.Schema:
        """Of Parquet: one for all shards; looked for once."""
        found = self._state.fact("schema")
        if found is None:
            found = schema_of(map(self._kept, self._state.contents()))
            found = found.serialize().to_pybytes().hex()
            self._state.note(schema=found)
        schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(found)))
        schema = schema.append(pa.field(self._spec.output.column, pa.string()))
        return schema.append(pa.field(self._spec.output.details, pa.struct(list(DETAILS.items()))))


def measured(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _write_jsonl(path: Path, records: Iterable[Record]) -> int:
    num = 0
    with path.open("wb") as file:
        for record in records:
            text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
            file.write(text.encode() + b"\n")
            num += 1
    return num


def _write_csv(path: Path, records: Iterable[Record], columns: list[str], details: str) -> int:
    """Details have a column each; what is no text or number is JSON."""
    kept = [name for name in columns if name != details]
    num = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*kept, *(f"{details}.{name}" for name in DETAILS)])
        for record in records:
            values = [record.get(name) for name in kept]
            writer.writerow(map(_cell, [*values, *record[details].values()]))
            num += 1
    return num


def _cell(value: object) -> object:
    plain = value is None or (isinstance(value, str | int | float) and not isinstance(value, bool))
    return value if plain else json.dumps(value, ensure_ascii=False)
