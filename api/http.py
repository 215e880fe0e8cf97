"""HTTP/1.1 below the application: uvicorn's protocol by h11, refusing in our one shape.

Always h11, which uvicorn brings along: its other parser, where it happens to be installed, draws
the line between valid and invalid requests elsewhere.
"""

import contextlib

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.errors import BadRequest, error_response
from api.middleware import new_request_id


class Protocol(H11Protocol):
    """Answers what is no request at all as `api.errors` says, and closes the connection."""

    def send_400_response(self, msg: str) -> None:
        reply = error_response(BadRequest(msg, code="invalid_http"))
        headers = [
            *reply.raw_headers,
            (b"x-request-id", new_request_id().encode()),
            (b"connection", b"close"),
        ]
        start = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        # refused by h11 where half a reply is out: only the broken connection then tells
        with contextlib.suppress(h11.LocalProtocolError):
            for event in (start, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
