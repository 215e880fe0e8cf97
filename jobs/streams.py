"""What a job's tokens say, while they are made: from workers to whoever streams them, over Redis.

A run is some tokens of one sample that follow each other, each with its piece of the reply. Its
place is told by the tokens' offsets, so a run that comes twice, or is made again by a later
attempt, is known for what it is. One Redis stream takes the runs of a whole engine step in one
entry: a command for each token would cost more than the tokens. The stream is short and may be
lost; a run of a job that is kept is in its row with the next beat, and at its end.
"""

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

import msgspec
import redis
import redis.asyncio

from jobs.redis_client import connect, connect_async
from jobs.rows import encode
from jobs.settings import Settings

logger = logging.getLogger(__name__)

RECONNECT_S = 1.0
MAX_WAITING_STEPS = 1024  # of one worker, for a Redis that is slow or away; the oldest are dropped
_BLOCK_MS = 1000
_PAGE = 256  # entries read at once
_FIELD = "runs"


class StreamMode(StrEnum):
    LIVE = "live"  # for who listens now
    KEPT = "kept"  # also in the row, for who asks later


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one token adds to the reply of its sample; mostly a few letters of content."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments, each whole
    logprobs: Any = None  # of this token, in the endpoint's own shape

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs is not None)


class Run(msgspec.Struct, frozen=True, array_like=True):
    """`pieces[i]` belongs to the token at offset `start` + i of the sample. A text is content."""

    job_id: str
    sample: int
    start: int
    pieces: list[str | Piece]

    @property
    def end(self) -> int:
        return self.start + len(self.pieces)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Run]).decode


def plain(piece: Piece) -> str | Piece:
    """A piece in its shortest form."""
    is_text = not (piece.reasoning or piece.calls or piece.logprobs is not None)
    return piece.content if is_text else piece


def whole(piece: str | Piece) -> Piece:
    return Piece(content=piece) if isinstance(piece, str) else piece


def to_lines(runs: Sequence[Run]) -> str:
    """Runs of one job as its row keeps them: a line of JSON for each, to be added to the others."""
    return "".join(
        encode(msgspec.to_builtins([run.sample, run.start, run.pieces])) + "\n" for run in runs
    )


def from_lines(job_id: str, lines: str) -> list[Run]:
    return [
        Run(job_id, sample, start, [p if isinstance(p, str) else _piece(p) for p in pieces])
        for sample, start, pieces in map(json.loads, lines.splitlines())
    ]


def _piece(value: dict[str, Any]) -> Piece:
    calls = tuple((name, arguments) for name, arguments in value.get("calls", ()))
    return Piece(value.get("content", ""), value.get("reasoning", ""), calls, value.get("logprobs"))


class StreamWriter:
    """Sends what engine steps brought, in a thread of its own: no step waits for Redis."""

    def __init__(self, settings: Settings) -> None:
        self._key = _key(settings)
        self._max_steps = settings.stream_steps
        self._redis = connect(settings.redis_url, decode=False)
        self._steps: deque[list[Run]] = deque(maxlen=MAX_WAITING_STEPS)
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, runs: list[Run]) -> None:
        """From any thread; never blocks."""
        self._steps.append(runs)
        self._news.set()

    def close(self, timeout_s: float) -> None:
        """Send what waits, as far as there is time."""
        self._stopping.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._redis.close()

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            while self._steps:
                steps = [self._steps.popleft() for _ in range(len(self._steps))]
                while not self._send(steps):  # sent twice does no harm
                    if self._stopping.wait(RECONNECT_S):
                        return
            if self._stopping.is_set():
                return

    def _send(self, steps: list[list[Run]]) -> bool:
        try:
            pipe = self._redis.pipeline(transaction=False)
            for runs in steps:
                pipe.xadd(self._key, {_FIELD: _encode(runs)}, maxlen=self._max_steps)
            pipe.execute()
        except (redis.RedisError, OSError) as error:
            logger.warning("%d steps wait to be streamed: error=%s", len(steps), error)
            return False
        return True


async def listen(settings: Settings) -> AsyncIterator[list[Run]]:
    """The runs of step after step from now on, for ever. An empty list: some may be missing."""
    key, last_id = _key(settings), b""
    while True:
        client: Any = connect_async(settings.redis_url, decode=False)  # its types know no bytes
        try:
            newest = await client.xrevrange(key, count=1)
            newest_id = newest[0][0] if newest else b"0-0"
            if not last_id:
                last_id = newest_id
            elif _order(newest_id) < _order(last_id):
                last_id = b"0-0"  # a Redis that lost the stream may count from an earlier time
            yield []
            while True:
                found = await client.xread({key: last_id}, count=_PAGE, block=_BLOCK_MS)
                for entry_id, fields in found[0][1] if found else ():
                    last_id = entry_id
                    yield _runs(fields)
        except (redis.RedisError, OSError) as error:
            logger.warning("no tokens heard: error=%s", error)
        finally:
            with suppress(redis.RedisError, OSError):
                await client.aclose()
        await asyncio.sleep(RECONNECT_S)


async def recent(client: "redis.asyncio.Redis", settings: Settings, seconds: float) -> list[Run]:
    """The runs of the last so many seconds, of all jobs. Raises RedisError, OSError."""
    now_s, _ = await client.time()
    found: Any = await client.xrange(_key(settings), min=int((now_s - seconds) * 1000))
    return [run for _, fields in found or () for run in _runs(fields)]


def _key(settings: Settings) -> str:
    return f"{settings.key_prefix}tokens"


def _order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)


def _runs(fields: dict[bytes, bytes]) -> list[Run]:
    try:
        return _decode(fields[_FIELD.encode()])
    except (msgspec.DecodeError, KeyError):
        logger.warning("an entry of the token stream is none: fields=%d", len(fields))
        return []
