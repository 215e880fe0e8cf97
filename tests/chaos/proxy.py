"""A TCP proxy that misbehaves on demand: between a process of ours and Redis or PostgreSQL.

One thread with an event loop serves any number of proxies; `mode` may be changed at any time and
holds for bytes that come from then on. No netem and no root is needed.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any

CHUNK = 16_384
SLOW_BYTES_S = 1024
DELAY_S = 0.2


class Mode(StrEnum):
    PASS = "pass"
    DELAY = "delay"  # 200 ms each way
    SLOW = "slow"  # a kilobyte a second
    HOLE = "hole"  # all connections, old and new: bytes vanish, nothing is closed
    OLD_HOLE = "old hole"  # those open when the mode was set; new ones work
    ONE_WAY = "one way"  # requests pass, replies vanish
    RESET = "reset"  # every connection is closed, at once and when opened
    CUT_AFTER_REQUEST = "cut after request"  # the next request passes, then the connection ends
    CUT_IN_REPLY = "cut in reply"  # half of the next reply passes, then the connection ends


class Proxy:
    """Listens on a free port of 127.0.0.1 and passes on to `target`."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self._mode = Mode.PASS
        self._age = 0  # of connections: those made before the mode was set are old
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._call(self._set(mode))

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _set(self, mode: Mode) -> None:
        self._mode = mode
        self._age += 1
        if mode is Mode.RESET:
            for writer in list(self._writers):
                writer.transport.abort()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if self._mode is Mode.RESET:
                return
            their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(their_writer)
            age = self._age
            try:
                await asyncio.gather(
                    self._pump(reader, their_writer, age, to_server=True),
                    self._pump(their_reader, writer, age, to_server=False),
                )
            finally:
                self._writers.discard(their_writer)
                their_writer.transport.abort()
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        age: int,
        *,
        to_server: bool,
    ) -> None:
        """Raises EOFError at the end of the connection, whoever ended it."""
        while chunk := await reader.read(CHUNK):
            mode = self._mode
            if mode is Mode.HOLE or (mode is Mode.OLD_HOLE and age < self._age):
                continue
            if mode is Mode.ONE_WAY and not to_server:
                continue
            if mode is Mode.DELAY:
                await asyncio.sleep(DELAY_S)
            if mode is Mode.SLOW:
                await asyncio.sleep(len(chunk) / SLOW_BYTES_S)
            if mode is Mode.CUT_IN_REPLY and not to_server:
                chunk = chunk[: len(chunk) // 2]
            writer.write(chunk)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            cut = (mode is Mode.CUT_AFTER_REQUEST and to_server) or (
                mode is Mode.CUT_IN_REPLY and not to_server
            )
            if cut:
                self._mode = Mode.PASS
                break
        raise EOFError
