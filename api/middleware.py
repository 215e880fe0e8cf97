"""The outermost layer: an id on every reply, and no trace of ours in any of them.

Plain ASGI, because Starlette's own catch-all stands outside everything a framework can add.
"""

import logging
import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import BadRequest, error_response, internal_error
from jobs import logs

logger = logging.getLogger(__name__)


def new_request_id() -> str:
    """Always made here: a client's own `x-request-id` may repeat, ours must not."""
    return f"req_{uuid.uuid4().hex}"


class Edge:
    """Stamps `x-request-id` on each reply and turns an unforeseen exception into a plain 500."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = new_request_id()
        started = False

        async def stamped(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        with logs.about(request_id=request_id):
            try:
                if _has_two_lengths(scope):
                    await _two_lengths()(scope, receive, stamped)
                    return
                await self.app(scope, receive, stamped)
            except ClientDisconnect:
                return  # nobody is there to answer
            except Exception:
                logger.exception("request %s failed: path=%r", request_id, scope["path"])
                if started:
                    raise  # half a reply is out: only a broken connection tells the client so
                await internal_error()(scope, receive, stamped)


def _has_two_lengths(scope: Scope) -> bool:
    """Whether a proxy in front may have read another length than we do (RFC 9112, 6.1)."""
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}


def _two_lengths() -> Response:
    error = BadRequest(
        "content-length and transfer-encoding must not both be given",
        param="content-length",
        code="invalid_http",
    )
    error.headers["connection"] = "close"  # where the next request begins is in doubt
    return error_response(error)
