"""Rows of a dataset's input, one after another, whatever form they come in and however many.

Nothing is held but a row, and of Parquet and Arrow the few hundred that lie together. A fault names
the file, and its line or row.
"""

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from bulk import arrow_rows
from bulk.errors import InputError, SpecError
from bulk.spec import Format, Input
from jobs import strict_json
from jobs.lines import lines_of

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
PACKED = (".gz", ".zst")
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".arrow": "arrow",
}  # fmt: skip
# what reading a file may raise, packed ones' faults among it
UNREADABLE = (OSError, EOFError, zlib.error, pa.ArrowException)
REQUEST_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Row:
    number: int  # from 0, over all files
    place: str  # for messages: "facts.csv line 3"
    values: dict[str, Any]  # JSON's kinds of values


@dataclass(frozen=True, slots=True)
class Source:
    """The files of an input, in their order."""

    format: Format
    paths: tuple[Path, ...]
    options: Input

    def rows(self) -> Iterator[Row]:
        """Raises InputError at the first row that is none."""
        read = {
            "jsonl": _json_rows, "requests": _request_rows, "csv": _csv_rows,
            "parquet": arrow_rows.parquet_rows, "arrow": arrow_rows.arrow_rows,
        }[self.format]  # fmt: skip
        number = 0
        for path in self.paths:
            try:
                for place, values in read(path, self.options):
                    yield Row(number, f"{path.name} {place}", values)
                    number += 1
            except UNREADABLE as error:
                raise InputError(f"{path} cannot be read: {error}") from None
        if not number:
            raise InputError(f"{', '.join(map(str, self.paths[:3]))}: the input has no rows")


def find_source(options: Input, folder: Path) -> Source:
    """Its files, told from the spec in `folder`. Raises SpecError and InputError."""
    found: list[tuple[Format, Path]] = []
    for name in options.paths:
        path = folder / name
        if path.is_dir():
            found += [(_format_of(each), each) for each in arrow_rows.folder_files(path, options)]
        elif path.is_file():
            found.append((options.format or _format_of(path), path))
        else:
            raise InputError(f"{path}: no such file or folder")
    formats = {options.format or each for each, _ in found}
    if len(formats) != 1:
        raise SpecError(f"input.path: files of one format are wanted, got {sorted(formats)}")
    return Source(formats.pop(), tuple(path for _, path in found), options)


def _format_of(path: Path) -> Format:
    suffixes = [suffix for suffix in path.suffixes if suffix not in PACKED]
    if not suffixes or suffixes[-1] not in FORMATS:
        raise SpecError(
            f"input.format is needed: the name {path.name} ends in none of {', '.join(FORMATS)}"
        )
    return FORMATS[suffixes[-1]]


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked if it is gzip or Zstandard by its first bytes."""
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith(GZIP):
        with gzip.open(path, "rb") as unpacked:
            yield unpacked  # type: ignore[misc]
    elif head == ZSTD:
        with pa.OSFile(str(path), "rb") as packed:
            stream = pa.CompressedInputStream(packed, "zstd")
            yield io.BufferedReader(stream)
    else:
        with path.open("rb") as file:
            yield file


def _json_rows(path: Path, options: Input) -> Iterator[tuple[str, dict[str, Any]]]:
    with open_plain(path) as file:
        for line in lines_of(file, options.max_row_bytes):
            place = f"line {line.number}"
            if line.data is None:
                raise _too_long(path, line.number, options)
            try:
                values = strict_json.loads(line.data)
            except strict_json.JSONError as error:
                raise InputError(f"{path} {place}: {str(error)[:300]}") from None
            if not isinstance(values, dict):
                raise InputError(f"{path} {place}: a row must be a JSON object")
            yield place, _chosen(values, options)


def _request_rows(path: Path, options: Input) -> Iterator[tuple[str, dict[str, Any]]]:
    for place, values in _json_rows(path, options):
        fault = None
        if unknown := values.keys() - set(REQUEST_FIELDS):
            fault = f"{min(unknown)[:100]} is not a field of a request"
        elif not isinstance(values.get("custom_id"), str) or not values["custom_id"]:
            fault = "custom_id must be a string, and not empty"
        elif values.get("method", "POST") != "POST":
            fault = "method must be POST"
        elif not isinstance(values.get("url"), str):
            fault = "url must be a string"
        elif not isinstance(values.get("body"), dict):
            fault = "body must be an object"
        if fault:
            raise InputError(f"{path} {place}: {fault}")
        yield place, values


def _csv_rows(path: Path, options: Input) -> Iterator[tuple[str, dict[str, Any]]]:
    delimiter = options.delimiter or ("\t" if ".tsv" in path.suffixes else ",")
    csv.field_size_limit(options.max_row_bytes)
    with open_plain(path) as file:
        lines = _CsvLines(path, file, options)
        reader = csv.reader(lines, strict=True, delimiter=delimiter)
        header: list[str] | None = None
        while True:
            first = lines.number + 1
            lines.num_bytes = 0
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise InputError(f"{path} line {first}: {error}") from None
            if not fields:
                continue
            if header is None:
                header = _header(path, fields, options)
            elif len(fields) != len(header):
                raise InputError(
                    f"{path} line {first}: {len(fields)} fields, where the header has {len(header)}"
                )
            else:
                values = dict(zip(header, fields, strict=True))
                yield f"line {first}", _chosen(values, options)


def _header(path: Path, names: list[str], options: Input) -> list[str]:
    if missing := set(options.columns or ()) - set(names):
        raise InputError(f"{path} has no column {min(missing)!r} (input.columns)")
    for name in names:
        if not name or names.count(name) > 1:
            what = f"the column {name!r} stands there twice" if name else "a column has no name"
            raise InputError(f"{path} line 1: {what}")
    return names


class _CsvLines:
    """Lines as text, none longer than a row may be, nor a row of many lines."""

    def __init__(self, path: Path, file: BinaryIO, options: Input) -> None:
        self.number = 0
        self.num_bytes = 0  # of the row that is being read
        self._path = path
        self._file = file
        self._options = options

    def __iter__(self) -> "_CsvLines":
        return self

    def __next__(self) -> str:
        data = self._file.readline(self._options.max_row_bytes + 1)
        if not data:
            raise StopIteration
        self.number += 1
        self.num_bytes += len(data)
        if self.num_bytes > self._options.max_row_bytes:
            raise _too_long(self._path, self.number, self._options)
        if self.number == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            where = f"{self._path} line {self.number}"
            raise InputError(f"{where}: not UTF-8 at byte {error.start}") from None


def _too_long(path: Path, number: int, options: Input) -> InputError:
    return InputError(
        f"{path} line {number}: a row may have at most {options.max_row_bytes} bytes "
        "(input.max_row_bytes)"
    )


def _chosen(values: dict[str, Any], options: Input) -> dict[str, Any]:
    if options.columns is None:
        return values
    return {name: values[name] for name in options.columns if name in values}


def row_bytes(values: dict[str, Any]) -> bytes:
    """As it is kept."""
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
