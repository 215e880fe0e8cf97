"""What streaming adds, from a step to a client's event; and submissions with polls beside them.

    python -m bench.streams --streams 200 --seconds 20          # SSE, a fast fake engine
    python -m bench.streams --submits 300 --seconds 20          # submissions a second, with pollers
    python -m bench.streams --database-url postgresql://…       # else a PostgreSQL of its own

A real API process, Valkey and database; the engine is this program: it claims the jobs, tells every
stream a token each step through the worker's own writer, with the time in it, and ends them. Prints
one JSON object: percentiles in milliseconds, and events lost, repeated or out of order.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

import migrations
from cli.addresses import free_port
from cli.servers import Postgres, Valkey
from jobs import claims, finishing, store
from jobs.claims import ClaimedJob
from jobs.database import Database
from jobs.finishing import JobResult
from jobs.lifecycle import JobState
from jobs.records import WorkerInfo
from jobs.settings import Settings
from jobs.streams import Run, StreamWriter

MODEL = "tiny"
CONNECTIONS = 32  # that submit
WORKER = "bench"
LEASE_S = 3600.0
READY_TIMEOUT_S = 60.0


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def in_ms(values: Sequence[float]) -> dict[str, float]:
    return {
        name: round(1000 * percentile(values, share), 2)
        for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0))
    }


class FakeEngine:
    """A worker's hands on rows and tokens, without a model."""

    def __init__(self, settings: Settings) -> None:
        self.database = Database(settings.database_url)
        self.writer = StreamWriter(settings)
        self.writer.start()
        info = WorkerInfo(
            id=WORKER, hostname="here", pid=os.getpid(), model=MODEL, max_num_seqs=4096,
            kv_tokens=1 << 30, max_model_len=4096,
        )  # fmt: skip
        with self.database.begin() as connection:
            now = self.database.clock(connection)
            claims.register_worker(connection, info, now=now, lease_s=LEASE_S)

    def claim(self, number: int) -> list[ClaimedJob]:
        """So many queued jobs, once there are as many."""
        claimed: list[ClaimedJob] = []
        while len(claimed) < number:
            with self.database.begin() as connection:
                now = self.database.clock(connection)
                queued = store.list_jobs(
                    connection, tenant="default", status=JobState.QUEUED, limit=1000
                )
                ids = [record.id for record in queued]
                claimed += claims.claim(connection, ids, worker_id=WORKER, now=now)
            time.sleep(0.05)
        return claimed

    def stream(self, jobs: Sequence[ClaimedJob], steps: int, step_s: float) -> None:
        """A token for each job in each step; its text is the time it was told."""
        begun = time.monotonic()
        for step in range(steps):
            time.sleep(max(0.0, begun + step * step_s - time.monotonic()))
            text = f"{step}:{time.monotonic()} "
            self.writer.send([Run(job.id, 0, step, [text]) for job in jobs])

    def finish(self, jobs: Sequence[ClaimedJob], tokens: int) -> None:
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
        results = [
            JobResult(
                id=job.id, fence=job.fence, state=JobState.SUCCEEDED, completion_tokens=tokens,
                output={"choices": [choice], "usage": {}}, finish_reason="length",
            )
            for job in jobs
        ]  # fmt: skip
        with self.database.begin() as connection:
            finishing.finish(connection, results, now=self.database.clock(connection))

    def close(self) -> None:
        self.writer.close(5)
        self.database.dispose()


async def listen(client: httpx.AsyncClient, latencies: list[float]) -> list[int]:
    """The numbers of the events of one stream, in order."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 400, "stream": True}
    heard = []
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.monotonic()
            text = json.loads(line[6:])["choices"][0]["text"]
            for piece in text.split():
                step, _, told_at = piece.partition(":")
                heard.append(int(step))
                latencies.append(now - float(told_at))
    return heard


async def streams(url: str, settings: Settings, number: int, seconds: float, rate: float) -> Any:
    engine = FakeEngine(settings)
    steps = int(seconds * rate)
    latencies: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        listeners = [asyncio.create_task(listen(client, latencies)) for _ in range(number)]
        jobs = await asyncio.to_thread(engine.claim, number)
        await asyncio.to_thread(engine.stream, jobs, steps, 1 / rate)
        await asyncio.to_thread(engine.finish, jobs, steps)
        heard = await asyncio.gather(*listeners)
    engine.close()
    expected = list(range(steps))
    return {
        "streams": number, "steps": steps, "steps_per_s": rate, **in_ms(latencies),
        "events": sum(map(len, heard)),
        "streams_not_exact": sum(each != expected for each in heard),
    }  # fmt: skip


class Wire(asyncio.Protocol):
    """One connection to the API. A general client takes several times the processor time of the
    calls that it measures, on the same cores."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._reply: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator or self._reply is None:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(rest) < length:
            return
        self._received.clear()
        self._reply.set_result((int(head[9:12]), bytes(rest)))
        self._reply = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None:
            self._reply.set_exception(exc or ConnectionResetError("the API closed the connection"))

    def call(self, request: bytes) -> "asyncio.Future[tuple[int, bytes]]":
        """Status and body of the reply. One call at a time."""
        assert self._transport is not None
        assert self._reply is None
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._reply


async def wires(url: str, number: int) -> list[Wire]:
    host, _, port = url.removeprefix("http://").partition(":")
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(Wire, host, int(port)) for _ in range(number)]
    return [wire for _, wire in made]


def request(method: str, path: str, body: object = None) -> bytes:
    sent = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1"]
    if sent:
        lines += ["content-type: application/json", f"content-length: {len(sent)}"]
    return "\r\n".join([*lines, "", ""]).encode() + sent


async def submits(url: str, rate: float, seconds: float, pollers: int) -> Any:
    """Submissions at a steady rate; each poller asks for the newest job again and again."""
    took: dict[str, list[float]] = {"submit": [], "poll": []}
    newest: list[str] = []
    failed = 0
    job = {"url": "/v1/completions", "body": {"model": MODEL, "prompt": "Once", "max_tokens": 4}}
    sent = request("POST", "/v1/jobs", job)
    due = iter(range(int(rate * seconds)))

    async def submit(wire: Wire) -> None:
        nonlocal failed
        for n in due:
            at = begun + n / rate
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            status, body = await wire.call(sent)
            took["submit"].append(time.monotonic() - at)  # from when it was due
            if status == 202:
                newest[:] = [json.loads(body)["id"]]
            else:
                failed += 1

    async def poll(wire: Wire, until: float) -> None:
        while time.monotonic() < until:
            if newest:
                at = time.monotonic()
                await wire.call(request("GET", f"/v1/jobs/{newest[0]}"))
                took["poll"].append(time.monotonic() - at)
            await asyncio.sleep(0.05)

    submitters, askers = await wires(url, CONNECTIONS), await wires(url, pollers)
    begun = time.monotonic()
    await asyncio.gather(
        *(submit(wire) for wire in submitters),
        *(poll(wire, begun + seconds) for wire in askers),
    )
    wall_s = time.monotonic() - begun
    return {
        "submits": len(took["submit"]), "failed": failed, "asked_per_s": rate,
        "per_s": round(len(took["submit"]) / wall_s, 1), "submit": in_ms(took["submit"]),
        "pollers": pollers, "polls": len(took["poll"]), "poll": in_ms(took["poll"]),
    }  # fmt: skip


@contextlib.contextmanager
def api(environ: dict[str, str], processes: int) -> Iterator[str]:
    """A real API, of one process or several."""
    port = free_port()
    environ = {**os.environ, **environ, "TOKENMILL_PORT": str(port)}
    command = [sys.executable, "-m", "cli.main", "api", "--processes", str(processes)]
    process = subprocess.Popen(command, env=environ)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health/live").status_code == 200:
                    break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--rate", type=float, default=20.0, help="steps a second of each stream")
    parser.add_argument("--submits", type=float, default=0.0, help="submissions a second")
    parser.add_argument("--pollers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=1, help="of the API")
    parser.add_argument("--database-url")
    parser.add_argument("--model", required=True, help="a model's folder, for its tokenizer")
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        valkey = stack.enter_context(Valkey(folder / "valkey", persist=False))
        database_url = asked.database_url or stack.enter_context(Postgres()).url
        migrations.upgrade(database_url)
        environ = {
            "DATABASE_URL": database_url,
            "REDIS_URL": valkey.url,
            "TOKENMILL_MODELS": f"{MODEL}={asked.model}",
            "TOKENMILL_DATA_DIR": str(folder),
        }
        settings = Settings.from_env(environ)
        url = stack.enter_context(api(environ, asked.processes))
        result: dict[str, Any] = {
            "database": settings.database_url.split(":")[0], "processes": asked.processes,
        }  # fmt: skip
        if asked.streams:
            work = streams(url, settings, asked.streams, asked.seconds, asked.rate)
            result["sse"] = asyncio.run(work)
        if asked.submits:
            work = submits(url, asked.submits, asked.seconds, asked.pollers)
            result["submissions"] = asyncio.run(work)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
