"""What form an output must have: a JSON schema, a regular expression, a choice or a grammar.

Only what can be judged in no time is judged here, so that a door may do it: kind, sizes, depth.
Whether a schema or a grammar can be used is found out where that can be killed (engine.structured).
"""

import json
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from engine.parameter_error import ParameterError

MAX_SCHEMA_BYTES = 65_536
MAX_GRAMMAR_BYTES = 65_536
MAX_REGEX_BYTES = 8_192
MAX_WHITESPACE_BYTES = 256
MAX_CHOICES = 1_000
MAX_CHOICE_BYTES = 65_536  # of all choices together, as a JSON list
MAX_DEPTH = 64  # of a schema's objects and lists, of brackets in a regex or a grammar

# At one place of a JSON text: two spaces, or a new line with its indentation. A model that has lost
# its way writes white space for ever where it may.
BOUNDED_WHITESPACE = r"[ ]{1,2}|\n([ ]{0,16}|\t{0,8})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form of every sample of a request. Raises ParameterError naming `param`.

    For `json` the text is a schema, for `choice` a JSON list of strings.
    """

    KINDS: ClassVar = ("json", "regex", "choice", "grammar")

    kind: str
    text: str
    whitespace: str = BOUNDED_WHITESPACE  # regex of what may stand between JSON's tokens; "": none
    param: str = "structured_outputs"  # the field it came in

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            self._refuse(f"must be one of {', '.join(self.KINDS)}, got {self.kind!r:.100}")
        match self.kind:
            case "json":
                self._check_schema()
            case "choice":
                self._check_choice()
            case "regex":
                self._check_pattern("regex", MAX_REGEX_BYTES)
            case _:
                self._check_pattern("grammar", MAX_GRAMMAR_BYTES)
        if self._num_bytes(self.whitespace) > MAX_WHITESPACE_BYTES:
            raise ParameterError(
                "structured_outputs.whitespace_pattern",
                f"whitespace_pattern may have at most {MAX_WHITESPACE_BYTES} bytes, "
                f"got {self._num_bytes(self.whitespace)}",
            )

    def _refuse(self, message: str) -> NoReturn:
        raise ParameterError(self.param, f"{self.param} {message}")

    def _num_bytes(self, text: str) -> int:
        if not isinstance(text, str):
            self._refuse(f"must be text, got {type(text).__name__}")
        try:
            return len(text.encode())
        except UnicodeEncodeError as error:
            self._refuse(f"is not valid Unicode: {error}")

    def _check_size(self, what: str, limit: int) -> None:
        num_bytes = self._num_bytes(self.text)
        if num_bytes > limit:
            self._refuse(f"{what} may have at most {limit} bytes, got {num_bytes}")

    def _check_schema(self) -> None:
        self._check_size("schema", MAX_SCHEMA_BYTES)
        try:
            schema = json.loads(self.text)
        except (ValueError, RecursionError):
            self._refuse("schema is not JSON")
        if not isinstance(schema, dict):
            self._refuse("schema must be an object")
        if _depth(schema) > MAX_DEPTH:
            self._refuse(f"schema may be at most {MAX_DEPTH} levels deep")

    def _check_pattern(self, what: str, limit: int) -> None:
        self._check_size(what, limit)
        if not self.text:
            self._refuse(f"{what} must not be empty")
        if "\0" in self.text:
            self._refuse(f"{what} must not hold a null character")
        # brackets that stand for themselves count too: a limit has to be simple
        depth = deepest = 0
        for letter in self.text:
            depth += (letter in "([{") - (letter in ")]}" and depth > 0)
            deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            self._refuse(f"{what} may have brackets at most {MAX_DEPTH} deep, got {deepest}")

    def _check_choice(self) -> None:
        self._check_size("choice", MAX_CHOICE_BYTES)
        try:
            choices = json.loads(self.text)
        except (ValueError, RecursionError):
            choices = None
        if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
            self._refuse("choice must be a list of strings")
        if not 1 <= len(choices) <= MAX_CHOICES:
            self._refuse(f"choice must have 1 to {MAX_CHOICES} entries, got {len(choices)}")
        if not all(choices):
            self._refuse("choice must not hold an empty string")


def _depth(value: object) -> int:
    """Levels of a JSON value, without recursion: it may be as deep as its reader let through."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [
            inner for each in level for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return depth
