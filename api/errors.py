"""The one shape every refusal has: {"error": {"message", "type", "param", "code"}}, all four keys.

    ApiError
    ├── BadRequest          400  the client must change `param`
    ├── Unauthorized        401  no key, or none that is known
    ├── Forbidden           403  the key may not do this
    ├── NotFound            404
    ├── TooSlow             408
    ├── Conflict            409  never retried: the reply says so to clients that retry on 409
    ├── BodyTooLarge        413
    └── Unavailable         503  try again after `Retry-After` seconds
        └── Overloaded      429

Knows HTTP only; what is wrong with a job is decided elsewhere.
"""

import math

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from jobs.quotas import NEVER, QuotaExceeded

RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 120  # OpenAI's client waits for no longer


class ApiError(Exception):
    """A refusal; `status` and the four fields of the error object."""

    status = 500
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.headers: dict[str, str] = {}


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(ApiError):
    status = 401
    type = "authentication_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")
        self.headers["www-authenticate"] = "Bearer"


class Forbidden(ApiError):
    status = 403
    type = "permission_error"


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"


class TooSlow(ApiError):
    status = 408
    type = "invalid_request_error"


class Conflict(ApiError):
    status = 409
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        # OpenAI's client repeats a 409 unless it is told not to; this conflict never goes away
        self.headers["x-should-retry"] = "false"


class BodyTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code or "body_too_large")


class Unavailable(ApiError):
    status = 503
    type = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.headers["retry-after"] = str(min(MAX_RETRY_AFTER_S, max(1, math.ceil(retry_after_s))))


class Overloaded(Unavailable):
    status = 429
    type = "rate_limit_error"


def json_response(
    content: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    # the last new line is for who reads it in a terminal
    return Response(msgspec.json.encode(content) + b"\n", status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    content = {"error": error_object(error)}
    return json_response(content, status=error.status, headers=error.headers)


def error_object(error: ApiError) -> dict[str, str | None]:
    return {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }


def internal_error() -> Response:
    """What a client sees of a fault of ours: no trace, no path, no SQL."""
    return error_response(ApiError("an internal error occurred", code="internal_error"))


def install(app: Starlette) -> None:
    """Answer every refusal of ours and of the router in the one shape."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(QuotaExceeded, _on_quota_exceeded)


def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


def _on_quota_exceeded(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuotaExceeded)
    retry_after_s = error.retry_after_s
    if retry_after_s is None:
        presenter = request.app.state.services.presenter
        retry_after_s = presenter.seconds_for(error.model, error.num_over)
    never = retry_after_s == NEVER
    refusal = Overloaded(
        str(error), code=error.quota, retry_after_s=MAX_RETRY_AFTER_S if never else retry_after_s
    )
    if never:
        refusal.headers["x-should-retry"] = "false"
    return error_response(refusal)


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    path, method = request.url.path, request.method
    if error.status_code == 404:
        refusal: ApiError = NotFound(f"no such path: {path}", code="unknown_path")
    elif error.status_code == 405:
        allowed = " and ".join(_methods(request))
        refusal = NotFound(f"{method} is not allowed here, only {allowed}", code="method")
        refusal.status = 405
        headers = {"allow": allowed.replace(" and ", ", ")}
    else:
        refusal = ApiError(str(error.detail))
        refusal.status = error.status_code
        refusal.type = "invalid_request_error" if error.status_code < 500 else "server_error"
    refusal.headers.update(headers)
    return error_response(refusal)


def _methods(request: Request) -> list[str]:
    """What this path takes. The router's own word is the first of its routes alone."""
    matching = [
        route
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    # a path of its own is no id, though it stands where one may
    own = [route for route in matching if route.path == request.url.path]
    return sorted({method for route in own or matching for method in route.methods or ()})
