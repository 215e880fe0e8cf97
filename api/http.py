"""HTTP/1.1 below the application: uvicorn's protocol by h11, refusing in our one shape.

Always h11, which uvicorn brings along: its other parser, in C, takes requests without a host and
headers of any size. What h11 costs is bounded here instead: a body in tiny chunks is refused, and a
connection that sends no request in time is closed.
"""

import asyncio
import contextlib
import http
import socket
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from api.errors import ApiError, BadRequest, TooSlow, error_response
from api.middleware import new_request_id

HEAD_TIMEOUT_S = 20.0  # from a connection's begin until its first request's headers are there
UNREAD_TIMEOUT_S = 60.0  # a reply of which a client takes nothing for so long ends the connection
# a chunk costs h11 some 30 µs however small it is: so many are free, more must be of some size
FREE_CHUNKS = 1024
CHUNK_BYTES = 128


class Parser(h11.Connection):
    """The server's side of one connection."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self._num_chunks = 0  # of this request
        self._num_bytes = 0
        self.refusal: str | None = None  # what uvicorn does not tell, who has one text for all

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // CHUNK_BYTES:
                self.refusal = "The body comes in tiny chunks."
                raise h11.RemoteProtocolError(self.refusal)
        return event

    def reply(self, error: ApiError) -> bytes:
        """The whole refusal, saying that the connection ends; nothing where half a reply is out."""
        reply = error_response(error)
        headers = [
            *reply.raw_headers,
            (b"x-request-id", new_request_id().encode()),
            (b"connection", b"close"),
        ]
        reason = http.HTTPStatus(error.status).phrase.encode()
        start = h11.Response(status_code=error.status, headers=headers, reason=reason)
        sent = b""
        # refused by h11 where half a reply is out: only the broken connection then tells
        with contextlib.suppress(h11.LocalProtocolError):
            for event in (start, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
                sent += self.send(event) or b""
        return sent


class Protocol(H11Protocol):
    """Answers what is no request at all as `api.errors` says, and closes the connection."""

    conn: Parser

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = Parser()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_TIMEOUT_S * 1000)
        )
        self.timeout_keep_alive_task = self.loop.call_later(
            HEAD_TIMEOUT_S, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        # uvicorn's own ends the time limit at the first byte; here the whole of the headers does
        self.conn.receive_data(data)
        self.handle_events()

    def timeout_keep_alive_handler(self) -> None:
        """No request has come within the time, or a part of one."""
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(TooSlow("the request's headers took too long", code="slow"))
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest(self.conn.refusal or msg, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        self.transport.write(self.conn.reply(error))
        self.transport.close()
