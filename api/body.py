"""Reads a request's body within bounds of size, time and the server's memory.

Nothing is trusted: a declared length is checked before a byte is read, an undeclared one (chunked)
while it comes in.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from api.errors import BadRequest, BodyTooLarge, Overloaded, TooSlow
from api.query import read_header

READ_TIMEOUT_S = 30.0  # for a whole body; a slow sender must not hold memory for longer
DRAIN_BYTES = 64 * 2**20  # most of a refused body that is read and thrown away
DRAIN_TIMEOUT_S = 2.0


class BodyReader:
    """Reads bodies of at most `max_bytes`, and of at most `budget_bytes` over all requests at once.

    Belongs to the event loop's thread.
    """

    def __init__(self, max_bytes: int, *, budget_bytes: int) -> None:
        assert 0 < max_bytes <= budget_bytes
        self.max_bytes = max_bytes
        self.budget_bytes = budget_bytes
        self.held_bytes = 0

    @asynccontextmanager
    async def json_body(self, request: Request) -> AsyncIterator[bytes]:
        """The body's bytes; they count against the budget until the context ends.

        Raises BadRequest (not JSON, compressed), BodyTooLarge, TooSlow, Overloaded.
        """
        _check_headers(request)
        chunks: list[bytes] = []
        held = 0
        try:
            async with aclosing(self._chunks(request)) as stream:
                async for chunk in stream:
                    if self.held_bytes + len(chunk) > self.budget_bytes:
                        raise Overloaded("too many bodies are being read", code="overloaded")
                    held += len(chunk)
                    self.held_bytes += len(chunk)
                    chunks.append(chunk)
            yield b"".join(chunks)
        finally:
            self.held_bytes -= held
            assert self.held_bytes >= 0

    async def _chunks(self, request: Request) -> AsyncGenerator[bytes, None]:
        declared = int(request.headers.get("content-length", "0"))
        stream = request.stream()
        if declared > self.max_bytes:
            if declared <= DRAIN_BYTES and "expect" not in request.headers:
                await drain(stream)
            raise self._too_large(declared)
        size = 0
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                async for chunk in stream:
                    size += len(chunk)
                    if size > self.max_bytes:
                        break
                    yield chunk
        except TimeoutError:
            raise TooSlow(f"the body took longer than {READ_TIMEOUT_S:g} s", code="slow") from None
        if size > self.max_bytes:
            await drain(stream)
            raise self._too_large(size)

    def _too_large(self, size: int) -> BodyTooLarge:
        error = BodyTooLarge(
            f"the body may have at most {self.max_bytes} bytes, got {size} or more"
        )
        error.headers["connection"] = "close"  # the rest of it may still be on the way
        return error


async def drain(stream: AsyncGenerator[bytes, None] | AsyncIterator[bytes]) -> None:
    """Read a refused body away, within bounds, so that its sender comes to read the refusal.

    Answering at once would close the socket on unread bytes, and TCP then resets the connection,
    often before the client has seen the reply.
    """
    size = 0
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            async for chunk in stream:
                size += len(chunk)
                if size > DRAIN_BYTES:
                    return
    except (TimeoutError, ClientDisconnect):
        return


def _check_headers(request: Request) -> None:
    kind, _, rest = (read_header(request, "content-type") or "").partition(";")
    charset = rest.strip().lower().replace('"', "")
    if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        raise BadRequest(
            f"content-type must be application/json in utf-8, got {kind + rest[:100]!r}",
            param="content-type",
        )
    encoding = read_header(request, "content-encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        raise BadRequest(
            f"content-encoding must be identity, got {encoding[:100]!r}", param="content-encoding"
        )
