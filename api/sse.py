"""Server-sent events, and the reply that carries them."""

from collections.abc import AsyncIterator

import msgspec
from starlette.responses import StreamingResponse

from api.errors import ApiError, error_object

DONE = b"data: [DONE]\n\n"
STILL_HERE = b": still here\n\n"  # so that proxies don't take a quiet stream for a dead one


def data(content: object) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(content)


def event(name: str, content: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))


def error(refusal: ApiError) -> bytes:
    """What went wrong after the reply had begun; OpenAI's clients raise it."""
    return data({"error": error_object(refusal)})


def response(frames: AsyncIterator[bytes], headers: dict[str, str]) -> StreamingResponse:
    # the last header is for proxies that would keep a reply back until it is whole
    headers = {"cache-control": "no-store", "x-accel-buffering": "no", **headers}
    return StreamingResponse(frames, media_type="text/event-stream", headers=headers)
