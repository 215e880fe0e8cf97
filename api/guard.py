"""Who may come in: every path but the health checks asks for a key with the scope it needs.

A route need not know of it, and none can be forgotten: what is not open is closed. In single-user
mode there is no key. Only this machine reaches the port then, but so does every page in its
browser: a call that names another host, or comes from another site's page, is refused.
"""

from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ApiError, Forbidden, Unauthorized, error_response
from api.query import read_header
from api.services import Services
from jobs import keys, logs
from jobs.addresses import is_loopback
from jobs.keys import Principal
from jobs.tenants import DEFAULT_TENANT, Quotas

OPEN_PATHS = frozenset({"/health/live", "/health/ready"})
SINGLE_USER = Principal(
    tenant=DEFAULT_TENANT, scopes=frozenset(keys.Scope), quotas=Quotas(), key_id=None
)
READING = frozenset({"GET", "HEAD"})
MAX_KEY_CHARACTERS = 256


class Guard:
    """Puts the caller into `scope["principal"]`, or refuses."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self.app = app
        self.keyring = services.keyring
        self.asks_for_keys = services.settings.auth == "keys"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope["principal"] = await self._principal(Request(scope))
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
            with logs.about(tenant=scope["principal"].tenant):
                await self.app(scope, receive, send)
            return
        await self.app(scope, receive, send)

    async def _principal(self, request: Request) -> Principal:
        if not self.asks_for_keys:
            _check_local(request)
            return SINGLE_USER
        address = request.client.host if request.client else ""
        principal = await self.keyring.principal(_key(request), address)
        needed = needed_scope(request.method, request.url.path)
        if needed not in principal.scopes:
            raise Forbidden(
                f"this call needs a key with the scope {needed}", code="insufficient_scope"
            )
        return principal


def needed_scope(method: str, path: str) -> keys.Scope:
    """What a key must be allowed to; of paths that do not exist, too."""
    if path == "/metrics":
        return keys.Scope.METRICS
    if path.startswith("/admin/"):
        return keys.Scope.ADMIN
    if path.startswith("/v1/webhook_endpoints"):
        return keys.Scope.WEBHOOKS
    return keys.Scope.READ if method in READING else keys.Scope.WRITE


def _key(request: Request) -> str:
    scheme, _, key = (read_header(request, "authorization") or "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise Unauthorized("an API key is needed: Authorization: Bearer KEY")
    if len(key) > MAX_KEY_CHARACTERS:
        raise Unauthorized("the API key is not known here, or it was revoked")
    return key


def _check_local(request: Request) -> None:
    """Raises Forbidden for what a page of the web may have sent: its own name led here (DNS
    rebinding), or it just asked the browser to."""
    host = _host_of("//" + (read_header(request, "host") or ""))
    origin = read_header(request, "origin")
    if not is_loopback(host) or (origin is not None and not is_loopback(_host_of(origin))):
        raise Forbidden(
            "without API keys (TOKENMILL_AUTH=none) only calls to and from this machine are taken",
            code="not_local",
        )


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
