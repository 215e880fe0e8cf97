"""What an output must be to be delivered, and what is flagged in it."""

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema

from bulk.errors import SpecError
from bulk.spec import Check, Length, Spec

REPEATS, LONGEST_PATTERN, LEAST_REPEATED = 4, 200, 48  # characters; a tail that goes in circles
SHOWN = 300

# the text, the row's columns, the flags: what is wrong with it; None: nothing is
Fault = Callable[[str, Mapping[str, Any], list[str]], str | None]


class Judge:
    """Raises SpecError for a check that cannot be made. Files are told from the folder."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self._checks = [
            (kind, _fault(kind, check, f"validate[{i}]", folder))
            for i, check in enumerate(spec.validate)
            for kind in check.__struct_fields__
            if getattr(check, kind) is not None
        ]

    def __call__(
        self, text: str, values: Mapping[str, Any], flags: list[str]
    ) -> tuple[str, str] | None:
        """Kind and reason of the first fault."""
        for kind, find in self._checks:
            if reason := find(text, values, flags):
                return kind, reason[:SHOWN]
        return None


def flags_of(text: str, finish_reason: str | None, stop_reason: object) -> list[str]:
    flags = []
    if finish_reason in ("length", "deadline"):
        flags.append("truncated")
    if stop_reason == "repetition_detected" or repeats(text):
        flags.append("repetition")
    return flags


def repeats(text: str) -> bool:
    """Whether it ends in one pattern over and over."""
    tail = text.rstrip()[-REPEATS * LONGEST_PATTERN :]
    for size in range(1, LONGEST_PATTERN + 1):
        length = max(REPEATS * size, LEAST_REPEATED)
        if length <= len(tail) and tail[-length:-size] == tail[size - length :]:
            return True
    return False


def _fault(kind: str, check: Check, field: str, folder: Path) -> Fault:
    if check.json_schema is not None:
        return _schema(check.json_schema, f"{field}.json_schema")
    if check.regex is not None:
        return _regex(check.regex, f"{field}.regex")
    if check.length is not None:
        return _length(check.length)
    if check.python is not None:
        return _python(check.python, f"{field}.python", folder)
    unwanted = set(check.no_flags or ())

    def flagged(text: str, values: Mapping[str, Any], flags: list[str]) -> str | None:
        found = sorted(unwanted & set(flags))
        return f"it is flagged: {', '.join(found)}" if found else None

    return flagged


def _schema(schema: dict[str, Any], field: str) -> Fault:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise SpecError(f"{field} is no JSON schema: {error.message[:SHOWN]}") from None
    validator = kind(schema)

    def find(text: str, values: Mapping[str, Any], flags: list[str]) -> str | None:
        try:
            value = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return f"it is not JSON: {error}"
        try:
            fault = jsonschema.exceptions.best_match(validator.iter_errors(value))
        except jsonschema.exceptions._WrappedReferencingError as error:
            raise SpecError(f"{field} refers to what is not there: {error}") from None
        return None if fault is None else f"{fault.json_path}: {fault.message}"

    return find


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def _regex(pattern: str, field: str) -> Fault:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise SpecError(f"{field} does not compile: {error}") from None
    return lambda text, values, flags: (
        None if compiled.fullmatch(text) else f"it does not match {pattern}"
    )


def _length(length: Length) -> Fault:
    def find(text: str, values: Mapping[str, Any], flags: list[str]) -> str | None:
        for num, unit, least, most in (
            (len(text), "characters", length.min_chars, length.max_chars),
            (len(text.split()), "words", length.min_words, length.max_words),
        ):
            if num < least:
                return f"it has {num} {unit}, at least {least} are wanted"
            if most is not None and num > most:
                return f"it has {num} {unit}, at most {most} are wanted"
        return None

    return find


def _python(entry: str, field: str, folder: Path) -> Fault:
    """`function(text, row)` of a module or a file: True or None is good, a text says why not."""
    where, _, name = entry.rpartition(":")
    try:
        if where.endswith(".py"):
            found = importlib.util.spec_from_file_location(
                f"dataset_{Path(where).stem}", folder / where
            )
            assert found is not None
            assert found.loader is not None
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
        else:
            if str(folder.resolve()) not in sys.path:
                sys.path.insert(0, str(folder.resolve()))
            module = importlib.import_module(where)
        function = getattr(module, name)
    except Exception as error:  # noqa: BLE001 - whatever that file does
        raise SpecError(f"{field}: {entry} cannot be loaded: {error}") from None

    def find(text: str, values: Mapping[str, Any], flags: list[str]) -> str | None:
        try:
            answer = function(text, dict(values))
        except Exception as error:  # noqa: BLE001 - then the row is not good
            return f"{name} raised {type(error).__name__}: {error}"
        if answer is None or answer is True:
            return None
        return answer if isinstance(answer, str) else f"{name} says it is not good"

    return find
