"""What goes on behind a scenario's clients: a batch of rows, and who is told that it has ended."""

import json
import random
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.chaos.history import CALL_S, History
from tests.chaos.oracle import Oracle

AGAIN_S = 0.3


class Receiver:
    """Of webhooks."""

    def __init__(self) -> None:
        self.events: dict[str, list[str]] = {}  # ids of those that came, by what they are about
        events = self.events

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                about = json.loads(body)["data"]["id"]
                events.setdefault(about, []).append(self.headers["webhook-id"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> "Receiver":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Batch:
    """Handed in by a thread that asks until it is told yes, as docs/http.md tells clients to."""

    def __init__(
        self,
        url: Callable[[], str],
        oracle: Oracle,
        history: History,
        *,
        headers: dict[str, str],
        name: str,
        num_rows: int,
        tokens: tuple[int, int],
    ) -> None:
        self._url, self._headers, self._name = url, headers, name
        self.id: str | None = None  # once it is accepted
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        rng, lines = random.Random(name), []
        for i in range(num_rows):
            custom_id = f"{name}-row-{i}"
            ask = history.asks[custom_id] = oracle.draw(rng, *tokens)
            history.rows.add(custom_id)
            line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
            lines.append(json.dumps(line | {"body": ask.body()}) + "\n")
        self._file = "".join(lines).encode()

    def __enter__(self) -> "Batch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        file_id = self._ask(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("rows.jsonl", self._file)}
        )
        make = {"input_file_id": file_id, "endpoint": "/v1/completions"}
        self.id = self._ask(
            "/v1/batches",
            json=make | {"completion_window": "24h"},
            headers={"Idempotency-Key": f"{self._name}-batch"},
        )

    def _ask(
        self, path: str, *, headers: dict[str, str] | None = None, **given: object
    ) -> str | None:
        while not self._stop.is_set():
            try:
                reply = httpx.post(
                    f"{self._url()}{path}",
                    headers=self._headers | (headers or {}),
                    timeout=CALL_S,
                    trust_env=False,
                    **given,  # type: ignore[arg-type]
                )
                if reply.is_success:
                    return str(reply.json()["id"])
                assert reply.status_code >= 500, reply.text
            except (httpx.HTTPError, ValueError):
                pass
            self._stop.wait(AGAIN_S)
        return None
