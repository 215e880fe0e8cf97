"""A dataset's spec: what `tokenmill dataset run` reads, field by field, and nothing else in it."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from bulk.errors import SpecError

MAX_SPEC_BYTES = 1 << 20
MAX_SAMPLES = 1000
SETS_SEEDS = ("seed", "n")  # parameters that the spec's own seed and samples decide

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Format = Literal["requests", "jsonl", "csv", "parquet", "arrow"]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Input(_Strict, frozen=True):
    """Where rows come from."""

    path: Name | Annotated[list[Name], Meta(min_length=1, max_length=10_000)]
    format: Format | None = None  # None: told by the name
    split: Name | None = None  # of a Hugging Face dataset folder that has several
    columns: Annotated[list[Name], Meta(min_length=1, max_length=1000)] | None = None
    delimiter: Annotated[str, Meta(min_length=1, max_length=1)] | None = None  # of CSV
    max_row_bytes: Annotated[int, Meta(ge=256, le=1 << 26)] = 1 << 20

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else self.path


class Length(_Strict, frozen=True):
    min_chars: Annotated[int, Meta(ge=0)] = 0
    max_chars: Annotated[int, Meta(ge=0)] | None = None
    min_words: Annotated[int, Meta(ge=0)] = 0
    max_words: Annotated[int, Meta(ge=0)] | None = None


class Check(_Strict, frozen=True):
    """What an output must be: one of these."""

    json_schema: dict[str, Any] | None = None
    regex: Name | None = None  # of the whole text
    length: Length | None = None
    python: Annotated[str, Meta(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    no_flags: Annotated[list[Literal["truncated", "repetition"]], Meta(min_length=1)] | None = None


class Repair(_Strict, frozen=True):
    """How a row whose output was refused is asked again."""

    rounds: Annotated[int, Meta(ge=0, le=20)] = 0
    how: Literal["reseed", "show_error"] = "reseed"
    message: Annotated[str, Meta(min_length=1)] = (
        "That answer was refused: {{ error }}. Answer again, with the answer alone."
    )


class Output(_Strict, frozen=True):
    path: Name  # a folder
    format: Literal["jsonl", "parquet", "csv"] = "jsonl"
    rows_per_shard: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000  # rows of the input
    column: Name = "output"
    details: Name = "generation"  # the column of what is known about the output


class Limits(_Strict, frozen=True):
    """Where a dataset stops before its end."""

    tokens: Annotated[int, Meta(ge=1, le=2**53)] | None = None  # prompts and outputs, all rounds
    error_rate: Annotated[float, Meta(ge=0, lt=1)] | None = None  # failed of ended, in a batch
    deadline_s: Annotated[int, Meta(ge=1, le=30 * 86_400)] | None = None  # since its first batch
    retention_s: Annotated[int, Meta(ge=3600, le=315_360_000)] | None = None  # in the service


class Spec(_Strict, frozen=True):
    model: Name
    input: Input
    output: Output
    endpoint: Literal["/v1/chat/completions", "/v1/completions"] = "/v1/chat/completions"
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    system: Annotated[str, Meta(min_length=1)] | None = None
    parameters: dict[Name, Any] = {}
    row_parameters: dict[Name, Name] = {}  # parameter: the column that has it
    samples: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    seed: Annotated[int, Meta(ge=0, le=2**62)] = 0
    validate: Annotated[list[Check], Meta(max_length=50)] = []
    repair: Repair = Repair()
    limits: Limits = Limits()
    priority: Annotated[int, Meta(ge=-10, le=10)] = -5
    dedupe: bool = False  # rows that ask for the same are generated once


def read_spec(path: Path) -> Spec:
    """Raises SpecError naming the field."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SPEC_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_SPEC_BYTES:
        raise SpecError(f"{path} is over {MAX_SPEC_BYTES} bytes")
    try:
        value = yaml.load(data, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise SpecError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SpecError(f"{path} is nested too deep") from None
    try:
        spec = msgspec.convert(value, Spec)
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: {error}".replace("`$.", "`").replace(" - at `$`", "")) from None
    _check(spec, path)
    return spec


def digest(spec: Spec) -> str:
    """Of what decides the rows that come out: limits may be raised, and the same dataset go on.

    Fields at their default are left out, so that one of a later version changes nothing.
    """
    fields = _given(spec)
    fields.pop("limits", None)
    fields.pop("priority", None)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _given(value: Any) -> Any:
    if isinstance(value, list):
        return [_given(each) for each in value]
    if not isinstance(value, _Strict):
        return value
    found = {}
    for field in msgspec.structs.fields(value):
        made = field.default_factory
        default = field.default if made is msgspec.NODEFAULT else made()
        if getattr(value, field.name) != default:
            found[field.name] = _given(getattr(value, field.name))
    return found


def _check(spec: Spec, path: Path) -> None:
    """What no single field shows."""

    def refuse(field: str, message: str) -> None:
        raise SpecError(f"{path}: {field} {message}")

    if spec.input.format == "requests":
        for field in ("prompt", "system"):
            if getattr(spec, field) is not None:
                refuse(field, "is not for an input of requests: they have their messages")
    elif spec.prompt is None:
        refuse("prompt", "is required: a Jinja template over the input's columns")
    if spec.system is not None and spec.endpoint != "/v1/chat/completions":
        refuse("system", "needs the endpoint /v1/chat/completions")
    for i, check in enumerate(spec.validate):
        given = [name for name in check.__struct_fields__ if getattr(check, name) is not None]
        if len(given) != 1:
            names = ", ".join(check.__struct_fields__)
            refuse(f"validate[{i}]", f"must be one of {names}; it has {', '.join(given) or 'none'}")
    if spec.repair.rounds and not spec.validate:
        refuse("repair", "needs something to validate")
    if spec.repair.how == "show_error" and spec.endpoint != "/v1/chat/completions":
        refuse("repair.how", "show_error needs the endpoint /v1/chat/completions")
    if spec.input.delimiter is not None and spec.input.delimiter in '"\r\n':
        refuse("input.delimiter", "must not be a quote, nor end a line")
    for field, value in _free(spec):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            refuse(field, "is no value of JSON's: a date or .nan stands there without quotes, say")
    if spec.output.column == spec.output.details:
        refuse("output.details", "must not be output.column, too")
    for field, parameters in (
        ("parameters", spec.parameters),
        ("row_parameters", spec.row_parameters),
    ):
        for name in parameters:
            if name in SETS_SEEDS:
                refuse(f"{field}.{name}", "is not a parameter here: the spec has seed and samples")
            if name in ("model", "messages", "prompt", "stream"):
                refuse(f"{field}.{name}", "is not a parameter: the spec decides it")


def _free(spec: Spec) -> Iterator[tuple[str, Any]]:
    """Values that may be anything JSON has; YAML has more."""
    for name, value in spec.parameters.items():
        yield f"parameters.{name}", value
    for i, check in enumerate(spec.validate):
        yield f"validate[{i}].json_schema", check.json_schema


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands there twice, of which YAML's own takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                line = key_node.start_mark.line + 1
                raise yaml.YAMLError(f"{key} stands there twice, again in line {line}")
            seen.add(key if isinstance(key, str) else id(key_node))
        return super().construct_mapping(node, deep)
