"""Lines of a file of bytes, in constant memory, whatever the file holds."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Line:
    number: int  # from 1, blank ones counted
    start: int  # bytes of the file up to this line
    end: int  # and to the next
    data: bytes | None  # None: too long


def read_lines(
    file: BinaryIO, max_bytes: int, *, offset: int = 0, blanks: bool = False
) -> Iterator[Line]:
    """Lines that say something, from `offset` on, and with `blanks` those that do not, whose data
    is empty. A line ends with a newline alone: U+2028 and its like are text. Numbers count from
    where the reading began."""
    file.seek(offset)
    return lines_of(file, max_bytes, offset=offset, blanks=blanks)


def lines_of(
    file: BinaryIO, max_bytes: int, *, offset: int = 0, blanks: bool = False
) -> Iterator[Line]:
    """The same of a file that stands at `offset`, and need not be one that can be wound back."""
    number, end = 0, offset
    while data := file.readline(max_bytes + 2):
        number, start, end = number + 1, end, end + len(data)
        too_long = not data.endswith(b"\n") and len(data) == max_bytes + 2
        while too_long and (more := file.readline(READ_BYTES)):
            end += len(more)
            if more.endswith(b"\n"):
                break
        if start == 0:
            data = data.removeprefix(codecs.BOM_UTF8)
        data = data.strip(b" \t\r\n")
        if too_long or len(data) > max_bytes:
            yield Line(number, start, end, None)
        elif data or blanks:
            yield Line(number, start, end, data)
