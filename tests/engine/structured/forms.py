"""Random schemas and regular expressions, with judges that share no code with the engine's."""

import datetime
import ipaddress
import json
import random
import re
import string
from collections.abc import Callable

import jsonschema

from engine.structured_outputs import StructuredOutputs

WORDS = ("red", "green", "blue", "été", "日本", "a b", 'say "x"', "back\\slash", "☃", "tab\tbed")
PATTERNS = (r"^[0-9]{3}$", r"^[A-Z][a-z]{1,4}$", r"^(ab|cd){1,3}$", r"^[é-ü]{1,3}$", r"^x?y+z?$")


def schema(rng: random.Random) -> dict:
    """A schema whose shortest values are short, with references into its own definitions."""
    definitions = {"name": _leaf(rng), "point": _object(rng, 1), "tree": _tree()}
    return {**_object(rng, 3, definitions), "$defs": definitions}


def _value(rng: random.Random, depth: int, definitions: dict) -> dict:
    kinds = ["leaf"] * 3 + (["object", "list", "tuple", "any"] if depth else [])
    match rng.choice(kinds + (["ref"] if definitions else [])):
        case "object":
            return _object(rng, depth - 1, definitions)
        case "list":
            low = rng.randrange(3)
            return {
                "type": "array",
                "items": _value(rng, depth - 1, definitions),
                "minItems": low,
                "maxItems": low + rng.randrange(3),
            }
        case "tuple":
            parts = [_value(rng, depth - 1, definitions) for _ in range(rng.randrange(1, 3))]
            size = len(parts)
            return {"type": "array", "prefixItems": parts, "minItems": size, "maxItems": size}
        case "any":
            return {"anyOf": [_value(rng, depth - 1, definitions) for _ in range(2)]}
        case "ref":
            return {"$ref": "#/$defs/" + rng.choice(sorted(definitions))}
    return _leaf(rng)


def _object(rng: random.Random, depth: int, definitions: dict | None = None) -> dict:
    names = rng.sample(
        ["a", "b2", "naïve", "key with space", "日", 'q"t', "zz"], rng.randrange(1, 4)
    )
    return {
        "type": "object",
        "properties": {name: _value(rng, depth, definitions or {}) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _tree() -> dict:
    return {
        "type": "object",
        "properties": {
            "v": {"type": "boolean"},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
        },
        "required": ["v"],
        "additionalProperties": False,
    }


def _leaf(rng: random.Random) -> dict:
    low = rng.randrange(-1000, 1000)
    return rng.choice([
        {"type": "string", "maxLength": rng.randrange(1, 8)},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "pattern": rng.choice(PATTERNS)},
        {"type": "string", "format": rng.choice(["date", "ipv4", "time"])},
        {"type": "integer", "minimum": low, "maximum": low + rng.randrange(5000)},
        {"type": "integer", "exclusiveMinimum": low, "multipleOf": rng.choice([3, 10])},
        {"type": "number", "minimum": low, "maximum": low + 2.5},
        {"type": ["boolean", "null"]},
        {"enum": rng.sample([*WORDS, 1, -2.5, None, True], 3)},
        {"const": rng.choice(WORDS)},
        {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
    ])  # fmt: skip


def pattern(rng: random.Random, depth: int = 2) -> str:
    """A regular expression that Python's `re` and Rust's read alike."""
    parts = []
    for _ in range(rng.randrange(1, 4)):
        atom = rng.choice([
            "".join(rng.choices(string.ascii_letters, k=rng.randrange(1, 4))), "[0-9]", "[a-fA-F]",
            "[^a-z]", "\\.", "é", "日", "[α-ω]", "☃", " ",
        ])  # fmt: skip
        if depth and rng.random() < 0.5:
            atom = f"({'|'.join(pattern(rng, depth - 1) for _ in range(rng.randrange(1, 3)))})"
        elif len(atom) > 1 and atom.isalnum():
            atom = f"(?:{atom})"
        parts.append(atom + rng.choice(["", "", "?", "{1,3}", "{2}", "+"]))
    return "".join(parts)


def random_forms(num_schemas: int, num_patterns: int, seed: int) -> list[StructuredOutputs]:
    """So many of each, no two alike."""
    rng = random.Random(seed)
    schemas = _drawn(num_schemas, lambda: json.dumps(schema(rng), ensure_ascii=False))
    forms = [StructuredOutputs(kind="json", text=text) for text in schemas]
    patterns = _drawn(num_patterns, lambda: pattern(rng))
    return forms + [StructuredOutputs(kind="regex", text=text) for text in patterns]


def _drawn(number: int, draw: Callable[[], str]) -> list[str]:
    texts: dict[str, None] = {}
    while len(texts) < number:
        texts[draw()] = None
    return list(texts)


# Not jsonschema's own: its "time" is %H:%M:%S, and its "date" knows leap years. The engine's does
# not, as docs/http.md says.
FORMATS = jsonschema.FormatChecker(formats=())
_DATE = re.compile(r"[0-9]{4}-([0-9]{2})-([0-9]{2})")
_TIME = re.compile(
    r"([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.[0-9]+)?(?:[Zz]|[+-]([0-9]{2}):([0-9]{2}))"
)


@FORMATS.checks("date", raises=ValueError)
def _is_date(value: object) -> bool:
    """RFC 3339's full-date, with 29 February in any year."""
    if not isinstance(value, str):
        return True
    match = _DATE.fullmatch(value)
    return match is not None and bool(datetime.date(2000, int(match[1]), int(match[2])))


@FORMATS.checks("time")
def _is_time(value: object) -> bool:
    """RFC 3339's full-time, with a leap second in any minute."""
    if not isinstance(value, str):
        return True
    match = _TIME.fullmatch(value)
    if match is None:
        return False
    limits = (23, 59, 60, 23, 59)
    return all(int(part or 0) <= most for part, most in zip(match.groups(), limits, strict=True))


@FORMATS.checks("ipv4", raises=ValueError)
def _is_ipv4(value: object) -> bool:
    return not isinstance(value, str) or bool(ipaddress.IPv4Address(value).packed)


def judge(form: StructuredOutputs, text: str) -> None:
    """Raises unless the text has the form."""
    if form.kind == "json":
        jsonschema.validate(json.loads(text), json.loads(form.text), format_checker=FORMATS)
    elif form.kind == "choice":
        assert text in json.loads(form.text)
    else:
        assert re.fullmatch(form.text, text), (form.text, text)
