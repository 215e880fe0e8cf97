"""A stand-in for the service's batches: what is uploaded is answered, a few rows each time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = Callable[[dict[str, Any]], Any]  # a body to a text, or to an error's code


def shown(body: dict[str, Any]) -> str:
    return f"{body['messages'][-1]['content']} {body['seed'] % 1000}"


class Died(Exception):
    """Of the process that asks."""


class StandIn:
    """Answers the last rows first with `backwards`; keeps no rows of batches in `emptied`."""

    def __init__(
        self, answer: Answer = shown, *, rows_at_once: int = 7, backwards: bool = False
    ) -> None:
        self.answer = answer
        self.rows_at_once = rows_at_once
        self.files: dict[str, list[dict[str, Any]]] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.by_key: dict[str, str] = {}
        self.num_answered = 0
        self.steered: list[tuple[str, str]] = []
        self.dies_in: int | None = None  # so many calls
        self.backwards = backwards
        self.emptied: set[str] = set()

    def _called(self) -> None:
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                self.dies_in = None
                raise Died

    def upload(self, path: Path) -> str:
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
        name = f"file-{len(self.files)}"
        self.files[name] = lines
        self._called()
        return name

    def create(
        self, file_id: str, endpoint: str, *, key: str, **fields: Any
    ) -> dict[str, Any] | None:
        if file_id not in self.files:
            return None
        if key not in self.by_key:
            name = f"batch_{len(self.batches)}"
            lines = self.files[file_id]
            assert {line["url"] for line in lines} == {endpoint}
            self.by_key[key] = name
            self.batches[name] = {
                "id": name, "status": "in_progress", "lines": lines, "done": {}, "errors": None,
                "fields": fields,
            }  # fmt: skip
        self._called()
        return self.batches[self.by_key[key]]

    def batch(self, batch_id: str) -> dict[str, Any] | None:
        batch = self.batches.get(batch_id)
        if batch is not None and batch["status"] == "in_progress":
            left = [row for row in range(len(batch["lines"])) if row not in batch["done"]]
            for row in sorted(left, reverse=self.backwards)[: self.rows_at_once]:
                batch["done"][row] = self._done(batch["lines"][row])
            if len(batch["done"]) == len(batch["lines"]):
                batch["status"] = "completed"
        self._called()
        if batch is None:
            return None
        num, total = len(batch["done"]), len(batch["lines"])
        return batch | {"request_counts": {"total": total, "completed": num, "failed": 0}}

    def _done(self, line: dict[str, Any]) -> dict[str, Any]:
        self.num_answered += 1
        text = self.answer(line["body"])
        told = {
            "custom_id": line["custom_id"], "error": None, "attempt": 1, "timings": {"total_s": 1.0}
        }  # fmt: skip
        if isinstance(text, int):
            error = {"code": "engine_crash" if text == 500 else "invalid_request", "message": "no"}
            return told | {"response": {"status_code": text, "body": {"error": error}}}
        choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 10, "completion_tokens": len(text)}
        body = {"choices": [choice], "usage": usage}
        return told | {"response": {"status_code": 200, "body": body}}

    def results(
        self, batch_id: str, num_seen: int, *, skip: bool = False
    ) -> tuple[list[dict[str, Any]], bool] | None:
        batch = self.batches[batch_id]
        assert skip
        rows = sorted(row for row in batch["done"] if row >= num_seen)
        self._called()
        if batch_id in self.emptied:
            return None
        more = batch["status"] == "in_progress" or len(rows) > 5
        return [{"row": row, **batch["done"][row]} for row in rows[:5]], more

    def steer(self, batch_id: str, verb: str) -> dict[str, Any]:
        self.steered.append((batch_id, verb))
        if verb == "cancel":
            self.batches[batch_id]["status"] = "cancelled"
        return self.batches[batch_id]

    def model(self, name: str) -> dict[str, Any] | None:
        return {"id": name, "fingerprint": "f" * 64}
