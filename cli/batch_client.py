"""The calls of files and batches, for `tokenmill run-batch` and `tokenmill dataset`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote

from bulk.inputs import open_plain
from cli.client import AWAY, AWAY_PAUSE_S, Client, Refused, Unreachable

R = TypeVar("R")

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
ROWS = 1000  # of one reply
UPLOAD_S = 3600.0
ANSWER_S = 3600.0
AWAY_S = 600.0  # then whoever started the command is to start it again

Batch = dict[str, Any]  # a batch object as the service shows it


class _Read:
    """A file of which nothing is known but its next bytes: of a packed one the size is not that of
    what comes out of it."""

    def __init__(self, file: BinaryIO) -> None:
        self.read = file.read


class BatchClient(Client):
    """Waits for a service that is away. Every method raises ClientError."""

    def upload(self, path: Path) -> str:
        """The file's id; its bytes are read, and unpacked, while they are sent. Raises one of
        bulk.inputs.UNREADABLE where they cannot be."""

        def send() -> dict[str, Any]:
            with open_plain(path) as file:
                return self._call(
                    "POST", "/v1/files", data={"purpose": "batch"},
                    files={"file": (path.name, cast(BinaryIO, _Read(file)))}, timeout=UPLOAD_S,
                )  # fmt: skip

        return str(_patiently(send)["id"])

    def create(self, file_id: str, endpoint: str, *, key: str, **fields: Any) -> Batch | None:
        """The same batch for the same key; None where the service does not know the file."""
        make = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        headers = {"Idempotency-Key": key}
        try:
            return _patiently(
                lambda: self._call("POST", "/v1/batches", json=make | fields, headers=headers)
            )
        except Refused as error:
            if error.param == "input_file_id":
                return None
            raise

    def batch(self, batch_id: str) -> Batch | None:
        """None where the service does not know it."""
        try:
            return _patiently(lambda: self._call("GET", _path(batch_id)))
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def results(
        self, batch_id: str, num_seen: int, *, skip: bool = False
    ) -> tuple[list[dict[str, Any]], bool] | None:
        """Lines of the rows behind the first `num_seen`, up to one that has not ended, or past such
        ones; and whether there are more to come. None where the service keeps them no more."""
        query: dict[str, Any] = {"limit": ROWS, "skip_unfinished": "true" if skip else "false"}
        query |= {"after": num_seen - 1} if num_seen else {}
        try:
            page = _patiently(lambda: self._call("GET", f"{_path(batch_id)}/results", params=query))
        except Refused as error:
            if error.status == 404:
                return None
            raise
        return page["data"], page["has_more"]

    def steer(self, batch_id: str, verb: str) -> Batch:
        """Pause, resume or cancel it."""
        return _patiently(lambda: self._call("POST", f"{_path(batch_id)}/{verb}"))

    def model(self, name: str) -> dict[str, Any] | None:
        """None where it is not served."""
        listed = _patiently(lambda: self._list("GET", "/v1/models"))
        return next((model for model in listed if model.get("id") == name), None)

    def answer(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """One generation, waited for."""
        return _patiently(lambda: self._call("POST", url, json=body, timeout=ANSWER_S))


def _path(batch_id: str) -> str:
    return f"/v1/batches/{quote(batch_id, safe='')}"


def _patiently(call: Callable[[], R]) -> R:
    """A service that is away for a while is waited for; one that says no is not asked again."""
    until = time.monotonic() + AWAY_S
    while True:
        try:
            return call()
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and error.status not in AWAY:
                raise
            if time.monotonic() > until:
                raise
            time.sleep(AWAY_PAUSE_S)
