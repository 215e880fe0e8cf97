"""Rows of Parquet and Arrow files, and which files a Hugging Face dataset folder is made of.

Values become what JSON has: times and decimals are text, NaN is null. Bytes are refused by the name
of their column: a prompt is text.
"""

import json
import math
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bulk.errors import InputError
from bulk.spec import Input

ROWS = 256  # looked at together
DATA_FILES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".csv", ".tsv")


def parquet_rows(path: Path, options: Input) -> Iterator[tuple[str, dict[str, Any]]]:
    with pq.ParquetFile(path) as file:
        columns = _columns(path, file.schema_arrow.names, options)
        yield from _rows(path, file.iter_batches(ROWS, columns=columns), options)


def arrow_rows(path: Path, options: Input) -> Iterator[tuple[str, dict[str, Any]]]:
    with pa.memory_map(str(path)) as file:
        try:  # as the datasets library writes them
            batches: Any = pa.ipc.open_stream(file)
            schema = batches.schema
        except pa.ArrowInvalid:
            file.seek(0)
            opened = pa.ipc.open_file(file)
            schema = opened.schema
            batches = map(opened.get_batch, range(opened.num_record_batches))
        columns = _columns(path, schema.names, options)
        parts = (
            batch.select(columns).slice(start, ROWS)
            for batch in batches
            for start in range(0, batch.num_rows, ROWS)
        )
        yield from _rows(path, parts, options)


def folder_files(folder: Path, options: Input) -> list[Path]:
    """Of a folder that the datasets library saved, or of one as the hub has them."""
    splits = _read_json(folder / "dataset_dict.json")
    if splits is not None:
        names = [name for name in splits.get("splits", []) if isinstance(name, str)]
        wanted = options.split or (names[0] if len(names) == 1 else None)
        if wanted not in names:
            raise InputError(f"{folder}: input.split must be one of {', '.join(names)}")
        folder = folder / wanted
    state = _read_json(folder / "state.json")
    if state is not None:
        try:
            return [_inside(folder, each["filename"]) for each in state["_data_files"]]
        except (KeyError, TypeError):
            raise InputError(f"{folder / 'state.json'} names no _data_files") from None
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and any(suffix in DATA_FILES for suffix in path.suffixes)
        and (options.split is None or _is_of(path, folder, options.split))
    )  # fmt: skip
    if not found:
        what = f" of the split {options.split}" if options.split else ""
        raise InputError(f"{folder} holds no data files{what} ({', '.join(DATA_FILES)})")
    return found


def _is_of(path: Path, folder: Path, split: str) -> bool:
    names = path.relative_to(folder).parts
    return any(name == split or name.startswith((f"{split}-", f"{split}.")) for name in names)


def _inside(folder: Path, name: object) -> Path:
    if not isinstance(name, str) or Path(name).name != name:
        raise InputError(f"{folder / 'state.json'} names {name!r}, which is no file of the folder")
    return folder / name


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{path} is not a JSON object")
    return value


def _columns(path: Path, names: list[str], options: Input) -> list[str]:
    if len(set(names)) != len(names):
        raise InputError(f"{path}: two columns have one name")
    missing = set(options.columns or ()) - set(names)
    if missing:
        raise InputError(f"{path} has no column {min(missing)!r} (input.columns)")
    return names if options.columns is None else options.columns


def _rows(path: Path, batches: Any, options: Input) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    for batch in batches:
        names = batch.schema.names
        columns = [
            _values(column, f"{path} row {{}}: the column {name!r}", number + 1)
            for name, column in zip(names, batch.columns, strict=True)
        ]
        for fields in zip(*columns, strict=True):
            values = dict(zip(names, fields, strict=True))
            number += 1
            try:
                plain = {name: _plain(value) for name, value in values.items()}
            except TypeError as error:
                name = next(name for name, value in values.items() if not _is_plain(value))
                raise InputError(
                    f"{path} row {number}: the column {name!r} holds {error}; "
                    "name those you want in input.columns"
                ) from None
            if _size(plain) > options.max_row_bytes:
                raise InputError(
                    f"{path} row {number}: a row may have at most {options.max_row_bytes} bytes "
                    "(input.max_row_bytes)"
                )
            yield f"row {number}", plain


def _values(column: pa.Array, place: str, first: int) -> list[Any]:
    """As Python has them; `first` is the row of the first. Raises InputError."""
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):  # some of them are none of Python's
        pass
    values = []
    for number, scalar in enumerate(column, start=first):
        try:
            values.append(_value(scalar))
        except UnicodeDecodeError as error:
            raise InputError(f"{place.format(number)} is not UTF-8: {error.reason}") from None
        except (ValueError, OverflowError) as error:
            raise InputError(f"{place.format(number)} cannot be read: {error}") from None
    return values


def _value(scalar: pa.Scalar) -> Any:
    """Nanoseconds are more than Python's times have: they are text then."""
    kind = scalar.type
    if getattr(kind, "unit", None) != "ns" or not scalar.is_valid:
        return scalar.as_py()
    whole, rest = divmod(scalar.value, 1000)
    if pa.types.is_duration(kind):
        return scalar.value / 1e9
    if pa.types.is_timestamp(kind):
        moment, size = pa.scalar(whole, pa.timestamp("us", kind.tz)).as_py(), 26
    else:
        moment, size = pa.scalar(whole, pa.time64("us")).as_py(), 15
    text: str = moment.isoformat(timespec="microseconds")
    return f"{text[:size]}{rest:03}{text[size:]}" if rest else moment


def _size(values: dict[str, Any]) -> int:
    return sum(len(value) if isinstance(value, str) else 8 for value in values.values())


def _plain(value: Any) -> Any:
    """Raises TypeError for what is no value of JSON's."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(type(value).__name__)


def _is_plain(value: Any) -> bool:
    try:
        _plain(value)
    except TypeError:
        return False
    return True
