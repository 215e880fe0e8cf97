"""What a run of the bench has found, kept as it goes, within the time that it has."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LATE_S = 10.0  # past the budget, a section that does not come back is cut off
CUT_OFF = 3  # exit status then


class Report:
    """What was found, section by section; a section that fails or is left out says so.

    A section is rows, or one thing. Each row is kept as it comes, so that a stop loses none.
    """

    def __init__(self, budget_s: float, path: Path) -> None:
        self.found: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}  # that sections took
        self.path = path
        self._ends_at = time.perf_counter() + budget_s
        self._running = ""
        self._lock = threading.Lock()

    @property
    def left_s(self) -> float:
        return self._ends_at - time.perf_counter()

    def section(self, name: str, run: Callable[[], Any], *, needs_s: float) -> Any:
        """Run it if so much time is left; rows stop coming when none is."""
        if self.left_s < needs_s:
            self._keep(name, {"left_out": f"{self.left_s:.0f} s left, {needs_s:.0f} needed"})
            return None
        self._running = name
        started = time.perf_counter()
        try:
            result = run()
            if isinstance(result, Iterator):
                result = self._rows(name, result)
        except Exception as error:  # noqa: BLE001 (the other sections are worth their time)
            failed = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            had = self.found.get(name)
            result = [*had, failed] if isinstance(had, list) else failed
        self.seconds[name] = time.perf_counter() - started
        self._running = ""
        self._keep(name, result)
        print(f"{name}: {self.seconds[name]:.1f} s, {self.left_s:.0f} s left", file=sys.stderr)
        return result

    def keep_time(self) -> None:
        """See to it that the process ends in time even where a section never comes back."""
        watch = threading.Timer(max(0.0, self.left_s) + LATE_S, self._cut_off)
        watch.daemon = True
        watch.start()

    def table(self) -> list[str]:
        """A line for each row, its name first."""
        lines = []
        for section, rows in self.found.items():
            took = f" ({self.seconds[section]:.1f} s)" if section in self.seconds else ""
            lines.append(f"## {section}{took}")
            for row in rows if isinstance(rows, list) else [rows]:
                cells = [
                    f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                    for key, value in row.items()
                ]
                lines.append("  " + "  ".join(cells))
        return lines

    def _rows(self, name: str, rows: Iterator[Any]) -> list[Any]:
        found: list[Any] = []
        for row in rows:
            found.append(row)
            self._keep(name, found)
            if self.left_s <= 0:
                found.append({"left_out": "the rest: no time is left"})
                break
        return found

    def _keep(self, name: str, result: Any) -> None:
        with self._lock:
            self.found[name] = result
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_suffix(".part")
            kept = {**self.found, "seconds": self.seconds}
            beside.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            beside.replace(self.path)

    def _cut_off(self) -> None:
        try:
            name = self._running or "the end"
            had = self.found.get(name)
            cut = {"cut_off": f"it had not come back {LATE_S:.0f} s past the budget"}
            self._keep(name, [*had, cut] if isinstance(had, list) else cut)
            print("\n".join(self.table()))
            print(self.path, flush=True)
        finally:  # whatever the disk says
            os._exit(CUT_OFF)
