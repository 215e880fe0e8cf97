"""How a worker's start goes, told to the process that started it: JSON lines on a descriptor.

{"phase": "loading weights"}     what is waited for from now on
{"failed": "model tiny: …"}      why there will be no worker
"""

import contextlib
import json
import os

MOST_CHARS = 2000  # of a reason: one line of a terminal's few


class Progress:
    """Tells it on `fd`; without one, nobody."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)  # a start is not held up by a parent that does not read

    def phase(self, phase: str) -> None:
        self._tell({"phase": phase})

    def failed(self, reason: str) -> None:
        self._tell({"failed": " ".join(reason.split())[:MOST_CHARS]})

    def _tell(self, line: dict[str, str]) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # no one reads, or not fast enough
                os.write(self._fd, json.dumps(line).encode() + b"\n")
