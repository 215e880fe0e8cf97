r"""GBNF, told so that llguidance's translation into Lark keeps it.

It takes the zeros off an escape, so that "\u00e9ab" would be one other character, and hands a class
on as one of a regular expression, where `&&`, `--` and `~~` are operators.
"""

import re

_PIECE = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_CHARACTER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
_OPERATORS = "&-~"


def plain_gbnf(grammar: str) -> str:
    """The grammar with literals and classes that mean the same everywhere."""
    return _PIECE.sub(lambda match: _plain(match.group()), grammar)


def _plain(piece: str) -> str:
    if piece.startswith("#"):
        return piece
    characters = _CHARACTER.findall(piece[1:-1])
    if piece.startswith('"'):
        return '"' + "".join(map(_unescaped, characters)) + '"'
    return f"[{_plain_class(characters)}]"


def _unescaped(character: str) -> str:
    """An escape of a number as the character, or as one of two digits."""
    if len(character) < 6:
        return character
    code = int(character[2:], 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:  # none: to be refused as it is
        return character
    return chr(code) if code > 0xFF else f"\\x{code:02x}"


def _plain_class(characters: list[str]) -> str:
    parts = characters[:1] if characters[:1] == ["^"] else []
    rest = characters[len(parts) :]
    while rest:
        size = 3 if len(rest) > 2 and rest[1] == "-" else 1  # a range, or itself
        ends = [
            f"\\x{ord(end):02x}" if end in _OPERATORS else _unescaped(end) for end in rest[:size:2]
        ]
        parts.append("-".join(ends))
        rest = rest[size:]
    return "".join(parts)
