"""Our own connections to Redis, and its address in the forms its two clients want.

redis-py says unix:///SOCKET?db=N where kombu says redis+socket:///SOCKET?virtual_host=N. Settings
take either. Time limits are short everywhere: Redis being away must not hold up anyone for long.
"""

from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 2.0

_OPTIONS: dict[str, Any] = {
    "socket_connect_timeout": CONNECT_TIMEOUT_S,
    "socket_timeout": REPLY_TIMEOUT_S,
    "socket_keepalive": True,
    "health_check_interval": 5,
}


def connect(url: str, *, decode: bool = True) -> "redis.Redis":
    """A client that fails within three seconds and never retries by itself: its callers do.

    With `decode` false it gives bytes; else what is not UTF-8 in a reply is a UnicodeDecodeError.
    """
    options = _options(url) | {"decode_responses": decode}
    return redis.Redis.from_url(client_url(url), retry=Retry(NoBackoff(), 0), **options)


def connect_async(url: str, *, decode: bool = True) -> "redis.asyncio.Redis":
    """The same for an event loop."""
    options = _options(url) | {"decode_responses": decode}
    return redis.asyncio.Redis.from_url(
        client_url(url), retry=AsyncRetry(NoBackoff(), 0), **options
    )


def client_url(url: str) -> str:
    """As redis-py wants it."""
    return _reformed(url, "unix", {"virtual_host": "db"})


def broker_url(url: str) -> str:
    """As kombu wants it."""
    return _reformed(url, "redis+socket", {"db": "virtual_host"})


def _reformed(url: str, scheme: str, names: dict[str, str]) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("unix", "redis+socket"):
        return url
    query = urlencode([(names.get(name, name), value) for name, value in parse_qsl(parts.query)])
    # not urlunsplit: it drops the empty host in front of the path for schemes it does not know
    return f"{scheme}://{parts.netloc}{parts.path}" + (f"?{query}" if query else "")


def _options(url: str) -> dict[str, Any]:
    if urlsplit(url).scheme in ("unix", "redis+socket"):
        return {
            name: value
            for name, value in _OPTIONS.items()
            if name not in ("socket_connect_timeout", "socket_keepalive")
        }
    return _OPTIONS
